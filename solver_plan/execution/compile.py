"""Compile a parallelism plan into a program. No torch: a plan for 1024 accelerators compiles on a laptop."""

import itertools
from collections import defaultdict
from collections.abc import Iterable

from solver_plan.documents import digest_of, require_same_problem
from solver_plan.errors import InvalidPlanError, NotExecutableError
from solver_plan.execution.actions import Action, ActionKind, parse_action
from solver_plan.execution.distinct_groups import DistinctGroups
from solver_plan.execution.orders import Durations, one_forward_one_backward, play, with_sharding
from solver_plan.execution.program import (
    Boundary,
    Program,
    Segment,
    SharedWeights,
    StageProgram,
    Team,
)
from solver_plan.execution.transfers import Side, transfers
from solver_plan.execution.verify import verify
from solver_plan.parallelism.blocks import block_ranges
from solver_plan.parallelism.check import check
from solver_plan.parallelism.plan import ParallelismPlan, Stage
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.parallelism.schedule import require_few_actions


def compile_plan(problem: ParallelismProblem, plan: ParallelismPlan) -> Program:
    """Return the program that carries out a plan.

    Raises
    ------
    PlanMismatchError
        If the plan names another problem.
    InvalidPlanError
        If `check` finds violations.
    NotExecutableError
        If the plan asks for what execution does not build, or its orders wait for each other.
    """
    require_same_problem(problem, plan)
    violations = check(problem, plan)
    if violations:
        raise InvalidPlanError(violations)
    require_few_actions(plan)
    orders = _orders(plan)
    groups = DistinctGroups()
    team_of = {action.stage: team for team, order in enumerate(orders) for action in order}
    stages = tuple(
        _stage(problem, plan, index, stage, team_of[index], groups) for index, stage in enumerate(plan.stages)
    )
    _require_local_hand_over(stages)
    _require_increasing_devices(stages)
    shared = _shared_weights(problem, stages, groups)
    program = Program(
        problem_digest=digest_of(problem),
        plan_digest=digest_of(plan),
        model=problem.model,
        world_size=1 + max(max(stage.devices) for stage in stages),
        global_batch=problem.global_batch,
        micro_batch_size=plan.micro_batch_size,
        micro_batches=plan.micro_batches,
        operators=tuple(operator.name for operator in problem.operators),
        groups=groups.documents(),
        stages=stages,
        boundaries=tuple(_boundaries(stages, plan.micro_batch_size)),
        shared_weights=shared,
        teams=_teams(plan, stages, shared, orders),
        predicted_stage_ms=None if plan.predicted is None else plan.predicted.stage_ms,
        predicted_memory_bytes=None if plan.predicted is None else plan.predicted.stage_memory_bytes,
    )
    verify(program)
    return program


def _orders(plan: ParallelismPlan) -> tuple[tuple[Action, ...], ...]:
    if plan.schedule is not None:
        return tuple(tuple(map(parse_action, order)) for order in plan.schedule.orders)
    return one_forward_one_backward(len(plan.stages), plan.micro_batches)


def _stage(
    problem: ParallelismProblem, plan: ParallelismPlan, index: int, stage: Stage, team: int, groups: DistinctGroups
) -> StageProgram:
    segments: list[Segment] = []
    for layout in _merged(stage):
        t, d, partition, bounds = layout
        side = Side(stage.devices, d, t)
        segments.append(
            Segment(
                operators=bounds,
                tensor_parallel=t,
                data_parallel=d,
                partition=partition,
                tensor_groups=tuple(
                    groups.index((side.rank(replica, k) for k in range(t)), f"stage {index} tensor parallel")
                    for replica in range(d)
                ),
                data_groups=tuple(
                    groups.index((side.rank(replica, k) for replica in range(d)), f"stage {index} data parallel")
                    for k in range(t)
                ),
            )
        )
    forward_ms, backward_ms = _profiled_times(problem, plan, stage)
    return StageProgram(
        operators=stage.operators,
        devices=stage.devices,
        team=team,
        segments=tuple(segments),
        recompute=_recomputed_ranges(problem, stage, segments),
        sharding=stage.sharding if any(segment.data_parallel > 1 for segment in segments) else 0,
        forward_ms=forward_ms,
        backward_ms=backward_ms,
    )


def _merged(stage: Stage) -> list[tuple[int, int, int, tuple[int, int]]]:
    """Return (t, d, partition, operators) of the stage's layouts, neighbours that are equal joined."""
    merged: list[tuple[int, int, int, tuple[int, int]]] = []
    for layout in stage.layout:
        choice = layout.tensor_parallel, layout.data_parallel, layout.partition
        if merged and merged[-1][:3] == choice:
            merged[-1] = (*choice, (merged[-1][3][0], layout.operators[1]))
        else:
            merged.append((*choice, layout.operators))
    return merged


def _profiled_times(problem: ParallelismProblem, plan: ParallelismPlan, stage: Stage) -> tuple[float, float]:
    """Return forward and backward time of a micro-batch; what is recomputed adds its forward to the backward."""
    recomputed = {operator for bounds in stage.recompute for operator in range(*bounds)}
    forward = backward = 0.0
    for layout in stage.layout:
        for operator in range(*layout.operators):
            batch = plan.micro_batch_size // layout.data_parallel
            profile = problem.profile_of(operator, batch, layout.tensor_parallel, layout.partition)
            if profile is not None:
                forward += profile.forward_ms
                backward += profile.backward_ms + (profile.forward_ms if operator in recomputed else 0.0)
    return forward, backward


def _recomputed_ranges(
    problem: ParallelismProblem, stage: Stage, segments: list[Segment]
) -> tuple[tuple[int, int], ...]:
    """Cut the stage's recomputed ranges where a block starts or the layout changes: an input is kept there."""
    cuts = {first for first, _ in block_ranges(problem)} | {segment.operators[0] for segment in segments}
    ranges: list[tuple[int, int]] = []
    for first, end in stage.recompute:
        edges = [first, *sorted(cut for cut in cuts if first < cut < end), end]
        ranges += itertools.pairwise(edges)
    return tuple(ranges)


def _require_local_hand_over(stages: tuple[StageProgram, ...]) -> None:
    """Neighbouring stages of one team hand their tensors over in place, which needs the same layout on both sides."""
    for index, (stage, after) in enumerate(itertools.pairwise(stages)):
        if stage.team == after.team and stage.side(-1) != after.side(0):
            raise NotExecutableError(
                f"stages[{index + 1}]: shares its devices with the stage before it but not its degrees, which is not "
                "built: give both the same tensor and data parallel degree, or other devices"
            )


def _require_increasing_devices(stages: tuple[StageProgram, ...]) -> None:
    """A process group numbers its ranks in increasing order, and tensor ranks are numbered as in their group."""
    for index, stage in enumerate(stages):
        if list(stage.devices) != sorted(stage.devices):
            raise NotExecutableError(
                f"stages[{index}].devices: found {list(stage.devices)}, which is not built: "
                "list devices in increasing order"
            )


def _boundaries(stages: tuple[StageProgram, ...], rows: int) -> Iterable[Boundary]:
    places = [(index, segment) for index, stage in enumerate(stages) for segment in range(len(stage.segments))]
    for before, after in itertools.pairwise(places):
        sender, receiver = (stages[stage].side(segment) for stage, segment in (before, after))
        if before[0] == after[0] and sender == receiver:
            continue
        yield Boundary(
            before=before,
            after=after,
            forward=transfers(sender, receiver, rows),
            backward=transfers(receiver, sender, rows),
        )


def _shared_weights(
    problem: ParallelismProblem, stages: tuple[StageProgram, ...], groups: DistinctGroups
) -> tuple[SharedWeights, ...]:
    """Return the weights that have more than one copy; operators of one segment use one copy together."""
    owners = {operator.shares_weights_with for operator in problem.operators} - {None}
    users: dict[str, list[int]] = defaultdict(list)
    for operator, description in enumerate(problem.operators):
        if description.shares_weights_with is not None or description.name in owners:
            users[description.shares_weights_with or description.name].append(operator)
    found: list[SharedWeights] = []
    for name, operators in users.items():
        places = {
            (index, number)
            for operator in operators
            for index, stage in enumerate(stages)
            for number, segment in enumerate(stage.segments)
            if segment.operators[0] <= operator < segment.operators[1]
        }
        if len(places) > 1:
            members = sorted({stage for stage, _ in places})
            ranks = sorted({rank for stage in members for rank in stages[stage].devices})
            found.append(
                SharedWeights(
                    name=name,
                    operators=tuple(operators),
                    stages=tuple(members),
                    group=groups.index(ranks, f"shared weights {name}"),
                )
            )
    return tuple(found)


def _teams(
    plan: ParallelismPlan,
    stages: tuple[StageProgram, ...],
    shared: tuple[SharedWeights, ...],
    orders: tuple[tuple[Action, ...], ...],
) -> tuple[Team, ...]:
    played = play(orders, [Durations(stage.forward_ms, stage.backward_ms) for stage in stages])
    teams: list[Team] = []
    for index, actions in enumerate(played.actions):
        members = sorted({action.stage for action in orders[index]})
        complete = with_sharding(
            actions,
            {stage: stages[stage].sharding for stage in members},
            {stage for stage in members if any(segment.data_parallel > 1 for segment in stages[stage].segments)},
            plan.micro_batches,
        )
        # weights in the order of the program, so that ranks which share several sum them in the same order
        after = [
            Action(min(set(weights.stages) & set(members)), ActionKind.REDUCE_SHARED, number)
            for number, weights in enumerate(shared)
            if set(weights.stages) & set(members)
        ]
        after += [Action(stage, ActionKind.UPDATE) for stage in members]
        teams.append(
            Team(
                devices=stages[members[0]].devices,
                stages=tuple(members),
                actions=tuple(map(str, (*complete, *after))),
            )
        )
    return tuple(teams)
