"""A configuration of Aceso's search: a micro-batch size and, stage by stage, the layout of every operator.

Which operators are recomputed follows from the configuration (`recompute`), so it is no part of it: two configurations
are the same if their micro-batch size and layouts are. Everything here is a tuple of integers, cheap to hash and share.
"""

from collections.abc import Sequence
from typing import NamedTuple

from solver_plan.parallelism.choices import MicroBatch, device_counts
from solver_plan.parallelism.drafts import ranges
from solver_plan.parallelism.plan import Layout, ParallelismPlan, Stage
from solver_plan.parallelism.problem import ParallelismProblem


class Run(NamedTuple):
    """Consecutive operators [first, end) with one layout."""

    first: int
    end: int
    choice: int
    """Number in `MicroBatch.choices` of the configuration's micro-batch size."""


StageLayout = tuple[Run, ...]
"""The operators of one stage, in order; neighbouring runs differ in their choice."""


class Configuration(NamedTuple):
    """What the search changes."""

    size: int
    """Number of the micro-batch size, in increasing order."""
    stages: tuple[StageLayout, ...]


def merged(runs: Sequence[Run]) -> StageLayout:
    """Return runs with neighbours of one choice joined and empty ones left out."""
    joined: list[Run] = []
    for run in runs:
        if run.first == run.end:
            continue
        if joined and joined[-1].choice == run.choice:
            joined[-1] = Run(joined[-1].first, run.end, run.choice)
        else:
            joined.append(run)
    return tuple(joined)


def clipped(layout: StageLayout, first: int, end: int) -> StageLayout:
    """Return the part of a layout on the operators [first, end)."""
    if layout[0].first == first and layout[-1].end == end:
        return layout
    return tuple(
        Run(max(run.first, first), min(run.end, end), run.choice)
        for run in layout
        if run.first < end and run.end > first
    )


def extended(layout: StageLayout, first: int, end: int) -> StageLayout:
    """Return a layout with operators added in front and behind, which take the layout of their neighbour."""
    front, back = layout[0], layout[-1]
    if len(layout) == 1:
        return (Run(first, end, front.choice),)
    return (Run(first, front.end, front.choice), *layout[1:-1], Run(back.first, end, back.choice))


def rewritten(layout: StageLayout, first: int, end: int, choice: int) -> StageLayout:
    """Return a layout whose operators [first, end) have another choice."""
    before, behind = layout[0].first, layout[-1].end
    front = clipped(layout, before, first) if before < first else ()
    back = clipped(layout, end, behind) if end < behind else ()
    return merged((*front, Run(first, end, choice), *back))


def even_device_counts(problem: ParallelismProblem, stages: int) -> tuple[int, ...] | None:
    """Return the devices of each stage, as even as possible, larger ones first; None if nothing adds up.

    Aceso doubles the stages' devices one after the other until all are used; this is the same where a stage may have 1,
    2, 4 or 8, and works for any numbers: the least sum of squares, by dynamic programming from the last stage.
    Without `use_all_devices` the most devices that add up are used.
    """
    cluster = problem.cluster
    totals = range(cluster.devices, 0, -1) if not problem.space.use_all_devices else (cluster.devices,)
    allowed = device_counts(problem)
    for total in totals:
        # best[u]: (sum of squares, counts) of the stages behind, on the last u devices
        best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
        for _ in range(stages):
            after: dict[int, tuple[int, tuple[int, ...]]] = {}
            for used, (squares, counts) in best.items():
                for count in allowed:
                    rank = cluster.devices - used - count
                    if used + count > total or not within_node(problem, rank, count):
                        continue
                    entry = (squares + count * count, (count, *counts))
                    known = after.get(used + count)
                    if known is None or (entry[0], [-c for c in entry[1]]) < (known[0], [-c for c in known[1]]):
                        after[used + count] = entry
            best = after
        if total in best:
            return best[total][1]
    return None


def within_node(problem: ParallelismProblem, rank: int, count: int) -> bool:
    """Tell whether a stage on devices [rank, rank + count) lies as the space demands."""
    per_node = problem.cluster.devices_per_node
    if problem.cost_model == "full" and count > per_node:
        return problem.space.cross_node_stages and rank % per_node == 0 and count % per_node == 0
    across = problem.space.cross_node_stages and problem.cost_model == "aceso"
    return across or rank // per_node == (rank + count - 1) // per_node


def plan_of(
    problem: ParallelismProblem,
    batches: Sequence[MicroBatch],
    configuration: Configuration,
    marks: Sequence[Sequence[bool]],
) -> ParallelismPlan:
    """Return the plan of a configuration and its recomputed operators, on devices in rank order, idle ones first."""
    batch = batches[configuration.size]
    counts = [batch.choices[layout[0].choice].choice.devices for layout in configuration.stages]
    rank = problem.cluster.devices - sum(counts)
    stages = []
    for layout, count, recomputed in zip(configuration.stages, counts, marks, strict=True):
        runs = []
        for run in layout:
            choice = batch.choices[run.choice].choice
            runs.append(
                Layout(
                    operators=(run.first, run.end),
                    tensor_parallel=choice.tensor_parallel,
                    data_parallel=choice.data_parallel,
                    partition=choice.partition,
                )
            )
        stages.append(
            Stage(
                operators=(layout[0].first, layout[-1].end),
                devices=tuple(range(rank, rank + count)),
                layout=tuple(runs),
                recompute=ranges(recomputed, layout[0].first),
                sharding=batch.choices[layout[0].choice].choice.sharding,
            )
        )
        rank += count
    return ParallelismPlan(
        problem_digest=None,
        micro_batch_size=batch.size,
        micro_batches=batch.count,
        stages=tuple(stages),
    )
