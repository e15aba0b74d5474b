"""Plays a plan micro-batch by micro-batch, independently of any objective formula.

Under `aceso` transfers take part in the times of forward (its input) and backward (the gradient of its output), as that
cost model charges them; under `full` what overlaps is a delay between actions.
"""

from dataclasses import dataclass

from solver_plan.errors import InvalidPlanError
from solver_plan.parallelism.check import check_structure
from solver_plan.parallelism.costs import evaluate
from solver_plan.parallelism.costs.full import pipeline_ms
from solver_plan.parallelism.plan import ParallelismPlan
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.parallelism.schedule import Played, orders_of, play


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What happened in one iteration."""

    iteration_ms: float
    formula_ms: float
    """`aceso`: the objective; `full`: the same formula and what comes once an iteration."""
    once_ms: float
    """After the last backward, `full` only: reduction that is exposed, optimizer step, gathering of weights."""
    actions: tuple[Played, ...]
    groups: tuple[tuple[int, ...], ...]
    """Devices of each group."""

    @property
    def busy_ms(self) -> tuple[float, ...]:
        """Time each group works."""
        busy = [0.0] * len(self.groups)
        for action in self.actions:
            busy[action.group] += action.end_ms - action.start_ms
        return tuple(busy)


def simulate(problem: ParallelismProblem, plan: ParallelismPlan) -> Simulation:
    """Play one iteration of a plan, which may need more memory than there is.

    Raises
    ------
    InvalidPlanError
        If the plan is no division of the model on the cluster, with every violation, or if its own schedule stops in
        a deadlock, with the actions that wait.
    """
    violations = check_structure(problem, plan)
    if violations:
        raise InvalidPlanError(violations)
    evaluation = evaluate(problem, plan)
    groups, orders = orders_of(plan)
    played = play([stage.durations for stage in evaluation.stages], orders)
    end_ms = max(action.end_ms for action in played)
    if problem.cost_model == "aceso":
        iteration, formula = end_ms, evaluation.iteration_ms
    else:
        stage_ms = [stage.stage_ms for stage in evaluation.stages]
        iteration = evaluation.iteration_ms
        group_ms = [sum(stage_ms[number] for number in {action[0] for action in order}) for order in orders]
        virtual = len(plan.stages) // len(groups)
        formula = pipeline_ms(group_ms, plan.micro_batches, virtual) + iteration - end_ms
    return Simulation(
        iteration_ms=iteration,
        formula_ms=formula,
        once_ms=iteration - end_ms,
        actions=tuple(played),
        groups=groups,
    )
