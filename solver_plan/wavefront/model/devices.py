"""The constraint program where it matters which devices run a slice: transfers, memory, reductions, two phases.

Pieces i are consecutive layers of a component with open choice and devices, or fixed ones. Data: choices k with n_k
devices and t_k ticks, state and activation bytes; N devices in nodes; M bytes of a device.
Variables: b_ik choice; u_id piece i runs on device d; start s_i, end e_i (and s'_i, e'_i of the backward); for each
dependency (i, j): same_ij the device sets are equal, near_ij both lie in one node; h_pd device d holds block p of
layers of a set of weights; q_pm block p is held by m devices; C latest end; R reduction time.

    minimise C + R
    sum_k b_ik = 1,   sum_d u_id = sum_k n_k b_ik                                               `_piece`
    on each device the pieces with u_id = 1 do not overlap; cumulative over all                 `_capacity`
    sum_i area_i <= N C                                                                         `_capacity`
    s_j >= e_i + (0 if same_ij, intra-node transfer if near_ij, else inter-node)                `_dependency`
    s'_i >= e'_j + the same,   s'_i >= e_i                                                      `_dependency`
    h_pd >= u_id where piece i runs block p                                                     `_memory`
    sum_p state_p h_pd + sum_i activation_i u_id <= M                                           `_memory`
    R >= sum_p r_p h_pd for every d, r_p = 2 (m - 1) / m bytes / bandwidth where q_pm = 1       `add_reduction`

With a piece for each layer the program allows every plan (`whole_problem`). Durations, transfers, sizes and reductions
are rounded down, so that then its bound holds for every plan; plans are timed again exactly.
"""

from collections.abc import Callable, Iterator, Sequence

from ortools.sat.python import cp_model

from solver_plan.wavefront.instance import Instance
from solver_plan.wavefront.model.pieces import PieceSpec, blocks, dependencies, pieces_of
from solver_plan.wavefront.model.reduction import add_reduction
from solver_plan.wavefront.model.ticks import floor_ticks, memory_unit, ticks_per_ms
from solver_plan.wavefront.schedule import Run, Schedule


class _Piece:
    def __init__(self, spec: PieceSpec) -> None:
        self.spec = spec
        self.chosen: list[cp_model.IntVar] = []
        self.on: list[cp_model.IntVar] = []
        self.work: list[tuple[cp_model.IntVar, cp_model.IntVar]] = []
        """Start and end of the forward, and in two phases of the backward."""


class DeviceModel:
    """The program for pieces; the incumbent they come from ends, with its reduction, by `horizon_ms`.

    Parameters
    ----------
    instance
        The problem.
    pieces
        All layers of all components.
    horizon_ms
        Objective of the incumbent.
    break_symmetry
        Let the first free piece use the first devices of each node; the incumbent may not.
    """

    def __init__(
        self, instance: Instance, pieces: Sequence[PieceSpec], horizon_ms: float, break_symmetry: bool = False
    ) -> None:
        self.instance = instance
        self.model = cp_model.CpModel()
        self.fineness = ticks_per_ms(self._times(pieces), horizon_ms)
        self.horizon = floor_ticks(horizon_ms, self.fineness) + 1
        self.latest = self.model.new_int_var(0, self.horizon, "C")
        self.reduction = self.model.new_int_var(0, self.horizon, "R")
        self.model.add(self.latest + self.reduction <= self.horizon)
        self.pieces = [self._piece(spec) for spec in pieces]
        self._capacity()
        for before, after in dependencies(instance, pieces_of(instance, pieces)):
            self._dependency(self.pieces[before], self.pieces[after])
        self._holding()
        if break_symmetry:
            self._first_devices()
        self.model.minimize(self.latest + self.reduction)

    def _times(self, pieces: Sequence[PieceSpec]) -> Iterator[float]:
        instance = self.instance
        for spec in pieces:
            component = spec.run.component
            for choice in instance.choices[component]:
                if instance.two_phases:
                    yield choice.forward_ms
                    yield choice.backward_ms
                else:
                    yield choice.layer_ms
            yield instance.cluster.ms_to_move(instance.output_bytes[component], True)
            yield instance.cluster.ms_to_move(instance.output_bytes[component], False)

    def _piece(self, spec: PieceSpec) -> _Piece:
        model, instance = self.model, self.instance
        found = _Piece(spec)
        run = spec.run
        choices = instance.choices[run.component]
        layers = run.end - run.first
        if spec.free:
            found.chosen = [model.new_bool_var("") for _ in choices]
            found.on = [model.new_bool_var("") for _ in range(instance.devices)]
            model.add_exactly_one(found.chosen)
            counts = [choice.devices for choice in choices]
            model.add(sum(found.on) == sum(n * b for n, b in zip(counts, found.chosen, strict=True)))
        else:
            found.chosen = [model.new_constant(int(k == run.choice)) for k in range(len(choices))]
            found.on = [model.new_constant(int(d in run.devices)) for d in range(instance.devices)]
        phases = (
            [[c.forward_ms for c in choices], [c.backward_ms for c in choices]]
            if instance.two_phases
            else [[c.layer_ms for c in choices]]
        )
        for phase_ms in phases:
            ticks = [floor_ticks(ms * layers, self.fineness) for ms in phase_ms]
            start = model.new_int_var(0, self.horizon, "")
            end = model.new_int_var(0, self.horizon, "")
            model.add(end == start + sum(t * b for t, b in zip(ticks, found.chosen, strict=True)))
            model.add(end <= self.latest)
            found.work.append((start, end))
        if instance.two_phases:
            model.add(found.work[1][0] >= found.work[0][1])
        return found

    def _capacity(self) -> None:
        model, instance = self.model, self.instance
        on_device: list[list[cp_model.IntervalVar]] = [[] for _ in range(instance.devices)]
        intervals: list[cp_model.IntervalVar] = []
        demands: list[cp_model.LinearExprT] = []
        area: list[cp_model.LinearExprT] = []
        for piece in self.pieces:
            run = piece.spec.run
            choices = instance.choices[run.component]
            layers = run.end - run.first
            counts = [choice.devices for choice in choices]
            demand: cp_model.LinearExprT
            if piece.spec.free:
                demand = model.new_int_var_from_domain(cp_model.Domain.from_values(counts), "")
                model.add(demand == sum(n * b for n, b in zip(counts, piece.chosen, strict=True)))
            else:
                demand = counts[run.choice]
            for phase, (start, end) in enumerate(piece.work):
                ms = [
                    (c.backward_ms if phase else c.forward_ms) if instance.two_phases else c.layer_ms for c in choices
                ]
                ticks = [floor_ticks(each * layers, self.fineness) for each in ms]
                size = model.new_int_var_from_domain(cp_model.Domain.from_values(ticks), "")
                intervals.append(model.new_interval_var(start, size, end, ""))
                demands.append(demand)
                area.append(sum(n * t * b for n, t, b in zip(counts, ticks, piece.chosen, strict=True)))
                for device in range(instance.devices):
                    if piece.spec.free or device in run.devices:
                        on_device[device].append(
                            model.new_optional_interval_var(start, size, end, piece.on[device], "")
                        )
        for each in on_device:
            model.add_no_overlap(each)
        model.add_cumulative(intervals, demands, instance.devices)
        model.add(sum(area) <= instance.devices * self.latest)

    def _dependency(self, before: _Piece, after: _Piece) -> None:
        """The later piece waits for the earlier one and its data; in the backward the other way round."""
        model, instance = self.model, self.instance
        cluster = instance.cluster
        pairs = [(before.work[0][1], after.work[0][0])]
        if instance.two_phases:
            pairs.append((after.work[1][1], before.work[1][0]))
        for end, start in pairs:
            model.add(start >= end)
        size = instance.output_bytes[before.spec.run.component]
        within = floor_ticks(cluster.ms_to_move(size, True), self.fineness)
        across = floor_ticks(cluster.ms_to_move(size, False), self.fineness)
        one_node = cluster.devices <= cluster.devices_per_node
        least = within if one_node else min(within, across)
        if max(within, 0 if one_node else across) == 0:
            return
        same = model.new_bool_var("")
        for one, two in zip(before.on, after.on, strict=True):
            model.add(one == two).only_enforce_if(same)
        for end, start in pairs:
            model.add(start >= end + least).only_enforce_if(~same)
        if one_node or across <= within:
            return
        near = model.new_bool_var("")
        nodes = -(-cluster.devices // cluster.devices_per_node)
        in_node = [model.new_bool_var("") for _ in range(nodes)]
        model.add(sum(in_node) == near)
        for node, inside in enumerate(in_node):
            for device in range(instance.devices):
                if cluster.node_of(device) != node:
                    model.add_implication(inside, ~before.on[device])
                    model.add_implication(inside, ~after.on[device])
        for end, start in pairs:
            model.add(start >= end + across).only_enforce_if([~same, ~near])

    def _holding(self) -> None:
        """Memory of each device, and the reduction of what several devices hold."""
        model, instance = self.model, self.instance
        reduces = any(choice.gradient_bytes for each in instance.choices for choice in each)
        limit = instance.memory_limit
        if limit is None and not reduces:
            model.add(self.reduction == 0)
            return
        unit = memory_unit(instance)
        room: list[list[cp_model.LinearExprT]] = [[] for _ in range(instance.devices)]
        reduced: list[list[cp_model.LinearExprT]] = [[] for _ in range(instance.devices)]
        for layers, users in blocks(instance, [piece.spec for piece in self.pieces]):
            pieces = [self.pieces[index] for index in users]
            holds = [model.new_bool_var("") for _ in range(instance.devices)]
            for device, held in enumerate(holds):
                here = [piece.on[device] for piece in pieces]
                for on in here:
                    model.add_implication(on, held)
                model.add_bool_or([*here, ~held])
            if limit is not None:
                self._state(pieces, layers, unit, holds, room)
            gradients = [
                min(choice.gradient_bytes for choice in instance.choices[piece.spec.run.component]) for piece in pieces
            ]
            # where users reduce different sizes, the least: a relaxation
            if min(gradients) > 0:
                add_reduction(model, instance.cluster, min(gradients) * layers, holds, reduced, self.fineness)
        if limit is not None:
            for piece in self.pieces:
                self._activations(piece, unit, room)
            # check allows a byte for each slice
            slack = sum(instance.layers)
            for device_room in room:
                model.add(sum(device_room) <= (limit + slack) // unit)
        if reduces:
            for device_reduced in reduced:
                model.add(sum(device_reduced) <= self.reduction)
        else:
            model.add(self.reduction == 0)

    def _state(
        self,
        pieces: Sequence[_Piece],
        layers: int,
        unit: int,
        holds: Sequence[cp_model.IntVar],
        room: list[list[cp_model.LinearExprT]],
    ) -> None:
        model, instance = self.model, self.instance
        states = {
            choice.state_bytes * layers // unit
            for piece in pieces
            for choice in instance.choices[piece.spec.run.component]
        }
        if len(states) == 1:
            size = states.pop()
            for device, held in enumerate(holds):
                room[device].append(size * held)
            return
        for device in range(instance.devices):
            size_here = model.new_int_var(0, max(states), "")
            room[device].append(size_here)
            for piece in pieces:
                choices = instance.choices[piece.spec.run.component]
                for chosen, choice in zip(piece.chosen, choices, strict=True):
                    size = choice.state_bytes * layers // unit
                    model.add(size_here >= size).only_enforce_if([piece.on[device], chosen])

    def _activations(self, piece: _Piece, unit: int, room: list[list[cp_model.LinearExprT]]) -> None:
        model, instance = self.model, self.instance
        run = piece.spec.run
        layers = run.end - run.first
        sizes = [int(choice.activation_bytes * layers) // unit for choice in instance.choices[run.component]]
        if max(sizes) == 0:
            return
        if not piece.spec.free:
            for device in run.devices:
                room[device].append(sizes[run.choice])
            return
        size = model.new_int_var_from_domain(cp_model.Domain.from_values(sizes), "")
        model.add(size == sum(each * b for each, b in zip(sizes, piece.chosen, strict=True)))
        for device in range(instance.devices):
            here = model.new_int_var(0, max(sizes), "")
            model.add(here >= size).only_enforce_if(piece.on[device])
            room[device].append(here)

    def _first_devices(self) -> None:
        """Devices of a node are alike, and so are full nodes: the first free piece takes the first ones."""
        piece = next((piece for piece in self.pieces if piece.spec.free), None)
        if piece is None:
            return
        cluster = self.instance.cluster
        for device in range(self.instance.devices - 1):
            if cluster.node_of(device) == cluster.node_of(device + 1):
                self.model.add_implication(piece.on[device + 1], piece.on[device])

    def read(self, value: Callable[[cp_model.IntVar], int]) -> Schedule:
        """Return the schedule of a solution: what runs where, in order of start."""
        runs = []
        works: list[tuple[tuple[int, int, int, int], int]] = []
        position = {component: place for place, component in enumerate(self.instance.topological)}
        count = len(self.pieces)
        for index, piece in enumerate(self.pieces):
            run = piece.spec.run
            choice = next(k for k, b in enumerate(piece.chosen) if value(b))
            devices = tuple(d for d, u in enumerate(piece.on) if value(u))
            runs.append(Run(run.component, run.first, run.end, choice, devices))
            place = position[run.component]
            works.append(((value(piece.work[0][0]), 0, place, run.first), index))
            if len(piece.work) > 1:
                # work of no ticks keeps the order of the backward: successors and later layers first
                works.append(((value(piece.work[1][0]), 1, -place, -run.first), count + index))
        return Schedule(tuple(runs), tuple(work for _, work in sorted(works)))

    def milliseconds(self, ticks: int) -> float:
        """Return ticks as ms, a little less for floating-point error."""
        return ticks / self.fineness * (1 - 1e-12)
