"""The least period of a timeline whose orders are kept: a maximum cycle ratio.

A timeline is an order, not a clock. Once every resource's cyclic order is fixed, what is left is a graph of arcs
(u, v, weight, height), each saying ``start[v] + height * period >= start[u] + weight``; the least period is the largest
ratio of weight to height over all cycles (Cohen, Moller, Quadrat, Viot 1989), found by Newton's method: at a trial
period a longest path either exists, or a cycle that proves a larger period.

Operations are first brought into [0, period), which turns every order along a resource into arcs of height 0 and one
of height 1, and every precedence into an arc whose height is not negative.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from solver_plan.offload.operations import Iteration, Operation, Precedence
from solver_plan.offload.problem import OffloadProblem

SNAP_MS = 1e-7
"""A start this little below the origin counts as at the origin."""
CONVERGED_MS = 1e-9


class Arc(NamedTuple):
    """``start[after] + height * period >= start[before] + weight_ms``."""

    before: int
    after: int
    weight_ms: float
    height: int


class Timing(NamedTuple):
    """Start of every operation and the period."""

    starts_ms: tuple[float, ...]
    period_ms: float


class Critical(NamedTuple):
    """The cycle that sets the period: the arcs, in order; empty if a resource alone sets it."""

    arcs: tuple[Arc, ...]


def retime(
    problem: OffloadProblem, iteration: Iteration, precedences: Sequence[Precedence], timing: Timing
) -> tuple[Timing, Critical] | None:
    """Return the least period, earliest starts and critical cycle with the timeline's orders; None if they deadlock.

    The given timing need not respect the precedences in full, only its orders are used.
    """
    if timing.period_ms <= 0:
        return timing, Critical(())  # nothing takes any time
    arcs, wraps = arcs_of(problem, iteration, precedences, timing)
    work_ms: dict[str, float] = {}
    for item in iteration.operations:
        work_ms[item.resource] = work_ms.get(item.resource, 0.0) + item.duration_ms
    # a little below the work of the busiest resource, so that the critical cycle shows
    solved = least_period(len(iteration.operations), arcs, max(work_ms.values()) * (1 - 1e-9))
    if solved is None:
        return None
    starts_ms, period_ms, critical = solved
    placed = [start + wrap * period_ms for start, wrap in zip(starts_ms, wraps, strict=True)]
    return Timing(from_zero(placed), period_ms), critical


def from_zero(starts_ms: Sequence[float]) -> tuple[float, ...]:
    """Shift a timeline so that its earliest operation starts at 0."""
    first = min(starts_ms)
    return tuple(start - first for start in starts_ms)


def arcs_of(
    problem: OffloadProblem, iteration: Iteration, precedences: Iterable[Precedence], timing: Timing
) -> tuple[list[Arc], list[int]]:
    """Return the arcs of a timeline's orders, and in which period each operation starts."""
    operations, period_ms = iteration.operations, timing.period_ms
    wraps = [int((start + SNAP_MS) // period_ms) for start in timing.starts_ms]
    within = [start - wrap * period_ms for start, wrap in zip(timing.starts_ms, wraps, strict=True)]
    arcs = [
        Arc(
            item.before,
            item.after,
            operations[item.before].duration_ms + item.lag_ms,
            item.iterations + wraps[item.after] - wraps[item.before],
        )
        for item in precedences
    ]
    for resource in ("gpu", "cpu", "d2h", "h2d"):
        order = [index for index, item in enumerate(operations) if item.resource == resource and item.duration_ms > 0]
        order.sort(key=lambda index: (within[index] + SNAP_MS, index))
        for before, after in pairwise(order):
            arcs.append(Arc(before, after, operations[before].duration_ms, 0))
        if order:
            arcs.append(Arc(order[-1], order[0], operations[order[-1]].duration_ms, 1))
    arcs += _staging_arcs(problem, iteration, within, wraps, operations)
    return arcs, wraps


def _staging_arcs(
    problem: OffloadProblem,
    iteration: Iteration,
    within: list[float],
    wraps: list[int],
    operations: Sequence[Operation],
) -> list[Arc]:
    """Each copy in waits for just enough copies out, in their order, to make room."""
    layers = list(iteration.state_copy_in)
    if not layers:
        return []
    states = {layer: problem.state_bytes(layer) for layer in layers}
    # unrolled over three iterations: (start, period in which it runs, layer); the middle one is examined
    ins = sorted((within[iteration.state_copy_in[layer]], layer) for layer in layers)
    outs = sorted((within[iteration.state_copy_out[layer]], layer) for layer in layers)
    in_rank = {layer: rank for rank, (_, layer) in enumerate(ins)}
    out_rank = {layer: rank for rank, (_, layer) in enumerate(outs)}
    count = len(layers)
    arcs: list[Arc] = []
    # position of an event in the endless sequence of ins or outs: period * count + rank
    # the copy in at position p of layer l belongs to iteration p // count - wraps[in of l]
    for rank, (_, layer) in enumerate(ins):
        here = 10 * count + rank
        started = [ins[position % count][1] for position in range(here - count + 1, here + 1)]
        # of each layer, the latest start at or before here; which copy out ends that stay, or the one before?
        alive_until: list[tuple[int, int]] = []
        for other in started:
            position = here - (rank - in_rank[other]) % count
            number = position // count - wraps[iteration.state_copy_in[other]]
            out_position = (number + wraps[iteration.state_copy_out[other]]) * count + out_rank[other]
            alive_until.append((out_position, states[other]))
        room = problem.staging_bytes - sum(size for _, size in alive_until)
        if room >= 0:
            continue
        own = (10 + wraps[iteration.state_copy_out[layer]] - wraps[iteration.state_copy_in[layer]]) * count
        alive_until.sort()
        needed: int | None = None
        for out_position, size in alive_until:
            if out_position == own + out_rank[layer]:
                continue  # its own
            needed = out_position
            room += size
            if room >= 0:
                break
        if needed is None or room < 0:
            continue  # a single state too large: refused elsewhere
        out = iteration.state_copy_out[outs[needed % count][1]]
        arcs.append(Arc(out, iteration.state_copy_in[layer], operations[out].duration_ms, 10 - needed // count))
    return arcs


class Graph:
    """Arcs prepared for longest paths at many periods.

    Raises `Deadlock` where the arcs of height 0 (or less) contain a cycle.
    """

    def __init__(self, count: int, arcs: Sequence[Arc]) -> None:
        self.order = topological_order(count, arcs)
        self._along: list[list[tuple[int, float, Arc]]] = [[] for _ in range(count)]
        self._around: list[Arc] = []
        for arc in arcs:
            if arc.height == 0:
                self._along[arc.before].append((arc.after, arc.weight_ms, arc))
            else:
                self._around.append(arc)

    def longest_path(self, period_ms: float) -> tuple[list[float], list[Arc] | None]:
        """Return earliest starts at a period, and a cycle that forbids it, if there is one."""
        starts_ms = [0.0] * len(self._along)
        reason: list[Arc | None] = [None] * len(self._along)
        for _ in range(len(self._along) + 2):
            for node in self.order:
                start = starts_ms[node]
                for after, weight, arc in self._along[node]:
                    if start + weight > starts_ms[after]:
                        starts_ms[after] = start + weight
                        reason[after] = arc
            again = False
            for arc in self._around:
                reached = starts_ms[arc.before] + arc.weight_ms - arc.height * period_ms
                if reached > starts_ms[arc.after] + CONVERGED_MS:
                    starts_ms[arc.after] = reached
                    reason[arc.after] = arc
                    again = True
            if not again:
                return starts_ms, None
            cycle = _cycle_of(reason)
            if cycle is not None:
                return starts_ms, cycle
        raise AssertionError("a longest path neither converges nor shows its cycle")


class Deadlock(Exception):
    """Orders that wait for each other; caught here."""


def least_period(count: int, arcs: Sequence[Arc], lower_ms: float) -> tuple[list[float], float, Critical] | None:
    """Return earliest starts, the least period of at least `lower_ms` and the last critical cycle; None: deadlock.

    Newton's method from below: each positive cycle found gives a larger period, the ratio of its weight to its height.
    """
    try:
        graph = Graph(count, arcs)
    except Deadlock:
        return None
    period_ms = lower_ms
    critical: tuple[Arc, ...] = ()
    while True:
        starts_ms, cycle = graph.longest_path(period_ms)
        if cycle is None:
            return starts_ms, period_ms, Critical(critical)
        height = sum(arc.height for arc in cycle)
        if height <= 0:
            return None
        larger = sum(arc.weight_ms for arc in cycle) / height
        if larger <= period_ms:
            return starts_ms, period_ms, Critical(tuple(cycle))  # rounding
        period_ms, critical = larger, tuple(cycle)


def _cycle_of(reason: Sequence[Arc | None]) -> list[Arc] | None:
    """Return a cycle of the arcs that last moved each node, if there is one."""
    seen = [0] * len(reason)
    for first in range(len(reason)):
        node = first
        while seen[node] == 0:
            seen[node] = first + 1
            arc = reason[node]
            if arc is None:
                break
            node = arc.before
            if seen[node] == first + 1:
                cycle: list[Arc] = []
                at = node
                while True:
                    step = reason[at]
                    assert step is not None
                    cycle.append(step)
                    at = step.before
                    if at == node:
                        return cycle[::-1]
    return None


def topological_order(count: int, arcs: Iterable[Arc]) -> list[int]:
    """Return an order along the arcs of height 0 (or less). Raises `Deadlock` if they contain a cycle."""
    entering = [0] * count
    leaving: list[list[int]] = [[] for _ in range(count)]
    for arc in arcs:
        if arc.height <= 0:
            entering[arc.after] += 1
            leaving[arc.before].append(arc.after)
    ready = [node for node in range(count) if entering[node] == 0]
    order: list[int] = []
    while ready:
        node = ready.pop()
        order.append(node)
        for after in leaving[node]:
            entering[after] -= 1
            if entering[after] == 0:
                ready.append(after)
    if len(order) < count:
        raise Deadlock
    return order
