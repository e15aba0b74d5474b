"""Rules of plans that only the `full` cost model has.

Placement     a stage of several nodes has whole nodes; a tensor-parallel group lies in one node        → `placement`
Schedule      1F1B, or interleaved 1F1B: with v stages on each of p groups, stage j on group j modulo p, N a multiple of
              p, one layout and sharding for all, equally many blocks a stage, cuts at block starts, and the same
              operators recomputed in every block                                                        → `schedule`
"""

import itertools
from collections import Counter
from collections.abc import Iterator

from solver_plan.parallelism.plan import ParallelismPlan, Stage
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.parallelism.schedule import StageAction, interleaved, one_forward_one_backward, orders_of


def placement(problem: ParallelismProblem, plan: ParallelismPlan) -> Iterator[str]:
    """Yield violations of where stages lie."""
    per_node = problem.cluster.devices_per_node
    for index, stage in enumerate(plan.stages):
        place = f"stages[{index}].devices"
        in_node = Counter(device // per_node for device in stage.devices)
        if len(in_node) > 1 and any(count < per_node for count in in_node.values()):
            yield (
                f"{place}: {len(stage.devices)} devices lie in nodes {sorted(in_node)}, a stage of several nodes has "
                "whole ones"
            )
        degree = stage.layout[0].tensor_parallel
        groups = (stage.devices[begin : begin + degree] for begin in range(0, len(stage.devices), degree))
        if any(len({device // per_node for device in group}) > 1 for group in groups):
            yield f"{place}: a tensor-parallel group of {degree} lies in several nodes, it must stay within one"


def schedule(problem: ParallelismProblem, plan: ParallelismPlan) -> Iterator[str]:
    """Yield violations of schedules; the lists are well formed."""
    if plan.schedule is None:
        return
    _, orders = orders_of(plan)
    groups = len(orders)
    virtual, rest = divmod(len(plan.stages), groups)
    if rest:
        yield f"stages: {len(plan.stages)} on {groups} groups of devices, every group has equally many"
        return
    if virtual == 1:
        for stage, order in enumerate(sorted(orders)):
            plain = [(stage, *action) for action in one_forward_one_backward(groups, stage, plan.micro_batches)]
            if order != plain:
                yield f"schedule.orders: stage {stage} does not run 1F1B, which is all that full prices"
                return
        return
    yield from _interleaved(problem, plan, orders, groups, virtual)


def _interleaved(
    problem: ParallelismProblem,
    plan: ParallelismPlan,
    orders: list[list[StageAction]],
    groups: int,
    virtual: int,
) -> Iterator[str]:
    if plan.micro_batches % groups:
        yield f"micro_batches: {plan.micro_batches} are not a multiple of the {groups} groups that interleave"
        return
    for group in range(groups):
        if interleaved(groups, group, virtual, plan.micro_batches) not in orders:
            yield (
                f"schedule.orders: no list runs stages {group}, {group + groups}, … under interleaved 1F1B, which full "
                "prices beside 1F1B"
            )
            return
    count = len(_layouts(plan.stages))
    if count > 1:
        yield f"stages: {count} layouts or shardings, stages that interleave have one"
    starts = [operator.block_start for operator in problem.operators]
    counts = {sum(starts[slice(*stage.operators)]) for stage in plan.stages}
    inside = [stage.operators[0] for stage in plan.stages[1:] if not starts[stage.operators[0]]]
    if len(counts) > 1 or inside:
        yield f"stages: {sorted(counts)} blocks a stage, stages that interleave have equally many whole ones"
    yield from _equal_blocks(problem, plan)


def _equal_blocks(problem: ParallelismProblem, plan: ParallelismPlan) -> Iterator[str]:
    recomputed = {operator for stage in plan.stages for first, end in stage.recompute for operator in range(first, end)}
    starts = [number for number, operator in enumerate(problem.operators) if operator.block_start]
    if not starts:
        return
    length = min((b - a for a, b in itertools.pairwise(starts)), default=len(problem.operators) - starts[0])
    patterns = {tuple(first + at in recomputed for at in range(length)) for first in starts}
    outside = recomputed - {first + at for first in starts for at in range(length)}
    if len(patterns) > 1 or outside:
        yield "stages: recomputation differs from block to block, it is the same in all that interleave"


def same_layout(problem: ParallelismProblem, stages: tuple[Stage, ...]) -> Iterator[str]:
    """Yield a violation if stages differ in layout or sharding where the space wants one for all."""
    count = len(_layouts(stages))
    if problem.space.same_layout and count > 1:
        yield f"stages: {count} layouts or shardings, space.same_layout wants one for all"


def _layouts(stages: tuple[Stage, ...]) -> set[tuple[int, int, int, int]]:
    """Return the distinct (tensor parallel, data parallel, partition, sharding)."""
    return {
        (one.tensor_parallel, one.data_parallel, one.partition, stage.sharding)
        for stage in stages
        for one in stage.layout
    }
