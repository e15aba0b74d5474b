"""A claimed bound is recomputed: one that the program gives passes, one above it is refused."""

import dataclasses

import pytest

from solver_plan.documents import Certificate
from solver_plan.offload.bounds import BOUND_NAME
from solver_plan.offload.claims import refuted_bound
from solver_plan.offload.kind import OFFLOAD
from solver_plan.offload.plan import OffloadPlan
from solver_plan.offload.planner import plan_offload
from solver_plan.offload.problem import OffloadProblem
from solver_plan.solving.budget import Budget
from tests.offload.offload_cases import make_problem

LAYERS = [(40, 1.0, 3.0), (10, 6.0, 14.0), (25, 3.0, 9.0), (30, 2.0, 3.0)]


def rule_with_claim(problem: OffloadProblem, bound_ms: float, bound_from: str = BOUND_NAME) -> OffloadPlan:
    """Return the plan of the worst rule with a bound that leaves it feasible."""
    plan = plan_offload(problem, Budget(), "zero_offload").plan
    certificate = plan.certificate
    assert certificate is not None
    claimed = dataclasses.replace(
        certificate, bound=bound_ms, bound_from=bound_from, gap=1 - bound_ms / certificate.objective
    )
    assert isinstance(claimed, Certificate)
    return dataclasses.replace(plan, certificate=claimed)


@pytest.mark.parametrize("staging", [0, 400])
@pytest.mark.parametrize("clip", [False, True])
def test_the_bound_of_the_program_passes_and_one_above_it_does_not(staging: int, clip: bool) -> None:
    problem = make_problem(LAYERS, room=300, staging=staging, clip=clip)
    found = plan_offload(problem, Budget(time_limit_s=2.0, deterministic=True)).plan
    assert OFFLOAD.check(problem, found) == ()
    steps = [step.bound for step in found.certificate.trace if step.source == BOUND_NAME]  # type: ignore[union-attr]
    assert steps[0] is not None
    honest = rule_with_claim(problem, steps[0])
    assert OFFLOAD.check(problem, honest) == ()
    violations = OFFLOAD.check(problem, rule_with_claim(problem, steps[0] * 1.00001))
    assert len(violations) == 1
    assert violations[0].startswith("certificate.bound: found")
    assert BOUND_NAME in violations[0]


def test_the_own_placement_refutes_without_a_search() -> None:
    problem = make_problem(LAYERS, room=10**6)
    plan = plan_offload(problem, Budget(time_limit_s=2.0, deterministic=True)).plan
    period_ms = plan.predicted.period_ms
    # the same timeline with idle time behind it is valid, and its bound too high
    longer = dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, period_ms=2 * period_ms))
    claim = dataclasses.replace(
        plan.certificate,  # type: ignore[type-var]
        objective=2 * period_ms,
        bound=1.5 * period_ms,
        bound_from=BOUND_NAME,
        gap=0.25,
        status="feasible",
        stopped_by="completed",
    )
    violations = OFFLOAD.check(problem, dataclasses.replace(longer, certificate=claim))
    assert violations == (
        f"certificate.bound: found {1.5 * period_ms:.9g}; {BOUND_NAME} gives at most {period_ms:.9g}",
    )


def test_a_bound_of_another_source_is_not_recomputed() -> None:
    problem = make_problem(LAYERS, room=300)
    assert refuted_bound(problem, rule_with_claim(problem, 1e-3, "cp-sat")) == ()
    assert refuted_bound(problem, plan_offload(problem, Budget(), "coarse").plan) == ()
