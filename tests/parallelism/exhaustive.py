"""The best plan of a tiny problem by trying everything: no model, no bounds, nothing of the planner.

Every micro-batch size, every sequence of cuts, every layout of each stage, every placement of stages in nodes, every
set of recomputed operators.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from solver_plan.parallelism.blocks import block_ranges
from solver_plan.parallelism.costs.links import transfer_ms
from solver_plan.parallelism.costs.recompute import saved_and_peak
from solver_plan.parallelism.problem import Cluster, ParallelismProblem, Profile

Layout = tuple[int, int, int]
"""(tensor parallel, data parallel, partition)."""


@dataclass(frozen=True)
class Best:
    """The optimum, and one plan that attains it."""

    iteration_ms: float
    micro_batch_size: int
    stages: tuple[tuple[int, int, Layout], ...]
    """(first, end, layout) of each stage."""
    same_node: tuple[bool, ...]
    """Of neighbouring stages: both lie in one node."""


@dataclass(frozen=True)
class _Stage:
    first: int
    end: int
    layout: Layout
    devices: int


def best_plan(problem: ParallelismProblem, *, rank_order: bool = False) -> Best | None:
    """Return the best plan, None if there is none; with `rank_order` only among those on devices in rank order."""
    best: Best | None = None
    for size in range(1, problem.global_batch + 1):
        allowed = problem.space.micro_batch_sizes
        if problem.global_batch % size or (allowed is not None and size not in allowed):
            continue
        for found in _plans_of_size(problem, size, rank_order):
            if best is None or found.iteration_ms < best.iteration_ms:
                best = found
    return best


def _plans_of_size(problem: ParallelismProblem, size: int, rank_order: bool) -> Iterator[Best]:
    @cache
    def busy(first: int, end: int, layout: Layout, behind: int) -> float | None:
        return least_busy_ms(problem, size, first, end, layout, behind)

    count = problem.global_batch // size
    cluster = problem.cluster
    for stages in _sequences(problem, size, 0, cluster.devices):
        times: list[float] = []
        for index, one in enumerate(stages):
            time = busy(one.first, one.end, one.layout, len(stages) - 1 - index)
            if time is None:
                break
            times.append(time)
        if len(times) < len(stages):
            continue
        for pattern in _placements(cluster, tuple(one.devices for one in stages), problem, rank_order):
            links = [
                cluster.intra_node,
                *(cluster.intra_node if same else cluster.inter_node for same in pattern),
                cluster.inter_node,
            ]
            total = [
                time
                + transfer_ms(_profiles(problem, size, one)[0].input_bytes, links[index])
                + transfer_ms(_profiles(problem, size, one)[-1].output_bytes, links[index + 1])
                for index, (time, one) in enumerate(zip(times, stages, strict=True))
            ]
            yield Best(
                (count - 1) * max(total) + sum(total),
                size,
                tuple((one.first, one.end, one.layout) for one in stages),
                pattern,
            )


def _sequences(problem: ParallelismProblem, size: int, first: int, devices: int) -> Iterator[tuple[_Stage, ...]]:
    """Yield the ways to cover the operators from `first` on with stages of at most so many devices."""
    space, cluster = problem.space, problem.cluster
    most = space.max_stages or cluster.devices

    def extend(begun: tuple[_Stage, ...], first: int, left: int) -> Iterator[tuple[_Stage, ...]]:
        if first == len(problem.operators):
            if left == 0 or not space.use_all_devices:
                yield begun
            return
        if len(begun) == most:
            return
        for end in range(first + 1, len(problem.operators) + 1):
            for layout in _layouts(problem, size, left):
                one = _Stage(first, end, layout, layout[0] * layout[1])
                if all(_profile(problem, size, operator, layout) for operator in range(first, end)):
                    yield from extend((*begun, one), end, left - one.devices)

    yield from extend((), first, devices)


def _layouts(problem: ParallelismProblem, size: int, devices: int) -> Iterator[Layout]:
    space, cluster = problem.space, problem.cluster
    largest = min(devices, cluster.devices if space.cross_node_stages else cluster.devices_per_node)
    entries = {entry.key for profiles in problem.profiles.values() for entry in profiles}
    for count in range(1, largest + 1):
        if space.device_counts is not None and count not in space.device_counts:
            continue
        for batch, degree, partition in entries:
            fits = count % degree == 0 and batch * (count // degree) == size
            if fits and (space.partitions is None or partition in space.partitions):
                yield degree, count // degree, partition


def _profile(problem: ParallelismProblem, size: int, operator: int, layout: Layout) -> Profile | None:
    return problem.profile_of(operator, size // layout[1], layout[0], layout[2])


def _profiles(problem: ParallelismProblem, size: int, one: _Stage) -> list[Profile]:
    found = [_profile(problem, size, operator, one.layout) for operator in range(one.first, one.end)]
    return [profile for profile in found if profile is not None]


def least_busy_ms(
    problem: ParallelismProblem, size: int, first: int, end: int, layout: Layout, behind: int
) -> float | None:
    """Return forward, backward and recomputation of a stage under the best set of recomputed operators that fits."""
    profiles = _profiles(problem, size, _Stage(first, end, layout, 0))
    operators = problem.operators[first:end]
    held = [p.activation_bytes * o.activation_factor for p, o in zip(profiles, operators, strict=True)]
    starts = [operator.block_start for operator in operators]
    shares = [operator.activation_factor != 1 for operator in operators]
    weights = sum(p.weight_bytes for p in profiles)
    reserved = max((p.forward_reserved_bytes for p in profiles[:-1]), default=0) + max(
        (p.backward_reserved_bytes for p in profiles[:-1]), default=0
    )
    fixed = weights * problem.state_bytes_per_weight_byte + max(reserved, weights)
    room = problem.cluster.usable_bytes_per_device - fixed - (behind + 1) * (profiles[0].input_bytes + sum(held))
    best: float | None = None
    for marks in marks_of(problem, first, end):
        saved, peak = saved_and_peak(marks, held, starts, shares)
        if (behind + 1) * saved - peak + room >= -0.01:
            time = sum(p.forward_ms for p, mark in zip(profiles, marks, strict=True) if mark)
            best = time if best is None else min(best, time)
    return None if best is None else best + sum(p.forward_ms + p.backward_ms for p in profiles)


def marks_of(problem: ParallelismProblem, first: int, end: int) -> Iterator[tuple[bool, ...]]:
    """Yield every set of recomputed operators of a stage that the space allows."""
    rule = problem.space.recompute
    if rule == "none":
        yield (False,) * (end - first)
    elif rule == "operator":
        yield from itertools.product((False, True), repeat=end - first)
    else:
        lengths = [min(end, e) - max(first, a) for a, e in block_ranges(problem) if a < end and e > first]
        for flags in itertools.product((False, True), repeat=len(lengths)):
            yield tuple(flag for flag, length in zip(flags, lengths, strict=True) for _ in range(length))


def _placements(
    cluster: Cluster, counts: tuple[int, ...], problem: ParallelismProblem, rank_order: bool
) -> set[tuple[bool, ...]]:
    """Return, for every way to lay stages into nodes, which neighbours lie together in one node."""
    if rank_order:
        return _in_rank_order(cluster, counts, problem)
    return _anywhere(cluster.nodes, cluster.devices_per_node, counts, problem.space.cross_node_stages)


def _in_rank_order(cluster: Cluster, counts: tuple[int, ...], problem: ParallelismProblem) -> set[tuple[bool, ...]]:
    patterns = set()
    idle = cluster.devices - sum(counts)
    for gaps in itertools.product(range(idle + 1), repeat=len(counts)):
        if sum(gaps) > idle:
            continue
        rank, nodes = 0, []
        for gap, count in zip(gaps, counts, strict=True):
            rank += gap
            nodes.append({device // cluster.devices_per_node for device in range(rank, rank + count)})
            rank += count
        if problem.space.cross_node_stages or all(len(found) == 1 for found in nodes):
            patterns.add(tuple(len(a | b) == 1 for a, b in itertools.pairwise(nodes)))
    return patterns


@cache
def _anywhere(nodes: int, per_node: int, counts: tuple[int, ...], cross: bool) -> set[tuple[bool, ...]]:
    patterns = set()

    def place(index: int, free: tuple[int, ...], homes: tuple[frozenset[int], ...]) -> None:
        if index == len(counts):
            patterns.add(tuple(len(a | b) == 1 for a, b in itertools.pairwise(homes)))
            return
        for taken in itertools.product(*(range(room + 1) for room in free)):
            home = frozenset(node for node, number in enumerate(taken) if number)
            if sum(taken) == counts[index] and (cross or len(home) == 1):
                place(index + 1, tuple(a - b for a, b in zip(free, taken, strict=True)), (*homes, home))

    place(0, (per_node,) * nodes, ())
    return patterns
