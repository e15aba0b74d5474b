"""Drafts of plans: what heuristics and solvers find, and their way into plan documents."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from solver_plan.documents import Certificate, digest_of
from solver_plan.parallelism.choices import Choice
from solver_plan.parallelism.costs import evaluate
from solver_plan.parallelism.plan import Layout, ParallelismPlan, Predicted, Stage
from solver_plan.parallelism.problem import ParallelismProblem


@dataclass(frozen=True, slots=True)
class DraftStage:
    """A stage with one layout; its devices follow from the stages before it."""

    first: int
    end: int
    choice: Choice
    marks: tuple[bool, ...]
    """Recomputed operators, shape (end - first,)."""
    devices_behind: int | None = None
    """Devices of higher rank than the stage's; None: right behind the stage before."""


def draft_plan(problem: ParallelismProblem, micro_batch_size: int, stages: Sequence[DraftStage]) -> ParallelismPlan:
    """Return a plan of stages on devices in rank order; idle devices come first where the stages do not say."""
    rank = problem.cluster.devices - sum(stage.choice.devices for stage in stages)
    documents = []
    for stage in stages:
        if stage.devices_behind is not None:
            rank = problem.cluster.devices - stage.devices_behind - stage.choice.devices
        bounds = (stage.first, stage.end)
        layout = Layout(
            operators=bounds,
            tensor_parallel=stage.choice.tensor_parallel,
            data_parallel=stage.choice.data_parallel,
            partition=stage.choice.partition,
        )
        documents.append(
            Stage(
                operators=bounds,
                devices=tuple(range(rank, rank + stage.choice.devices)),
                layout=(layout,),
                recompute=ranges(stage.marks, stage.first),
            )
        )
        rank += stage.choice.devices
    return ParallelismPlan(
        problem_digest=None,
        micro_batch_size=micro_batch_size,
        micro_batches=problem.global_batch // micro_batch_size,
        stages=tuple(documents),
    )


def ranges(marks: Sequence[bool], first: int) -> tuple[tuple[int, int], ...]:
    """Return the runs of marks as operator ranges [first, end)."""
    found: list[tuple[int, int]] = []
    for index, mark in enumerate(marks, start=first):
        if mark and found and found[-1][1] == index:
            found[-1] = (found[-1][0], index + 1)
        elif mark:
            found.append((index, index + 1))
    return tuple(found)


def finished(problem: ParallelismProblem, plan: ParallelismPlan, certificate: Certificate) -> ParallelismPlan:
    """Return the plan with its problem's digest, its predicted costs and its certificate."""
    evaluation = evaluate(problem, plan)
    predicted = Predicted(
        iteration_ms=evaluation.iteration_ms,
        stage_ms=tuple(stage.stage_ms for stage in evaluation.stages),
        stage_memory_bytes=tuple(round(stage.memory_bytes) for stage in evaluation.stages),
    )
    return replace(plan, problem_digest=digest_of(problem), predicted=predicted, certificate=certificate)
