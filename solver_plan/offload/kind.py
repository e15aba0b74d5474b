"""The offload kind, for the command line and the benchmarks."""

from dataclasses import replace

from solver_plan.enlargement import Larger
from solver_plan.kinds import Wing
from solver_plan.offload.check import period_of, violations
from solver_plan.offload.claims import refuted_bound
from solver_plan.offload.describe import describe
from solver_plan.offload.heuristics import RULES
from solver_plan.offload.plan import OffloadPlan
from solver_plan.offload.planner import plan_offload
from solver_plan.offload.problem import OffloadProblem
from solver_plan.offload.simulate import simulate_text
from solver_plan.report.offload_gantt import offload_gantt_svg


def _check(problem: OffloadProblem, plan: OffloadPlan) -> tuple[str, ...]:
    return violations(problem, plan) or refuted_bound(problem, plan)


def _larger(problem: OffloadProblem) -> list[Larger[OffloadProblem]]:
    """Return the problem with 1 GiB more on the device for resident optimizer state."""
    roomier = replace(problem, gpu_state_bytes=problem.gpu_state_bytes + 2**30)
    return [Larger(change="1 GiB more for resident optimizer state", problem=roomier)]


OFFLOAD = Wing(
    name="offload",
    problem_type=OffloadProblem,
    plan_type=OffloadPlan,
    heuristics=RULES,
    planner=plan_offload,
    checker=_check,
    evaluator=period_of,
    describer=describe,
    simulator=simulate_text,
    drawer=offload_gantt_svg,
    larger=_larger,
)
