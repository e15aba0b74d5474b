"""The wavefront kind: what the command line and the benchmarks can do with it."""

from dataclasses import replace

from solver_plan.documents.fields import MOST_DEVICES
from solver_plan.enlargement import Larger
from solver_plan.kinds import Wing
from solver_plan.solving import Budget, Planned, Progress
from solver_plan.wavefront.plan import WavefrontPlan
from solver_plan.wavefront.problem import MOST_BYTES, WavefrontProblem

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
    """Return the problem with 1 GiB more on each device, where memory limits, and with a device or a node more.

    What would be larger than a document can state is left out.
    """
    cluster, found = problem.cluster, []
    memory = cluster.memory_bytes_per_device
    if memory is not None and memory + 2**30 <= MOST_BYTES:
        roomier = replace(cluster, memory_bytes_per_device=memory + 2**30)
        found.append(Larger(change="1 GiB more on each device", problem=replace(problem, cluster=roomier)))
    one_node = cluster.devices <= cluster.devices_per_node
    devices = cluster.devices + (1 if one_node else cluster.devices_per_node)
    if devices <= MOST_DEVICES:
        per_node = max(cluster.devices_per_node, devices if one_node else 1)
        wider = replace(cluster, devices=devices, devices_per_node=per_node)
        change = f"1 device more ({devices})" if one_node else f"1 node more ({devices} devices)"
        found.append(Larger(change=change, problem=replace(problem, cluster=wider)))
    return found


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
