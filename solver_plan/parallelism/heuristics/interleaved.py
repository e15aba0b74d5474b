"""Interleaved 1F1B as Megatron-LM builds it: v stages of equally many blocks on each of p groups, one layout for all.

With one recomputation pattern for every block there is nothing to choose but the pattern: the iteration only grows with
the pattern's time, so the least that fits is best.

    least_ms      what the best pattern takes of those that fit a lower bound on the memory, played: a lower bound
    best_plan     with the best pattern that really fits
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from solver_plan.parallelism.choices import Bools, ChoiceCosts, Floats, Integers, MicroBatch
from solver_plan.parallelism.costs import evaluate
from solver_plan.parallelism.costs.full import state_bytes
from solver_plan.parallelism.costs.full_plan import stage_work
from solver_plan.parallelism.drafts import DraftStage, draft_plan
from solver_plan.parallelism.full_spans import choice_ring, shared_weights
from solver_plan.parallelism.plan import ParallelismPlan, Schedule
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.parallelism.recomputation.shape import ChainShape
from solver_plan.parallelism.recomputation.stages import Side, StageRecomputation
from solver_plan.parallelism.schedule import LISTED_COST_S, MOST_ACTIONS, interleaved
from solver_plan.parallelism.stage_table import prefix_difference

Work = Callable[[float], None]


@dataclass(frozen=True, slots=True, eq=False)
class Interleaving:
    """One way to interleave: layout and number of virtual stages."""

    batch: MicroBatch
    costs: ChoiceCosts
    groups: int
    virtual_stages: int
    work_ms: float
    """Every plan of it takes at least so long."""


def interleavings(problem: ParallelismProblem, batches: Sequence[MicroBatch], shape: ChainShape) -> list[Interleaving]:
    """Return every way to interleave that the space allows, by increasing work."""
    blocks, space = _equal_blocks(shape), problem.space
    found: list[Interleaving] = []
    seen: set[tuple[int, object]] = set()
    for batch in batches:
        for costs in batch.choices:
            key = (batch.size, costs.choice)
            busy = costs.forward_ms + costs.backward_ms
            if key in seen or not np.isfinite(busy).all():
                continue
            seen.add(key)
            for groups, virtual in itertools.product(
                _group_counts(problem, costs.choice.devices), space.virtual_stages
            ):
                count = groups * virtual
                playable = 2 * batch.count * count <= MOST_ACTIONS
                divided = len(blocks) >= count and batch.count % groups == 0 and len(blocks) % count == 0
                if virtual > 1 and divided and playable and count <= (space.max_stages or count):
                    work = max(batch.count * float(busy.sum()) / groups, float(busy.sum()))
                    found.append(Interleaving(batch, costs, groups, virtual, work))
    return sorted(
        found, key=lambda one: (one.work_ms, one.batch.size, one.costs.choice, one.virtual_stages, one.groups)
    )


def least_ms(problem: ParallelismProblem, shape: ChainShape, one: Interleaving, work: Work, cutoff_ms: float) -> float:
    """Return a lower bound on the iteration of every plan of one interleaving; below the cutoff as tight as can be."""
    marks = _cheapest(problem, shape, one, Side.LOWER, work)
    if marks is None:
        return np.inf
    bound = _bound_ms(problem, shape, one, marks)
    if bound >= cutoff_ms or not _in_one_place(problem, one):
        return bound
    work(LISTED_COST_S * 2 * one.batch.count * one.groups * one.virtual_stages)
    return evaluate(problem, _plan(problem, shape, one, marks)).iteration_ms


def best_plan(problem: ParallelismProblem, shape: ChainShape, one: Interleaving, work: Work) -> ParallelismPlan | None:
    """Return the plan of one interleaving with the least recomputation that fits; None if none does."""
    marks = _cheapest(problem, shape, one, Side.UPPER, work)
    return None if marks is None else _plan(problem, shape, one, marks)


def _cheapest(
    problem: ParallelismProblem, shape: ChainShape, one: Interleaving, side: Side, work: Work
) -> Bools | None:
    """Return the least recomputation of a block that fits; with `LOWER` one that takes no longer than any that fits."""
    length = _block_length(shape)
    first, _ = _equal_blocks(shape)[0]
    none, everything = np.zeros(length, dtype=np.bool_), np.ones(length, dtype=np.bool_)
    need = _need_bytes(problem, shape, one)
    if need(0.0, 0.0) <= 0:
        return none
    if not shape.allowed:
        return None
    forward, held = one.costs.forward_ms[first : first + length], one.costs.held_bytes[first : first + length]
    if (first, first + length) not in shape.pieces:  # too long to list every pattern
        return (
            none if side is Side.LOWER else everything if need(float(held[:-1].sum()), float(held.sum())) <= 0 else None
        )
    recomputation = StageRecomputation(shape, one.costs, side, work)
    patterns = recomputation.patterns((first, first + length), first > 0, False)
    for index in np.argsort(patterns.bits @ forward, kind="stable"):
        # a segment may run on into the next block
        beyond = float(held[0]) if side is Side.UPPER and patterns.bits[index][0] and patterns.bits[index][-1] else 0.0
        if need(float(patterns.saved_bytes[index]), float(patterns.peak_bytes[index]) + beyond) <= 0:
            return np.asarray(patterns.bits[index])
    return None


def _need_bytes(problem: ParallelismProblem, shape: ChainShape, one: Interleaving) -> Callable[[float, float], float]:
    """Return a function: by how much the fullest device is short, of what a block saves and its peak."""
    cuts, each = _cuts(shape, one)
    costs, choice = one.costs, one.costs.choice
    first, end = np.array(cuts[:-1]), np.array(cuts[1:])
    kept = costs.input_bytes[first] + prefix_difference(costs.held_bytes, first, end)
    weights = prefix_difference(costs.weight_bytes, first, end)
    workspace = costs.forward_reserved_bytes + costs.backward_reserved_bytes
    ring = choice_ring(problem, costs)
    groups: list[tuple[float, Floats, Floats]] = []
    for group in sorted({0, min(1, one.groups - 1), one.groups - 1}):
        mine = slice(group, None, one.groups)
        shared = sum(
            float(costs.weight_bytes[number])
            for number, other in shared_weights(problem)
            if _on_one_stage(first[mine], end[mine], number, other)
        )
        state = state_bytes(
            stage_work(
                problem,
                forward_ms=0.0,
                backward_ms=0.0,
                weight_bytes=float(weights[mine].sum()) - shared,
                replicas=ring,
                sharding=choice.sharding,
                blocks=each * one.virtual_stages,
            )
        )
        largest = max(float(workspace[a:b].max()) for a, b in zip(first[mine], end[mine], strict=True))
        counts = _most_held(one.groups, group, one.virtual_stages, min(one.batch.count, 4 * one.groups))
        groups.append((state + largest, kept[mine], counts))
    limit = problem.cluster.usable_bytes_per_device

    def need(saved: float, peak: float) -> float:
        return peak - limit + max(fixed + float((counts @ (own - each * saved)).max()) for fixed, own, counts in groups)

    return need


def _on_one_stage(first: Integers, end: Integers, number: int, other: int) -> bool:
    return any(a <= other and number < b for a, b in zip(first, end, strict=True))


@lru_cache(maxsize=4096)
def _most_held(groups: int, group: int, virtual: int, micro_batches: int) -> Floats:
    """Return (moments, virtual stages): the micro-batches in flight whenever no later moment has more of all."""
    counts = [0] * virtual
    seen: set[tuple[int, ...]] = set()
    for stage, kind, _ in interleaved(groups, group, virtual, micro_batches):
        counts[stage // groups] += 1 if kind == "F" else -1
        if kind == "F":
            seen.add(tuple(counts))
    largest = [
        one for one in seen if not any(all(a <= b for a, b in zip(one, two, strict=True)) for two in seen - {one})
    ]
    return np.array(sorted(largest), dtype=np.float64)


def _bound_ms(problem: ParallelismProblem, shape: ChainShape, one: Interleaving, marks: Bools) -> float:
    """Return a bound without playing: a group works through all micro-batches, after the groups in front of it."""
    cuts, each = _cuts(shape, one)
    first, end = np.array(cuts[:-1]), np.array(cuts[1:])
    time = prefix_difference(one.costs.forward_ms + one.costs.backward_ms, first, end)
    block, _ = _equal_blocks(shape)[0]
    time = time + each * float(one.costs.forward_ms[block : block + len(marks)] @ marks)
    work = time.reshape(one.virtual_stages, one.groups).sum(axis=0)
    before = np.concatenate([np.zeros(1), np.cumsum(time[: one.groups - 1])])
    return float((before + one.batch.count * work).max())


def _cuts(shape: ChainShape, one: Interleaving) -> tuple[list[int], int]:
    """Return where stages begin and the last ends, and the blocks of a stage."""
    blocks = _equal_blocks(shape)
    count = one.groups * one.virtual_stages
    each = len(blocks) // count
    return [0, *(blocks[each * number][0] for number in range(1, count)), len(shape.classes)], each


def _group_counts(problem: ParallelismProblem, devices: int) -> range:
    """Return how many groups of so many devices may interleave: with idle devices any number that the nodes hold."""
    cluster, per_node = problem.cluster, problem.cluster.devices_per_node
    if devices <= per_node:
        most = cluster.nodes * (per_node // devices)
    elif problem.space.cross_node_stages and devices % per_node == 0:
        most = cluster.devices // devices
    else:
        most = 0
    if not problem.space.use_all_devices:
        return range(2, most + 1)
    return range(most, most + 1) if most >= 2 and most * devices == cluster.devices else range(0)


def _in_one_place(problem: ParallelismProblem, one: Interleaving) -> bool:
    """Return whether all plans of an interleaving have the same links between groups: where `_plan` puts them."""
    everywhere = one.groups * one.costs.choice.devices == problem.cluster.devices
    return problem.cluster.nodes == 1 or (problem.in_rank_order and everywhere)


def _devices_behind(problem: ParallelismProblem, devices: int, groups_behind: int) -> int:
    """Return the devices of higher rank than a group's: groups fill whole nodes from the last one on."""
    per_node = problem.cluster.devices_per_node
    nodes, inside = divmod(groups_behind, max(1, per_node // devices))
    return nodes * max(per_node, devices) + inside * devices


def _equal_blocks(shape: ChainShape) -> list[tuple[int, int]]:
    """Return the blocks that begin with a block start."""
    return [block for block in shape.blocks if shape.block_start[block[0]]]


def _block_length(shape: ChainShape) -> int:
    """Return the operators of a block; what follows the last one is not counted."""
    return min(end - first for first, end in _equal_blocks(shape))


def _plan(problem: ParallelismProblem, shape: ChainShape, one: Interleaving, marks: Bools) -> ParallelismPlan:
    cuts, _ = _cuts(shape, one)
    recomputed = np.zeros(len(shape.classes), dtype=np.bool_)
    for first, _ in _equal_blocks(shape):
        recomputed[first : first + len(marks)] = marks
    devices = one.costs.choice.devices
    stages = [
        DraftStage(
            first,
            end,
            (one.costs.choice,) * (end - first),
            tuple(recomputed[first:end].tolist()),
            devices_behind=_devices_behind(problem, devices, one.groups - 1 - number % one.groups),
        )
        for number, (first, end) in enumerate(itertools.pairwise(cuts))
    ]
    draft = draft_plan(problem, one.batch.size, stages)
    lists = tuple(
        tuple(f"{stage}{kind}{number}" for stage, kind, number in order)
        for order in (
            interleaved(one.groups, group, one.virtual_stages, one.batch.count) for group in range(one.groups)
        )
    )
    return replace(draft, schedule=Schedule(orders=lists))
