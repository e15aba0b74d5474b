"""The certificate of a plan: how good it is, how that is known, and why the search ended."""

from collections.abc import Sequence
from typing import Annotated, Literal

from annotated_types import Ge, Le

from solver_plan.documents.fields import document

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
    bound: Annotated[float, Ge(0)] | None
    bound_from: str | None = None
    gap: Annotated[float, Ge(0), Le(1)] | None
    stopped_by: StoppedBy
    seconds: Seconds
    incumbent: str
    solver: str
    trace: tuple[Incumbency, ...] = ()
    """Plans and bounds found on the way."""


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
    gap = None if bound is None else (objective - bound) / objective
    optimal = gap is not None and gap <= AGREEMENT
    return Certificate(
        status="optimal" if optimal else "feasible",
        objective=objective,
        bound=bound,
        bound_from=bound_from,
        gap=gap,
        stopped_by="proof" if optimal else stopped_by,
        seconds=round(seconds, 3),
        incumbent=incumbent,
        solver=solver,
        trace=tuple(trace),
    )
