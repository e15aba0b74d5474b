"""The best plan and bound are kept outside the solvers, and nobody's word is taken for them."""

import logging

import pytest

from solver_plan.documents import Incumbency
from solver_plan.errors import InvalidPlanError, NoPlanFoundError
from solver_plan.solving import Budget, Clock, Incumbent, solve_cp_sat
from tests.solving.programs import assignment


def evaluate(plan: float) -> float:
    """A plan is its own objective; below 10 it is not valid."""
    if plan < 10:
        raise InvalidPlanError((f"{plan} is below 10",))
    return plan


@pytest.fixture
def steps() -> list[Incumbency]:
    """What progress was told."""
    return []


@pytest.fixture
def incumbent(steps: list[Incumbency]) -> Incumbent[float]:
    """An empty incumbent that asks for a gap of 10 %."""
    return Incumbent(evaluate, Clock(Budget(time_limit_s=1e6, gap_limit=0.1)), steps.append)


def test_only_better_plans_and_bounds_are_taken(incumbent: Incumbent[float], steps: list[Incumbency]) -> None:
    assert incumbent.offer(100.0, "heuristic:a")
    assert not incumbent.offer(100.0, "cp-sat")
    assert not incumbent.offer(120.0, "cp-sat")
    assert incumbent.offer(50.0, "cp-sat")
    assert incumbent.raise_bound(20.0, "lp:x")
    assert not incumbent.raise_bound(20.0, "cp-sat")
    assert not incumbent.raise_bound(0.0, "cp-sat")
    assert not incumbent.raise_bound(-3.0, "cp-sat")
    assert (incumbent.plan, incumbent.objective, incumbent.source) == (50.0, 50.0, "cp-sat")
    assert (incumbent.bound, incumbent.bound_from) == (20.0, "lp:x")
    assert incumbent.gap == 0.6
    assert [(step.objective, step.bound, step.source) for step in steps] == [
        (100.0, None, "heuristic:a"),
        (50.0, None, "cp-sat"),
        (50.0, 20.0, "lp:x"),
    ]
    assert incumbent.trace == steps


def test_an_invalid_plan_is_dropped_and_logged(incumbent: Incumbent[float], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        assert not incumbent.offer(5.0, "cp-sat")
    assert incumbent.plan is None
    assert "a plan of cp-sat is not valid and was dropped: 5.0 is below 10" in caplog.text


def test_no_plan_is_no_certificate(incumbent: Incumbent[float]) -> None:
    incumbent.raise_bound(20.0, "lp:x")
    assert incumbent.gap is None
    assert not incumbent.closed
    with pytest.raises(NoPlanFoundError, match="one may exist"):
        incumbent.certificate("none")


@pytest.mark.parametrize(
    ("bound", "interrupt", "completed", "status", "stopped_by"),
    [
        (None, False, True, "feasible", "completed"),
        (None, False, False, "feasible", "time"),
        (None, True, True, "feasible", "interrupt"),
        (80.0, False, False, "feasible", "time"),
        (95.0, False, False, "feasible", "gap"),
        (95.0, True, False, "feasible", "gap"),
        (100.0, False, False, "optimal", "proof"),
        (99.99995, False, True, "optimal", "proof"),
    ],
)
def test_what_the_certificate_says(
    incumbent: Incumbent[float], bound: float | None, interrupt: bool, completed: bool, status: str, stopped_by: str
) -> None:
    incumbent.offer(100.0, "heuristic:a")
    if bound is not None:
        incumbent.raise_bound(bound, "cp-sat")
    if interrupt:
        incumbent._clock.interrupt()
    certificate = incumbent.certificate("none", completed=completed)
    assert (certificate.status, certificate.stopped_by) == (status, stopped_by)
    assert (certificate.bound, certificate.incumbent) == (bound, "heuristic:a")


def test_a_solver_that_loses_its_hint_does_not_lose_the_plan() -> None:
    model = assignment(60, 6)
    spread = [item % 6 for item in range(60)]
    clock = Clock(Budget(time_limit_s=1e6))
    incumbent: Incumbent[int] = Incumbent(float, clock)
    incumbent.offer(model.load(spread), "heuristic:spread")
    outcome = solve_cp_sat(model.model, clock, hint=model.hint(spread), limit=1e-9)  # ends in presolve
    assert outcome.values is None
    assert incumbent.certificate("CP-SAT").objective == model.load(spread)


def test_an_exception_of_progress_ends_the_search() -> None:
    def boom(step: Incumbency) -> None:
        raise LookupError("boom")

    incumbent = Incumbent(evaluate, Clock(Budget()), boom)
    with pytest.raises(LookupError):
        incumbent.offer(20.0, "heuristic:a")
