"""The wavefront kind: what the command line and the benchmarks can do with it."""

from dataclasses import replace

from solver_plan.enlargement import Larger
from solver_plan.kinds import Wing
from solver_plan.solving import Budget, Planned, Progress
from solver_plan.wavefront.plan import WavefrontPlan
from solver_plan.wavefront.problem import WavefrontProblem

HEURISTICS = ("sequential", "task-groups", "spindle", "annealing")


def _plan(
    problem: WavefrontProblem, budget: Budget, heuristic: str | None, on_progress: Progress
) -> Planned[WavefrontPlan]:
    from solver_plan.wavefront.planner import plan

    return plan(problem, budget, heuristic, on_progress)


def _check(problem: WavefrontProblem, plan: WavefrontPlan) -> tuple[str, ...]:
    from solver_plan.wavefront.check import check
    from solver_plan.wavefront.claims import refuted_bound

    return check(problem, plan) or refuted_bound(problem, plan)


def _evaluate(problem: WavefrontProblem, plan: WavefrontPlan) -> float:
    from solver_plan.wavefront.check import evaluate

    return evaluate(problem, plan)


def _describe(plan: WavefrontPlan, problem: WavefrontProblem | None) -> str:
    from solver_plan.wavefront.describe import describe

    return describe(plan, problem)


def _simulate(problem: WavefrontProblem, plan: WavefrontPlan) -> str:
    from solver_plan.wavefront.describe import describe_simulation

    return describe_simulation(problem, plan)


def _draw(plan: WavefrontPlan, problem: WavefrontProblem | None) -> str:
    from solver_plan.report.wavefront_gantt import gantt_svg

    return gantt_svg(plan, problem)


def _larger(problem: WavefrontProblem) -> list[Larger[WavefrontProblem]]:
    """Return the problem with 1 GiB more on each device, where memory limits, and with a device or a node more."""
    cluster, found = problem.cluster, []
    if cluster.memory_bytes_per_device is not None:
        roomier = replace(cluster, memory_bytes_per_device=cluster.memory_bytes_per_device + 2**30)
        found.append(Larger(change="1 GiB more on each device", problem=replace(problem, cluster=roomier)))
    if cluster.devices <= cluster.devices_per_node:
        devices = cluster.devices + 1
        wider = replace(cluster, devices=devices, devices_per_node=max(devices, cluster.devices_per_node))
        change = f"1 device more ({devices})"
    else:
        wider = replace(cluster, devices=cluster.devices + cluster.devices_per_node)
        change = f"1 node more ({wider.devices} devices)"
    return [*found, Larger(change=change, problem=replace(problem, cluster=wider))]


WAVEFRONT = Wing(
    name="wavefront",
    problem_type=WavefrontProblem,
    plan_type=WavefrontPlan,
    heuristics=HEURISTICS,
    planner=_plan,
    checker=_check,
    evaluator=_evaluate,
    describer=_describe,
    simulator=_simulate,
    drawer=_draw,
    larger=_larger,
)
