"""The certificate of a plan: how good it is, how that is known, and why the search ended."""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from annotated_types import Ge, Gt, Le
from pydantic import model_validator

from solver_plan.documents.fields import document, fail

AGREEMENT = 1e-6
"""Objective and bound that agree to this, relative, count as equal: the plan is optimal."""

Seconds = Annotated[float, Ge(0)]
StoppedBy = Literal["proof", "gap", "time", "deterministic_time", "interrupt", "completed"]


@document
class Incumbency:
    """One step of a search: a better plan or a better bound."""

    seconds: Seconds
    objective: float | None
    bound: float | None
    source: str


@document
class Certificate:
    """How good a plan is proven to be. Status, limit hit, bound and gap are separate facts."""

    status: Literal["optimal", "feasible"]
    objective: Annotated[float, Ge(0)]
    bound: Annotated[float, Gt(0)] | None
    bound_from: str | None = None
    gap: Annotated[float, Ge(0), Le(1)] | None
    stopped_by: StoppedBy
    seconds: Seconds
    incumbent: str
    solver: str
    trace: tuple[Incumbency, ...] = ()
    """Plans and bounds found on the way."""

    @model_validator(mode="after")
    def _follows(self) -> Self:
        """Status and gap say what objective and bound say; whether these are true, `check` finds out."""
        gap = _gap(self.objective, self.bound)
        if (gap is None) != (self.gap is None) or abs((gap or 0.0) - (self.gap or 0.0)) > AGREEMENT:
            raise fail("gap", self.gap, f"(objective - bound) / objective, null without a bound: {gap}")
        status = _status(gap)
        if self.status != status:
            raise fail("status", self.status, f"'{status}': optimal if and only if the gap is at most {AGREEMENT:g}")
        return self


def _gap(objective: float, bound: float | None) -> float | None:
    """Return the gap, 0 for a bound above the objective."""
    if bound is None:
        return None
    return max(0.0, (objective - bound) / objective) if objective > 0 else 0.0


def _status(gap: float | None) -> Literal["optimal", "feasible"]:
    return "optimal" if gap is not None and gap <= AGREEMENT else "feasible"


def certify(
    *,
    objective: float,
    bound: float | None,
    bound_from: str | None,
    stopped_by: StoppedBy,
    seconds: float,
    incumbent: str,
    solver: str,
    trace: Sequence[Incumbency] = (),
) -> Certificate:
    """Return a certificate whose status and gap follow from objective and bound.

    A bound that exceeds the objective by no more than the tolerance of solvers is cut to the objective; by more is a
    fault of ours. A bound of 0 or less proves nothing.
    """
    if bound is not None:
        assert bound <= objective * (1 + AGREEMENT), f"bound {bound!r} above objective {objective!r}"
        bound = min(bound, objective)
    if bound is None or bound <= 0:
        bound, bound_from = None, None
    gap = _gap(objective, bound)
    status = _status(gap)
    return Certificate(
        status=status,
        objective=objective,
        bound=bound,
        bound_from=bound_from,
        gap=gap,
        stopped_by="proof" if status == "optimal" else stopped_by,
        seconds=round(seconds, 3),
        incumbent=incumbent,
        solver=solver,
        trace=tuple(trace),
    )
