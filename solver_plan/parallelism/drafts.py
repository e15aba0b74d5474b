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
    """A stage; its devices follow from the stages before it."""

    first: int
    end: int
    choices: tuple[Choice, ...]
    """Layout of each operator, shape (end - first,)."""
    marks: tuple[bool, ...]
    """Recomputed operators, shape (end - first,)."""
    devices_behind: int | None = None
    """Devices of higher rank than the stage's; None: right behind the stage before."""

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.choices[0].devices


def draft_plan(problem: ParallelismProblem, micro_batch_size: int, stages: Sequence[DraftStage]) -> ParallelismPlan:
    """Return a plan of stages on devices in rank order; idle devices come first where the stages do not say."""
    rank = problem.cluster.devices - sum(stage.devices for stage in stages)
    documents = []
    for stage in stages:
        if stage.devices_behind is not None:
            rank = problem.cluster.devices - stage.devices_behind - stage.devices
        documents.append(
            Stage(
                operators=(stage.first, stage.end),
                devices=tuple(range(rank, rank + stage.devices)),
                layout=_layouts(stage),
                recompute=ranges(stage.marks, stage.first),
                sharding=stage.choices[0].sharding,
            )
        )
        rank += stage.devices
    return ParallelismPlan(
        problem_digest=None,
        micro_batch_size=micro_batch_size,
        micro_batches=problem.global_batch // micro_batch_size,
        stages=tuple(documents),
    )


def _layouts(stage: DraftStage) -> tuple[Layout, ...]:
    found: list[Layout] = []
    begin = stage.first
    for index in range(stage.first, stage.end):
        choice = stage.choices[index - stage.first]
        if index + 1 == stage.end or stage.choices[index + 1 - stage.first] != choice:
            found.append(
                Layout(
                    operators=(begin, index + 1),
                    tensor_parallel=choice.tensor_parallel,
                    data_parallel=choice.data_parallel,
                    partition=choice.partition,
                )
            )
            begin = index + 1
    return tuple(found)


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
