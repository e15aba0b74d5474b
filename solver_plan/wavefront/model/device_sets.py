"""The constraint program of small problems: each piece picks one of all device sets.

Pieces i, consecutive layers of a component; options o of a piece: a choice and a set S_o of as many devices. Data: t_o
ticks, a_o activation bytes; blocks p of layers of a set of weights with the pieces that use them; N devices in nodes,
M bytes of a device.
Variables: x_io piece i runs in option o; start s_i, end e_i (and s'_i, e'_i of the backward); for each dependency
(i, j) with data: q_S both run on S, m_n both run within node n; for weights that several pieces use: w_pU devices U
hold them; C latest end; R reduction time. On device d: u_id = sum_{o: d in S_o} x_io.

    minimise C + R
    sum_o x_io = 1,   e_i = s_i + sum_o t_o x_io <= C                                            `_piece`
    on each device the pieces with u_id = 1 do not overlap; their times sum to at most C         `_devices`
    q_S <= x_iS, x_jS;   m_n <= x_i, x_j within n;   sum_{S in n} q_S <= m_n,
    s_j >= e_i + intra (sum_n m_n - sum_{S in a node} q_S) + inter (1 - sum_n m_n - sum_{other S} q_S)   `add_transfer`
    sum_U w_pU = 1,   h_pd = sum_{U: d in U} w_pU >= u_id for its users;  h_pd = u_id for one user       `_reduction`
    sum_p state_p h_pd + sum_i sum_o a_o x_io <= M for every d                                   `_holding`
    R >= sum_p sum_{U: d in U} r_p(U) w_pU for every d                                           `_holding`
    one piece runs on one set of each class of sets that renumbering devices makes equal         `_symmetry`

Against the program of `devices` everything that depends on a set is linear in one Boolean of that set, so that the
linear relaxation knows transfers, reductions and memory. There are 2^N sets: at most `MOST_DEVICES` devices.

With a piece for each layer and all sets the program allows every plan. Durations, transfers, sizes and reductions are
rounded down, so that its bound then holds for every plan; plans are timed again exactly.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ortools.sat.python import cp_model

from solver_plan.wavefront.instance import Instance
from solver_plan.wavefront.model.pieces import PieceSpec, blocks, dependencies, pieces_of
from solver_plan.wavefront.model.ticks import floor_ticks, ticks_per_ms
from solver_plan.wavefront.schedule import Run, Schedule

MOST_DEVICES = 4
LONGEST_TICKS = 20_000_000
"""Of the horizon, where not all times are whole at a coarser fineness: rounding down then costs a millionth or less."""
LARGEST_UNIT_COUNT = 10**7
"""Memory is counted in units of bytes so that a device has about this many."""

Devices = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Option:
    """A choice on a device set."""

    choice: int
    devices: Devices
    chosen: cp_model.IntVar


class _Piece:
    """Consecutive layers of one component."""

    def __init__(self, spec: PieceSpec) -> None:
        self.component = spec.run.component
        self.first = spec.run.first
        self.layers = spec.run.end - spec.run.first
        self.options: list[Option] = []
        self.on: list[cp_model.IntVar] = []
        self.work: list[tuple[cp_model.IntVar, cp_model.IntVar]] = []
        """Start and end of the forward, and in two phases of the backward."""


def nodes_of(instance: Instance) -> list[frozenset[int]]:
    """Return the devices of each node."""
    cluster = instance.cluster
    return [
        frozenset(d for d in range(instance.devices) if cluster.node_of(d) == node)
        for node in range(cluster.node_of(instance.devices - 1) + 1)
    ]


def add_transfer(
    model: cp_model.CpModel,
    instance: Instance,
    nodes: Sequence[frozenset[int]],
    component: int,
    before: Sequence[Option],
    after: Sequence[Option],
    fineness: int,
) -> cp_model.IntVar:
    """Return the ticks by which the output of a component delays who needs it, by the options of both.

    delay >= intra (sum_n m_n - sum_{S in a node} q_S) + inter (1 - sum_n m_n - sum_{other S} q_S)
    """
    cluster = instance.cluster
    size = instance.output_bytes[component]
    across = floor_ticks(cluster.ms_to_move(size, False), fineness)
    # where data moves faster between nodes than within, the smaller of both: a relaxation
    within = floor_ticks(cluster.ms_to_move(size, True), fineness)
    if len(nodes) > 1:
        within = min(within, across)
    delay = model.new_int_var(0, within if len(nodes) == 1 else across, "")
    if within + across == 0:
        return delay

    def both(one: Sequence[cp_model.IntVar], two: Sequence[cp_model.IntVar]) -> cp_model.IntVar:
        """Return a Boolean that can only be true where one of each is."""
        found = model.new_bool_var("")
        model.add(found <= sum(one))
        model.add(found <= sum(two))
        return found

    near = [
        both(
            [option.chosen for option in before if node.issuperset(option.devices)],
            [option.chosen for option in after if node.issuperset(option.devices)],
        )
        for node in nodes
    ]
    same_inside: list[cp_model.IntVar] = []
    outside: list[cp_model.IntVar] = []
    later: dict[Devices, list[cp_model.IntVar]] = {}
    earlier: dict[Devices, list[cp_model.IntVar]] = {}
    for options, found in ((before, earlier), (after, later)):
        for option in options:
            found.setdefault(option.devices, []).append(option.chosen)
    for devices in sorted(earlier.keys() & later.keys()):
        same = both(earlier[devices], later[devices])
        home = next((n for n, node in enumerate(nodes) if node.issuperset(devices)), None)
        (outside if home is None else same_inside).append(same)
        if home is not None:
            model.add_implication(same, near[home])
    model.add_at_most_one([*near, *outside])
    model.add_at_most_one(same_inside)
    apart = cp_model.LinearExpr.sum([*near, *outside])
    moved = cp_model.LinearExpr.sum(near) - cp_model.LinearExpr.sum(same_inside)
    model.add(delay >= within * moved + across - across * apart)
    return delay


class DeviceSetModel:
    """The program for plans no longer than `horizon_ms`, reduction included.

    Parameters
    ----------
    instance
        The problem.
    pieces
        All layers of all components, free.
    horizon_ms
        Longest plan of interest.
    """

    def __init__(self, instance: Instance, pieces: Sequence[PieceSpec], horizon_ms: float) -> None:
        assert instance.devices <= MOST_DEVICES
        self.instance = instance
        self.model = cp_model.CpModel()
        self.fineness = self._fineness(horizon_ms)
        self.horizon = floor_ticks(horizon_ms, self.fineness) + 1
        self.latest = self.model.new_int_var(0, self.horizon, "C")
        self.reduction = self.model.new_int_var(0, self.horizon, "R")
        self.model.add(self.latest + self.reduction <= self.horizon)
        self.nodes = nodes_of(instance)
        self.pieces = [self._piece(spec) for spec in pieces]
        self._devices()
        for before, after in dependencies(instance, pieces_of(instance, pieces)):
            one, two = self.pieces[before], self.pieces[after]
            delay = add_transfer(
                self.model, instance, self.nodes, one.component, one.options, two.options, self.fineness
            )
            self.model.add(two.work[0][0] >= one.work[0][1] + delay)
            if instance.two_phases:
                self.model.add(one.work[1][0] >= two.work[1][1] + delay)
        self.blocks = [(layers, [self.pieces[index] for index in users]) for layers, users in blocks(instance, pieces)]
        self._holding()
        self._symmetry()
        self.model.minimize(self.latest + self.reduction)

    def _fineness(self, horizon_ms: float) -> int:
        """Return ticks per ms: the fewest that make all times whole, else as many as a horizon may have."""
        instance = self.instance
        cluster = instance.cluster
        times = set()
        for component in instance.components:
            sizes: set[float] = {instance.output_bytes[component]}
            for choice in instance.choices[component]:
                times |= {choice.forward_ms, choice.backward_ms} if instance.two_phases else {choice.layer_ms}
                sizes |= {2 * (k - 1) / k * choice.gradient_bytes for k in range(2, instance.devices + 1)}
            times |= {cluster.ms_to_move(size, within) for size in sizes for within in (True, False)}
        coarse = ticks_per_ms(times, horizon_ms)
        if all(abs(time * coarse - round(time * coarse)) <= 1e-7 * max(1.0, time * coarse) for time in times):
            return coarse
        finest = int(LONGEST_TICKS / horizon_ms)
        # times in whole thirds of microseconds, as most profiles have them, stay whole
        return max(1, finest // 3000 * 3000 or finest)

    def _ticks(self, time_ms: float) -> int:
        return floor_ticks(time_ms, self.fineness)

    def _phase_ticks(self, piece: _Piece, choice: int) -> list[int]:
        found = self.instance.choices[piece.component][choice]
        times = (found.forward_ms, found.backward_ms) if self.instance.two_phases else (found.layer_ms,)
        return [self._ticks(each * piece.layers) for each in times]

    def _piece(self, spec: PieceSpec) -> _Piece:
        model, instance = self.model, self.instance
        piece = _Piece(spec)
        for index, choice in enumerate(instance.choices[spec.run.component]):
            for devices in itertools.combinations(range(instance.devices), choice.devices):
                piece.options.append(Option(index, devices, model.new_bool_var("")))
        model.add_exactly_one(option.chosen for option in piece.options)
        for device in range(instance.devices):
            on = model.new_bool_var("")
            model.add(on == sum(option.chosen for option in piece.options if device in option.devices))
            piece.on.append(on)
        for phase in range(2 if instance.two_phases else 1):
            start = model.new_int_var(0, self.horizon, "")
            end = model.new_int_var(0, self.horizon, "")
            length = sum(self._phase_ticks(piece, o.choice)[phase] * o.chosen for o in piece.options)
            model.add(end == start + length)
            model.add(end <= self.latest)
            piece.work.append((start, end))
        if instance.two_phases:
            model.add(piece.work[1][0] >= piece.work[0][1])
        return piece

    def _devices(self) -> None:
        model = self.model
        intervals: list[list[cp_model.IntervalVar]] = [[] for _ in range(self.instance.devices)]
        loads: list[list[cp_model.LinearExprT]] = [[] for _ in range(self.instance.devices)]
        for piece in self.pieces:
            ticks = [self._phase_ticks(piece, option.choice) for option in piece.options]
            for phase, (start, end) in enumerate(piece.work):
                sizes = {each[phase] for each in ticks}
                size = model.new_int_var_from_domain(cp_model.Domain.from_values(sorted(sizes)), "")
                for device, on in enumerate(piece.on):
                    intervals[device].append(model.new_optional_interval_var(start, size, end, on, ""))
            for option, phases in zip(piece.options, ticks, strict=True):
                for device in option.devices:
                    loads[device].append(sum(phases) * option.chosen)
        for on_device, load in zip(intervals, loads, strict=True):
            model.add_no_overlap(on_device)
            model.add(sum(load) <= self.latest)

    def _holding(self) -> None:
        """Memory of each device, and the reduction of what several devices hold."""
        model, instance = self.model, self.instance
        limit = instance.memory_limit
        room: list[list[cp_model.LinearExprT]] = [[] for _ in range(instance.devices)]
        reduced: list[list[cp_model.LinearExprT]] = [[] for _ in range(instance.devices)]
        unit = 1 if limit is None else max(1, limit // LARGEST_UNIT_COUNT)
        for layers, users in self.blocks:
            self._reduction(layers, users, reduced)
            if limit is not None:
                self._state(layers, users, unit, room)
        for piece in self.pieces:
            for option in piece.options:
                size = int(instance.choices[piece.component][option.choice].activation_bytes * piece.layers) // unit
                for device in option.devices:
                    room[device].append(size * option.chosen)
        if limit is not None:
            # check allows a byte for each slice
            most = (limit + sum(instance.layers)) // unit
            for each in room:
                model.add(sum(each) <= most)
        for each in reduced:
            model.add(sum(each) <= self.reduction)

    def _reduction_ticks(self, devices: Devices, gradient_bytes: int) -> int:
        count = len(devices)
        within = any(node.issuperset(devices) for node in self.nodes)
        return self._ticks(self.instance.cluster.ms_to_move(2 * (count - 1) / count * gradient_bytes, within))

    def _reduction(self, layers: int, users: list[_Piece], reduced: list[list[cp_model.LinearExprT]]) -> None:
        """Add what each holder of some weights spends on reducing them."""
        instance, model = self.instance, self.model
        if len(users) == 1:
            for option in users[0].options:
                time = self._reduction_ticks(option.devices, layers * self._gradient_bytes(users[0], option.choice))
                for device in option.devices:
                    reduced[device].append(time * option.chosen)
            return
        # where modes reduce different sizes, the least: a relaxation
        sizes = [min(self._gradient_bytes(piece, option.choice) for option in piece.options) for piece in users]
        if max(sizes) == 0:
            return
        sets = [
            devices
            for size in range(1, instance.devices + 1)
            for devices in itertools.combinations(range(instance.devices), size)
        ]
        holds = [model.new_bool_var("") for _ in sets]
        model.add_exactly_one(holds)
        least = min(sizes)
        for device in range(instance.devices):
            here = [(devices, held) for devices, held in zip(sets, holds, strict=True) if device in devices]
            for piece in users:
                model.add(sum(held for _, held in here) >= piece.on[device])
            more = model.new_int_var(0, self.horizon, "")
            reduced[device].append(more)
            for devices, held in here:
                time = self._reduction_ticks(devices, layers * least)
                reduced[device].append(time * held)
                for piece, size in zip(users, sizes, strict=True):
                    if size > least:
                        extra = self._reduction_ticks(devices, layers * size) - time
                        model.add(more >= extra).only_enforce_if([held, piece.on[device]])

    def _gradient_bytes(self, piece: _Piece, choice: int) -> int:
        return self.instance.choices[piece.component][choice].gradient_bytes

    def _state(self, layers: int, users: list[_Piece], unit: int, room: list[list[cp_model.LinearExprT]]) -> None:
        """Weights count once on a device, in the largest share that a piece there holds."""
        model, instance = self.model, self.instance

        def size(piece: _Piece, option: Option) -> int:
            return layers * instance.choices[piece.component][option.choice].state_bytes // unit

        largest = max(size(piece, option) for piece in users for option in piece.options)
        for device, total in enumerate(room):
            here = [sum(size(u, o) * o.chosen for o in u.options if device in o.devices) for u in users]
            if len(here) == 1:
                total.append(here[0])
                continue
            held = model.new_int_var(0, largest, "")
            for each in here:
                model.add(held >= each)
            total.append(held)

    def _symmetry(self) -> None:
        """Devices of a node are alike, and so are nodes of one size."""
        piece = max(self.pieces, key=lambda each: len(each.options))
        seen: set[tuple[tuple[int, int], ...]] = set()
        for devices in sorted({option.devices for option in piece.options}):
            pattern = tuple(sorted((len(node), len(node.intersection(devices))) for node in self.nodes))
            if pattern in seen:
                for option in piece.options:
                    if option.devices == devices:
                        self.model.add(option.chosen == 0)
            seen.add(pattern)

    def read(self, value: Callable[[cp_model.IntVar], int]) -> Schedule:
        """Return the schedule of a solution: what runs where, in order of start."""
        runs = []
        works: list[tuple[tuple[int, int, int, int], int]] = []
        position = {component: place for place, component in enumerate(self.instance.topological)}
        count = len(self.pieces)
        for index, piece in enumerate(self.pieces):
            option = next(option for option in piece.options if value(option.chosen))
            runs.append(Run(piece.component, piece.first, piece.first + piece.layers, option.choice, option.devices))
            place = position[piece.component]
            works.append(((value(piece.work[0][0]), 0, place, piece.first), index))
            if len(piece.work) > 1:
                # work of no ticks keeps the order of the backward: successors and later layers first
                works.append(((value(piece.work[1][0]), 1, -place, -piece.first), count + index))
        return Schedule(tuple(runs), tuple(work for _, work in sorted(works)))

    def milliseconds(self, ticks: int) -> float:
        """Return ticks as ms, a little less for floating-point error."""
        return ticks / self.fineness * (1 - 1e-12)
