"""The constraint program of few slices: some components have two, with open cuts and device sets; others keep theirs.

Slices j of component c; options o of a slice: a choice and a set S_o of as many devices, among the aligned blocks and
the sets that the incumbent uses. Data: t_o ticks and a_o activation bytes of a layer; L_c layers; weights p of a layer;
N devices in nodes, M bytes of a device.
Variables: x_cjo slice j runs in option o; l_cjo whole layers; b_cjm layer m is in slice j or before; start s_cj and end
e_cj (and s'_cj, e'_cj of the backward); for each dependency with data: q_S both run on S, m_n both run within node n;
h_pd device d holds weights p; C latest end; R reduction time. On device d: u_cjd = sum_{o: d in S_o} x_cjo.

    minimise C + R
    sum_o x_cjo = 1,   l_cjo <= L_c x_cjo,   sum_jo l_cjo = L_c                        `_slice`, `_cuts`
    e_cj = s_cj + sum_o t_o l_cjo <= C;   sum_m b_cjm = sum_{i <= j, o} l_cio >= 1,  b_cj falls  `_cuts`
    on each device the slices with u_cjd = 1 do not overlap; their times sum to at most C        `_devices`
    the later of two slices waits for the earlier and its data                                   `add_transfer`
    h_pd >= u_cjd where slice j runs the layer, by b_cj and b_c,j-1                              `_holding`
    sum_p state_p h_pd + sum_cjo a_o l_cjo <= M for every d                                      `_holding`
    R >= what d reduces of the weights it holds                                                  `add_reduction`

Few sets and few slices leave plans out, and times are rounded to coarse ticks: no bound comes from here. In return the
program is small: with half of the components free it is solved in a fraction of a second, without linear relaxation.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from ortools.sat.python import cp_model

from solver_plan.wavefront.costs import reduction_ms
from solver_plan.wavefront.instance import Instance
from solver_plan.wavefront.model.device_sets import Devices, Option, add_transfer, nodes_of
from solver_plan.wavefront.model.reduction import add_reduction
from solver_plan.wavefront.model.ticks import coarse_ticks_per_ms, floor_ticks, memory_unit
from solver_plan.wavefront.schedule import Run, Schedule


@dataclass(slots=True)
class _Slice:
    component: int
    run: Run | None
    """How it runs in the incumbent; None: it has no layers there."""
    options: list[Option] = field(default_factory=list)
    layers: list[cp_model.IntVar] = field(default_factory=list)
    """Of each option."""
    on: list[cp_model.IntVar] = field(default_factory=list)
    work: list[tuple[cp_model.IntVar, cp_model.IntVar]] = field(default_factory=list)
    """Start and end of the forward, and in two phases of the backward."""
    lengths: list[cp_model.IntVar] = field(default_factory=list)
    upto: list[cp_model.IntVar] = field(default_factory=list)
    """Whether each layer of the component is in this slice or an earlier one; empty for the last slice."""


class SliceModel:
    """The program around an incumbent, for plans that end, with their reduction, by `horizon_ms`.

    Parameters
    ----------
    instance
        The problem.
    schedule
        The incumbent: its device sets may be used.
    horizon_ms
        Longest plan of interest.
    free
        Components that may change; the others keep their slices and devices, but not their times.
    slices
        Of a free component, unless the incumbent has more.
    """

    def __init__(
        self, instance: Instance, schedule: Schedule, horizon_ms: float, free: frozenset[int], slices: int = 2
    ) -> None:
        self.instance = instance
        self.free = free
        self.model = cp_model.CpModel()
        self.fineness = coarse_ticks_per_ms(instance, horizon_ms)
        self.horizon = floor_ticks(horizon_ms, self.fineness) + 1
        self.latest = self.model.new_int_var(0, self.horizon, "C")
        self.reduction = self.model.new_int_var(0, self.horizon, "R")
        self.model.add(self.latest + self.reduction <= self.horizon)
        self.sets = _aligned_sets(instance, schedule)
        own: list[list[Run]] = [[] for _ in instance.components]
        for run in sorted(schedule.runs, key=lambda run: run.first):
            own[run.component].append(run)
        self.slices = [
            [self._slice(c, run) for run in [*own[c], *[None] * (slices - len(own[c]) if c in free else 0)]]
            for c in instance.components
        ]
        for c in sorted(free):
            self._cuts(c)
        self._devices()
        nodes = nodes_of(instance)
        for before, after in self._dependencies():
            delay = add_transfer(
                self.model, instance, nodes, before.component, before.options, after.options, self.fineness
            )
            self.model.add(after.work[0][0] >= before.work[0][1] + delay)
            if instance.two_phases:
                self.model.add(before.work[1][0] >= after.work[1][1] + delay)
        self._holding()
        self.model.minimize(self.latest + self.reduction)

    def _phases(self, component: int, choice: int) -> list[int]:
        """Return the ticks of a layer in each phase."""
        found = self.instance.choices[component][choice]
        times = (found.forward_ms, found.backward_ms) if self.instance.two_phases else (found.layer_ms,)
        return [round(each * self.fineness) for each in times]

    def _slice(self, component: int, run: Run | None) -> _Slice:
        model, instance = self.model, self.instance
        piece = _Slice(component, run)
        total = instance.layers[component]
        if component not in self.free:
            assert run is not None
            piece.options.append(Option(run.choice, run.devices, model.new_constant(1)))
            piece.layers.append(model.new_constant(run.end - run.first))
        for index, choice in enumerate(instance.choices[component] if component in self.free else ()):
            for devices in self.sets.get(choice.devices, []):
                chosen, layers = model.new_bool_var(""), model.new_int_var(0, total, "")
                model.add(layers <= total * chosen)
                piece.options.append(Option(index, devices, chosen))
                piece.layers.append(layers)
        model.add_exactly_one(option.chosen for option in piece.options)
        for device in range(instance.devices):
            on = model.new_bool_var("")
            model.add(on == sum(option.chosen for option in piece.options if device in option.devices))
            piece.on.append(on)
        for phase in range(2 if instance.two_phases else 1):
            start = model.new_int_var(0, self.horizon, "")
            end = model.new_int_var(0, self.horizon, "")
            length = model.new_int_var(0, self.horizon, "")
            terms = zip(piece.options, piece.layers, strict=True)
            model.add(length == sum(self._phases(component, o.choice)[phase] * layers for o, layers in terms))
            model.add(end == start + length)
            model.add(end <= self.latest)
            piece.work.append((start, end))
            piece.lengths.append(length)
        if instance.two_phases:
            model.add(piece.work[1][0] >= piece.work[0][1])
        return piece

    def _cuts(self, component: int) -> None:
        model, total = self.model, self.instance.layers[component]
        own = self.slices[component]
        model.add(sum(layers for piece in own for layers in piece.layers) == total)
        for place, piece in enumerate(own[:-1]):
            piece.upto = [model.new_bool_var("") for _ in range(total)]
            model.add(sum(piece.upto) == sum(layers for each in own[: place + 1] for layers in each.layers))
            for before, after in itertools.pairwise(piece.upto):
                model.add_implication(after, before)
            if place == 0:
                # else data could come in by way of a slice without layers
                model.add(piece.upto[0] == 1)

    def _devices(self) -> None:
        model = self.model
        intervals: list[list[cp_model.IntervalVar]] = [[] for _ in range(self.instance.devices)]
        loads: list[list[cp_model.LinearExprT]] = [[] for _ in range(self.instance.devices)]
        for piece in itertools.chain.from_iterable(self.slices):
            for (start, end), length in zip(piece.work, piece.lengths, strict=True):
                for device, on in enumerate(piece.on):
                    if piece.component not in self.free and piece.run is not None and device not in piece.run.devices:
                        continue
                    intervals[device].append(model.new_optional_interval_var(start, length, end, on, ""))
            for option, layers in zip(piece.options, piece.layers, strict=True):
                ticks = sum(self._phases(piece.component, option.choice))
                for device in option.devices:
                    loads[device].append(ticks * layers)
        for on_device, load in zip(intervals, loads, strict=True):
            model.add_no_overlap(on_device)
            model.add(sum(load) <= self.latest)

    def _dependencies(self) -> list[tuple[_Slice, _Slice]]:
        found = []
        for component, own in enumerate(self.slices):
            found += list(itertools.pairwise(own))
            found += [(own[-1], self.slices[after][0]) for after in self.instance.successors[component]]
        return found

    def _holding(self) -> None:
        """Memory of each device, and the reduction of what several devices hold."""
        model, instance = self.model, self.instance
        limit = instance.memory_limit
        unit = memory_unit(instance)
        room: list[list[cp_model.LinearExprT]] = [[] for _ in range(instance.devices)]
        reduced: list[list[cp_model.LinearExprT]] = [[] for _ in range(instance.devices)]
        sharing: dict[int, list[int]] = {}
        for component in instance.components:
            sharing.setdefault(instance.parameters[component], []).append(component)
        for users in sharing.values():
            choices = [choice for component in users for choice in instance.choices[component]]
            states = sorted({choice.state_bytes for choice in choices} - {0}) if limit is not None else []
            # where users reduce different sizes, the least
            gradient_bytes = min(choice.gradient_bytes for choice in choices)
            for layer in range(instance.layers[users[0]]):
                if gradient_bytes and self.free.isdisjoint(users):
                    certain = self._certain(users, layer, 0)
                    ms = reduction_ms(instance.cluster, gradient_bytes, sorted(certain))
                    for device in certain:
                        reduced[device].append(floor_ticks(ms, self.fineness))
                elif gradient_bytes:
                    holders = self._holders(users, layer, 0)
                    add_reduction(model, instance.cluster, gradient_bytes, holders, reduced, self.fineness)
                smaller = 0
                for state in states:
                    # those who hold at least this much of the layer hold the difference to the next smaller
                    more = state // unit - smaller // unit
                    if self.free.isdisjoint(users):
                        for device in self._certain(users, layer, state):
                            room[device].append(more)
                    else:
                        for device, held in enumerate(self._holders(users, layer, state)):
                            room[device].append(more * held)
                    smaller = state
        if limit is not None:
            for piece in itertools.chain.from_iterable(self.slices):
                for option, layers in zip(piece.options, piece.layers, strict=True):
                    size = -(-int(instance.choices[piece.component][option.choice].activation_bytes) // unit)
                    for device in option.devices:
                        room[device].append(size * layers)
            for each in room:
                model.add(sum(each) <= (limit + sum(instance.layers)) // unit)
        for terms in reduced:
            model.add(sum(terms) <= self.reduction)

    def _holders(self, users: list[int], layer: int, state_bytes: int) -> list[cp_model.IntVar]:
        """Return, per device, whether it runs a layer in a choice with at least so much state."""
        model, instance = self.model, self.instance
        certain = self._certain(users, layer, state_bytes)
        found = [model.new_constant(1) if d in certain else model.new_bool_var("") for d in range(instance.devices)]
        for component in self.free.intersection(users):
            large = {k for k, choice in enumerate(instance.choices[component]) if choice.state_bytes >= state_bytes}
            before: list[cp_model.IntVar] = []
            for piece in self.slices[component]:
                outside = [~piece.upto[layer]] if piece.upto else []
                outside += [before[layer]] if before else []
                before = piece.upto
                for device, held in enumerate(found):
                    if len(large) == len(instance.choices[component]):
                        model.add_bool_or([held, ~piece.on[device], *outside])
                        continue
                    for option in piece.options:
                        if option.choice in large and device in option.devices:
                            model.add_bool_or([held, ~option.chosen, *outside])
        return found

    def _certain(self, users: list[int], layer: int, state_bytes: int) -> frozenset[int]:
        """Return the devices that run a layer in a component that keeps its slices, with at least so much state."""
        return frozenset(
            device
            for component in users
            if component not in self.free
            for piece in self.slices[component]
            if piece.run is not None
            and piece.run.first <= layer < piece.run.end
            and self.instance.choices[component][piece.run.choice].state_bytes >= state_bytes
            for device in piece.run.devices
        )

    def read(self, value: Callable[[cp_model.IntVar], int]) -> Schedule:
        """Return the schedule of a solution: what runs where, in order of start."""
        runs: list[Run] = []
        works: list[tuple[tuple[int, int, int, int], int, int]] = []
        position = {component: place for place, component in enumerate(self.instance.topological)}
        for component, own in enumerate(self.slices):
            first = 0
            for piece in own:
                for option, layers in zip(piece.options, piece.layers, strict=True):
                    if not value(layers):
                        continue
                    place = position[component]
                    works.append(((value(piece.work[0][0]), 0, place, first), 0, len(runs)))
                    if len(piece.work) > 1:
                        # work of no ticks keeps the order of the backward: successors and later layers first
                        works.append(((value(piece.work[1][0]), 1, -place, -first), 1, len(runs)))
                    runs.append(Run(component, first, first + value(layers), option.choice, option.devices))
                    first += value(layers)
        order = tuple(phase * len(runs) + index for _, phase, index in sorted(works))
        return Schedule(tuple(runs), order)


def _aligned_sets(instance: Instance, schedule: Schedule) -> dict[int, list[Devices]]:
    """Return, per size, the aligned blocks and the sets of the incumbent."""
    found: dict[int, set[Devices]] = {}
    for run in schedule.runs:
        found.setdefault(len(run.devices), set()).add(run.devices)
    for size in {choice.devices for each in instance.choices for choice in each}:
        for first in range(0, instance.devices - size + 1, size):
            found.setdefault(size, set()).add(tuple(range(first, first + size)))
    return {size: sorted(sets) for size, sets in found.items()}
