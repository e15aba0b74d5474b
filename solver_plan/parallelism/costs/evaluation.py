"""Evaluation of a plan, whatever the cost model."""

from dataclasses import dataclass

from solver_plan.parallelism.costs import aceso
from solver_plan.parallelism.costs.full_plan import evaluate_full
from solver_plan.parallelism.costs.stage import StageCost
from solver_plan.parallelism.plan import ParallelismPlan
from solver_plan.parallelism.problem import ParallelismProblem


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Predicted cost of a plan."""

    iteration_ms: float
    stages: tuple[StageCost, ...]


def evaluate(problem: ParallelismProblem, plan: ParallelismPlan) -> Evaluation:
    """Return what a plan costs under the problem's cost model.

    The plan must be well formed (`check` tells); a stage that does not fit its devices is evaluated all the same.

    Raises
    ------
    InvalidPlanError
        If a stage uses a choice that was not profiled, or a layout change that no collective performs; under `full`
        also if the plan's own schedule stops in a deadlock.
    """
    if problem.cost_model == "full":
        return Evaluation(*evaluate_full(problem, plan))
    stages = aceso.stage_costs(problem, plan)
    return Evaluation(aceso.iteration_ms([stage.stage_ms for stage in stages], plan.micro_batches), tuple(stages))
