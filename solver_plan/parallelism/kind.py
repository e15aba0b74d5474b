"""The parallelism kind: what the command line and the benchmarks call."""

from solver_plan.kinds import Wing
from solver_plan.parallelism.check import check, evaluate_checked
from solver_plan.parallelism.describe import describe, describe_simulation
from solver_plan.parallelism.plan import ParallelismPlan
from solver_plan.parallelism.planner import HEURISTICS, Planner
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.parallelism.simulate import simulate
from solver_plan.parallelism.what_binds import describe_what_binds, larger_problems
from solver_plan.solving import Budget, Planned, Progress


def _plan(
    problem: ParallelismProblem, budget: Budget, heuristic: str | None, on_progress: Progress
) -> Planned[ParallelismPlan]:
    return Planner(problem, budget, on_progress).run(heuristic)


def _replan(problem: ParallelismProblem, start: ParallelismPlan, budget: Budget) -> Planned[ParallelismPlan]:
    planner = Planner(problem, budget)
    planner.incumbent.offer(start, "heuristic:given")
    return planner.run(None)


def _draw(plan: ParallelismPlan, problem: ParallelismProblem | None) -> str | None:
    from solver_plan.report.parallelism_picture import parallelism_picture

    if problem is None or check(problem, plan):
        return None  # prices stand in the problem, and only what is valid has all of them
    return parallelism_picture(plan, problem)


PARALLELISM = Wing(
    name="parallelism",
    problem_type=ParallelismProblem,
    plan_type=ParallelismPlan,
    heuristics=HEURISTICS,
    planner=_plan,
    checker=check,
    evaluator=lambda problem, plan: evaluate_checked(problem, plan).iteration_ms,
    describer=describe,
    simulator=lambda problem, plan: describe_simulation(simulate(problem, plan)),
    drawer=_draw,
    what_binds=describe_what_binds,
    larger=larger_problems,
    replanner=_replan,
)
