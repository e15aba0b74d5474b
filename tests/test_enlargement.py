"""What a larger machine brings, whatever the kind: shares of the budget, gains, and what is proven of them."""

from collections.abc import Callable
from dataclasses import replace

from solver_plan.documents.certificate import StoppedBy
from solver_plan.enlargement import Gain, Larger, gains, gains_table
from solver_plan.errors import NoPlanFoundError
from solver_plan.solving import Budget, Planned
from solver_plan.solving.outcome import Effort
from tests.shelf import SHELF, Parcel, ShelfPlan, ShelfProblem

Search = Callable[[ShelfProblem, ShelfPlan, Budget], Planned[ShelfPlan]]
PROBLEM = ShelfProblem(length=9, parcels=(Parcel(name="a", wait_ms=1.0), Parcel(name="b", wait_ms=2.0)))


def _plan() -> ShelfPlan:
    plan = SHELF.plan(PROBLEM, Budget()).plan
    assert isinstance(plan, ShelfPlan)
    return plan


def _asked(*changes: str) -> list[Larger[ShelfProblem]]:
    return [Larger(change=change, problem=PROBLEM) for change in changes]


def _ended(stopped: StoppedBy, objective_ms: float, budgets: list[Budget], starts: list[ShelfPlan]) -> Search:
    def search(problem: ShelfProblem, start: ShelfPlan, budget: Budget) -> Planned[ShelfPlan]:
        budgets.append(budget)
        starts.append(start)
        certificate = _plan().certificate
        assert certificate is not None
        bound = objective_ms / 2
        certificate = replace(
            certificate, status="feasible", objective=objective_ms, bound=bound, gap=0.5, stopped_by=stopped
        )
        return Planned(
            plan=replace(_plan(), certificate=certificate),
            effort=Effort(wall_s=0.0, deterministic_s=0.0, first_plan_s=None),
        )

    return search


def test_the_budget_is_shared_and_a_worse_plan_is_no_loss() -> None:
    budgets: list[Budget] = []
    starts: list[ShelfPlan] = []
    search = _ended("time", 70.0, budgets, starts)
    found = gains(60.0, _plan(), _asked("x", "y"), search, Budget(time_limit_s=8.0))
    assert [budget.time_limit_s for budget in budgets] == [4.0, 4.0]
    assert all(start.certificate is None and start.problem_digest is None for start in starts)
    assert found == [Gain(change=name, objective_ms=60.0, bound_ms=35.0, stopped_by="time") for name in "xy"]


def test_an_interruption_ends_the_searches() -> None:
    search = _ended("interrupt", 50.0, [], [])
    found = gains(60.0, _plan(), _asked("x", "y"), search, Budget())
    assert [gain.change for gain in found] == ["x"]


def test_a_search_that_finds_nothing_gains_nothing() -> None:
    def search(problem: ShelfProblem, start: ShelfPlan, budget: Budget) -> Planned[ShelfPlan]:
        raise NoPlanFoundError("no plan found")

    assert gains(60.0, _plan(), _asked("x"), search, Budget()) == [
        Gain(change="x", objective_ms=60.0, bound_ms=None, stopped_by="time")
    ]


def test_the_table_says_what_is_proven() -> None:
    lines = gains_table(
        100.0,
        [
            Gain(change="none", objective_ms=100.0, bound_ms=100.0, stopped_by="proof"),
            Gain(change="all", objective_ms=90.0, bound_ms=90.0, stopped_by="gap"),
            Gain(change="some", objective_ms=90.0, bound_ms=80.0, stopped_by="time"),
            Gain(change="open", objective_ms=90.0, bound_ms=None, stopped_by="time"),
        ],
    ).splitlines()
    assert lines[2:] == [
        "none      100.000      0.000   0.00%    0.00%  no gain is possible",
        "all        90.000     10.000  10.00%   10.00%  no more is possible",
        "some       90.000     10.000  10.00%   20.00%  stopped at the time limit",
        "open       90.000     10.000  10.00%        -  stopped at the time limit",
    ]


def test_a_kind_that_knows_no_larger_machine_only_searches_on() -> None:
    plan = replace(_plan(), certificate=None)
    assert "nothing but more search" in SHELF.what_if(PROBLEM, plan, Budget())
