"""Lower bounds on the objective of every plan, with any number of slices: the allotment program and closed forms.

Sets and data: components c with L_c layers; choices k of c with n_ck devices and t_ck ms a layer; edges E; N devices.
Variables: x_ck whole layers of c run in choice k; s_c >= 0 start of c; C latest end; R reduction time.

    minimise C + R
    sum_k x_ck = L_c                                                       every layer once
    T_c = sum_k t_ck x_ck,   A_c = sum_k n_ck t_ck x_ck                    time and area
    sum_c A_c <= N C                                                       total area                 `_area`
    s_c + T_c <= s_d for (c, d) in E,   s_c + T_c <= C                     per-path time              `_paths`
    sum_{a before c} A_a <= N s_c,  sum_{d after c} A_d <= N (C - s_c - T_c)   room before and after   `_room`
    sum_{c: head_c >= h, tail_c >= q} A_c <= N (C - h - q)                 head and tail windows      `_windows`
    sum_p S_p + activations <= N M,  S_p >= sum_k n_ck state_ck x_ck       total memory               `_memory`
    N R >= sum_p G_p,  G_p >= sum_k 2 (n_ck - 1) g_ck / bandwidth x_ck     total reduction            `_reduction`

head_c and tail_c are the least times before c can start and after it has ended, from the fastest choices and from the
area of all ancestors or descendants. In two phases the same variables count forward and backward together; a window
then runs from the forward heads to the backward heads, since both ends of the plan belong to the first components,
and there is no room constraint. Transfers are left out: that only lowers the bound.

The bound is what HiGHS proves for the program (or its linear relaxation), less a margin for floating-point error.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pulp

from solver_plan.solving import Clock, solve_milp
from solver_plan.wavefront.instance import Instance

FLOATING_POINT_MARGIN = 2e-7
"""Relative; HiGHS's feasibility tolerance is 1e-7."""
MOST_WINDOWS = 400
MOST_LEVELS = 400
"""Heads, and tails, that windows begin and end at."""
MOST_ROOMS = 20_000
"""Coefficients in room constraints, beyond which they are left out."""
PROGRAM = "allotment"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A proven bound, with the layers that each choice gets in the solution of the program."""

    value_ms: float | None
    """None: nothing was proven in the time."""
    source: str
    layers: tuple[tuple[float, ...], ...] | None
    """Per component and choice; None where no solution was found."""
    infeasible: bool = False
    """No plan can exist: the total memory does not suffice."""


def closed_form_bound(instance: Instance) -> float:
    """Return the larger of the least total area over the devices and the fastest path."""
    heads, tails = heads_and_tails(instance)
    path = max(heads[c] + instance.shortest_ms(c) + tails[c] for c in instance.components)
    area = sum(least_area(instance, c) for c in instance.components) / instance.devices
    return max(path, area) * (1 - 1e-12)


def least_area(instance: Instance, component: int) -> float:
    """Return the least devices times ms that a component takes."""
    return instance.layers[component] * min(choice.devices * choice.layer_ms for choice in instance.choices[component])


def heads_and_tails(instance: Instance) -> tuple[list[float], list[float]]:
    """Return the least ms before each component can start and after it has ended, forward and backward together."""
    return _least_before(instance, instance.topological, instance.predecessors, 1.0), _least_before(
        instance, tuple(reversed(instance.topological)), instance.successors, 1.0
    )


def _least_before(
    instance: Instance, order: Sequence[int], before: Sequence[Sequence[int]], area_share: float
) -> list[float]:
    areas = [least_area(instance, c) for c in instance.components]
    shortest = [instance.shortest_ms(c) for c in instance.components]
    least = [0.0] * len(instance.layers)
    for component, ancestors in _all_before(order, before):
        for other in before[component]:
            least[component] = max(least[component], least[other] + shortest[other])
        area = sum(areas[other] for other in ancestors) / instance.devices
        least[component] = max(least[component], area * area_share)
    return least


def _all_before(order: Sequence[int], before: Sequence[Sequence[int]]) -> Iterator[tuple[int, list[int]]]:
    """Yield each component in topological order, with all that come before it, direct or not, in ascending order."""
    members = [0] * len(before)  # bit c: component c comes before
    for component in order:
        for other in before[component]:
            members[component] |= members[other] | 1 << other
        yield component, _bits(members[component])


def _bits(mask: int) -> list[int]:
    """Return the places of the bits that are set, ascending."""
    return [place for place, bit in enumerate(reversed(f"{mask:b}")) if bit == "1"]


class AllotmentProgram:
    """The allotment program of an instance."""

    def __init__(self, instance: Instance, whole: bool) -> None:
        self.instance = instance
        self.program = pulp.LpProblem(PROGRAM, pulp.LpMinimize)
        kind = pulp.LpInteger if whole else pulp.LpContinuous
        self.layers = [
            [pulp.LpVariable(f"x_{c}_{k}", 0, instance.layers[c], kind) for k in range(len(instance.choices[c]))]
            for c in instance.components
        ]
        self.latest = pulp.LpVariable("C", 0)
        self.reduction = pulp.LpVariable("R", 0)
        self.program += self.latest + self.reduction
        for c in instance.components:
            self.program += pulp.lpSum(self.layers[c]) == instance.layers[c]
        self.time = [
            pulp.LpAffineExpression([(x, k.layer_ms) for x, k in zip(self.layers[c], instance.choices[c], strict=True)])
            for c in instance.components
        ]
        self.area = []
        for c in instance.components:
            # a variable of its own keeps the rows below sparse
            area = pulp.LpVariable(f"A_{c}", 0)
            terms = [(x, k.devices * k.layer_ms) for x, k in zip(self.layers[c], instance.choices[c], strict=True)]
            self.program += pulp.LpAffineExpression(terms) == area
            self.area.append(area)
        self._area()
        self._paths()
        self._windows()
        self._memory()
        self._reduction()

    def _area(self) -> None:
        self.program += pulp.lpSum(self.area) <= self.instance.devices * self.latest

    def _paths(self) -> None:
        instance = self.instance
        start = [pulp.LpVariable(f"s_{c}", 0) for c in instance.components]
        for c in instance.components:
            for after in instance.successors[c]:
                self.program += start[c] + self.time[c] <= start[after]
            if not instance.successors[c]:
                self.program += start[c] + self.time[c] <= self.latest
        if not instance.two_phases:
            self._room(start)

    def _room(self, start: Sequence[pulp.LpVariable]) -> None:
        instance = self.instance
        used = 0
        for order, before, early in (
            (instance.topological, instance.predecessors, True),
            (tuple(reversed(instance.topological)), instance.successors, False),
        ):
            for c, found in _all_before(order, before):
                if used > MOST_ROOMS:
                    break
                if len(found) < 2:
                    continue
                used += len(found)
                area = pulp.lpSum(self.area[other] for other in found)
                room = start[c] if early else self.latest - start[c] - self.time[c]
                self.program += area <= instance.devices * room

    def _windows(self) -> None:
        instance = self.instance
        heads, tails = self._window_times()
        groups: dict[int, float] = {}  # bit c: component c is inside
        late = _at_least(tails)
        for head, begun in _at_least(heads):
            for tail, ended in late:
                inside = begun & ended
                if inside and head + tail > 0:
                    groups[inside] = max(groups.get(inside, 0.0), head + tail)
        # the widest windows first: many components that lose much room
        lost = {inside: -inside.bit_count() * loss for inside, loss in groups.items()}
        least = sorted(lost.values())[:MOST_WINDOWS]
        widest = [(value, _bits(inside), groups[inside]) for inside, value in lost.items() if value <= least[-1]]
        for _, members, loss in sorted(widest)[:MOST_WINDOWS]:
            area = pulp.lpSum(self.area[c] for c in members)
            self.program += area <= instance.devices * (self.latest - loss)

    def _window_times(self) -> tuple[list[float], list[float]]:
        instance = self.instance
        if not instance.two_phases:
            return heads_and_tails(instance)
        forward = [0.0] * len(instance.layers)
        backward = [0.0] * len(instance.layers)
        for c in instance.topological:
            choices, layers = instance.choices[c], instance.layers[c]
            for after in instance.successors[c]:
                forward[after] = max(forward[after], forward[c] + layers * min(k.forward_ms for k in choices))
                backward[after] = max(backward[after], backward[c] + layers * min(k.backward_ms for k in choices))
        return forward, backward

    def _memory(self) -> None:
        instance = self.instance
        limit = instance.memory_limit
        if limit is None:
            return
        unit = max(1, limit)
        states = {}
        total = pulp.LpAffineExpression()
        for c in instance.components:
            key = instance.parameters[c]
            if key not in states:
                states[key] = pulp.LpVariable(f"S_{key}", 0)
                total += states[key]
            held = [k.devices * k.state_bytes / unit for k in instance.choices[c]]
            self.program += states[key] >= pulp.lpSum(h * x for h, x in zip(held, self.layers[c], strict=True))
            kept = [k.devices * k.activation_bytes / unit for k in instance.choices[c]]
            total += pulp.lpSum(a * x for a, x in zip(kept, self.layers[c], strict=True))
        # check allows a byte for each slice
        slack = instance.devices * sum(instance.layers) / unit
        self.program += total <= instance.devices * limit / unit + slack

    def _reduction(self) -> None:
        instance = self.instance
        cluster = instance.cluster
        reduced = {}
        for c in instance.components:
            terms = []
            for x, choice in zip(self.layers[c], instance.choices[c], strict=True):
                across = cluster.ms_to_move(2 * (choice.devices - 1) * choice.gradient_bytes, False)
                within = cluster.ms_to_move(2 * (choice.devices - 1) * choice.gradient_bytes, True)
                fits = choice.devices <= cluster.devices_per_node
                least = min(across, within) if fits else across
                if least > 0:
                    terms.append((x, least))
            if terms:
                key = instance.parameters[c]
                if key not in reduced:
                    reduced[key] = pulp.LpVariable(f"G_{key}", 0)
                self.program += reduced[key] >= pulp.LpAffineExpression(terms)
        if reduced:
            self.program += pulp.lpSum(reduced.values()) <= instance.devices * self.reduction


def _at_least(values: Sequence[float]) -> list[tuple[float, int]]:
    """Return distinct values, evenly chosen where they are many, each with the places where a value is at least it."""
    order = sorted(range(len(values)), key=lambda place: -values[place])
    found: dict[float, int] = {}
    mask = 0
    for place in order:
        mask |= 1 << place
        found[values[place]] = mask
    step = -(-len(found) // MOST_LEVELS)
    return list(found.items())[::-1][::step]


def allotment_bound(
    instance: Instance, clock: Clock, *, whole: bool, limit: float | None = None, node_limit: int | None = None
) -> Bound:
    """Return the bound of the allotment program.

    Parameters
    ----------
    instance
        The problem.
    clock
        Budget.
    whole
        Whole layers (an integer program) or fractions (its linear relaxation, a weaker bound, fast).
    limit
        Use at most this much, in the clock's unit; what the solver has proven by then is the bound.
    node_limit
        Search at most this many nodes: a limit that does not depend on the machine.
    """
    source = f"{'milp' if whole else 'lp'}:{PROGRAM}"
    if clock.expired:
        return Bound(value_ms=None, source=source, layers=None)
    built = AllotmentProgram(instance, whole)
    outcome = solve_milp(built.program, clock, limit=limit, gap_limit=1e-6, integrality=whole, node_limit=node_limit)
    if outcome.status == "infeasible":
        return Bound(value_ms=None, source=source, layers=None, infeasible=True)
    layers = None
    if outcome.objective is not None:
        layers = tuple(tuple(float(x.value() or 0.0) for x in each) for each in built.layers)
    value = None if outcome.bound is None else outcome.bound * (1 - FLOATING_POINT_MARGIN)
    return Bound(value_ms=value, source=source, layers=layers)


def least_area_allotments(
    instance: Instance, clock: Clock, stretches: Sequence[float]
) -> Iterator[tuple[tuple[float, ...], ...]]:
    """Yield fractional layers per component and choice of least total area, for each stretch of the relaxation's end.

    Ends with the budget, and at once where the relaxation has no solution.
    """
    if clock.expired:
        return
    built = AllotmentProgram(instance, whole=False)
    if solve_milp(built.program, clock, gap_limit=0.0, integrality=False).objective is None:
        return
    shortest_ms = float(built.latest.value())
    built.program.setObjective(pulp.lpSum(built.area))
    ends_in_time = built.latest <= shortest_ms
    built.program += ends_in_time
    for stretch in stretches:
        ends_in_time.changeRHS(shortest_ms * stretch)
        if solve_milp(built.program, clock, gap_limit=0.0, integrality=False).objective is not None:
            yield tuple(tuple(float(x.value() or 0.0) for x in each) for each in built.layers)
