"""A made-up kind of problem, so that documents and command line are tested without any planner.

A shelf of some length holds parcels; a plan is an order of all parcels, and costs the sum of their waits. Some lengths
make the planner behave in a particular way.
"""

from typing import Annotated, Literal, Self

import pytest
from annotated_types import Len
from pydantic import model_validator

from solver_plan import kinds
from solver_plan.documents import (
    Count,
    Incumbency,
    Milliseconds,
    Name,
    PerSecond,
    PlanDocument,
    ProblemDocument,
    certify,
    digest_of,
    document,
    fail,
)
from solver_plan.errors import InfeasibleProblemError, NoPlanFoundError
from solver_plan.kinds import Wing
from solver_plan.solving import Budget, Planned, Progress
from solver_plan.solving.outcome import Effort


@document
class Parcel:
    """One parcel."""

    name: Name
    wait_ms: Milliseconds


@document
class Rate:
    """A rate of one of two units."""

    per_s: PerSecond


@document
class ShelfProblem(ProblemDocument):
    """Parcels to be put in an order."""

    kind: Literal["shelf"] = "shelf"
    length: Count
    """How long the shelf is."""
    parcels: Annotated[tuple[Parcel, ...], Len(1)]
    rates: dict[Name, Rate] | None = None
    ordered: bool = False

    @model_validator(mode="after")
    def _unique(self) -> Self:
        names = [parcel.name for parcel in self.parcels]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise fail(f"parcels[{index}].name", name, "names are unique")
        return self


@document
class ShelfPlan(PlanDocument):
    """The order of the parcels."""

    kind: Literal["shelf"] = "shelf"
    order: tuple[Name, ...]


def objective(problem: ShelfProblem, plan: ShelfPlan) -> float:
    """Return the sum of the waits."""
    return sum(parcel.wait_ms for parcel in problem.parcels if parcel.name in plan.order)


def check(problem: ShelfProblem, plan: ShelfPlan) -> tuple[str, ...]:
    """Return a line for each parcel that is not there once."""
    return tuple(
        f"order: {parcel.name} stands there {plan.order.count(parcel.name)} times; once"
        for parcel in problem.parcels
        if plan.order.count(parcel.name) != 1
    )


def make_plan(
    problem: ShelfProblem, budget: Budget, heuristic: str | None, on_progress: Progress
) -> Planned[ShelfPlan]:
    """Return the parcels in their order, or fail as the length of the shelf says."""
    failures: dict[int, Exception] = {
        3: InfeasibleProblemError("length: 3 is too short by 1; a shelf of 4 holds the parcels"),
        4: NoPlanFoundError("no plan found within the limit (0.1 s): give more time; one may exist"),
        666: ZeroDivisionError("a fault\nof ours"),
        640: MemoryError("Unable to allocate 104. GiB"),
        130: KeyboardInterrupt(),  # type: ignore[dict-item]
    }
    if problem.length in failures:
        raise failures[problem.length]
    cost = sum(parcel.wait_ms for parcel in problem.parcels)
    step = Incumbency(seconds=0.0, objective=cost, bound=cost / 2, source=f"heuristic:{heuristic or 'sorted'}")
    on_progress(step)
    certificate = certify(
        objective=cost,
        bound=cost / 2,
        bound_from="closed-form:half",
        stopped_by="completed",
        seconds=0.0,
        incumbent=step.source,
        solver=f"none, seed {budget.seed}",
        trace=[step],
    )
    plan = ShelfPlan(
        problem_digest=digest_of(problem),
        certificate=certificate,
        order=tuple(parcel.name for parcel in problem.parcels),
    )
    return Planned(plan=plan, effort=Effort(wall_s=0.0, deterministic_s=0.0, first_plan_s=0.0))


SHELF = Wing(
    name="shelf",
    problem_type=ShelfProblem,
    plan_type=ShelfPlan,
    heuristics=("sorted", "longest"),
    planner=make_plan,
    checker=check,
    evaluator=objective,
    describer=lambda plan, problem: "order: " + " ".join(plan.order) + (f" on {problem.length}" if problem else ""),
    simulator=lambda problem, plan: f"{len(plan.order)} parcels carried",
)


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``shelf`` the one kind there is."""
    monkeypatch.setattr(kinds, "kind_named", lambda name: SHELF)
    monkeypatch.setattr(kinds, "problem_types", lambda: {"shelf": ShelfProblem})
    monkeypatch.setattr(kinds, "plan_types", lambda: {"shelf": ShelfPlan})
