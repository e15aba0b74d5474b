"""What a larger machine would bring: the problem with more of one resource, planned again from the plan there is.

    gain        objective of the plan - objective of the best plan found for the larger machine, at least 0
    at most     objective of the plan - bound of the larger problem: no plan for it gains more

The plan itself is valid on a larger machine (whose devices may stay idle), so a gain is never negative. A plan that is
not proven optimal is first searched on as it is: what more search brings is not the larger machine's merit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from solver_plan.documents import PlanDocument, ProblemDocument
from solver_plan.documents.certificate import AGREEMENT, StoppedBy
from solver_plan.errors import NoPlanFoundError
from solver_plan.report.tables import STOPPED_BY, Cell, table
from solver_plan.solving.budget import Budget
from solver_plan.solving.outcome import Planned

ProblemT = TypeVar("ProblemT", bound=ProblemDocument)
PlanT = TypeVar("PlanT", bound=PlanDocument)


@dataclass(frozen=True, slots=True, kw_only=True)
class Larger(Generic[ProblemT]):
    """A problem whose machine has more of one resource; every plan of the smaller one is a plan of it."""

    change: str
    """What there is more of, as ``1 GiB more on each device``."""
    problem: ProblemT


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What one change brings."""

    change: str
    objective_ms: float
    """Of the best plan known."""
    bound_ms: float | None
    """Every plan takes at least so long; None: nothing proven."""
    stopped_by: StoppedBy


def gains(
    objective_ms: float,
    plan: PlanT,
    larger: Sequence[Larger[ProblemT]],
    search: Callable[[ProblemT, PlanT, Budget], Planned[PlanT]],
    budget: Budget,
) -> list[Gain]:
    """Plan each larger problem within an equal share of a budget; fewer of them after an interruption.

    Parameters
    ----------
    objective_ms
        Of the plan, which is valid for each of the problems.
    plan
        What the search may start from; it carries no digest and no certificate.
    larger
        Problems to plan.
    search
        Plans a problem within a budget.
    budget
        For all of them together.
    """
    share = replace(budget, time_limit_s=budget.time_limit_s / max(1, len(larger)))
    start = replace(plan, problem_digest=None, certificate=None)
    found: list[Gain] = []
    for one in larger:
        try:
            certificate = search(one.problem, start, share).plan.certificate
        except NoPlanFoundError:
            found.append(Gain(change=one.change, objective_ms=objective_ms, bound_ms=None, stopped_by="time"))
            continue
        assert certificate is not None
        best_ms = min(objective_ms, certificate.objective)
        bound_ms = None if certificate.bound is None else min(certificate.bound, best_ms)
        stopped = certificate.stopped_by
        found.append(Gain(change=one.change, objective_ms=best_ms, bound_ms=bound_ms, stopped_by=stopped))
        if stopped == "interrupt":
            break
    return found


def gains_table(objective_ms: float, found: Sequence[Gain]) -> str:
    """Return what the changes bring, as a table for a terminal."""
    rows: list[list[Cell]] = []
    for gain in found:
        gained_ms = objective_ms - gain.objective_ms
        most_ms = None if gain.bound_ms is None else objective_ms - gain.bound_ms
        proven = most_ms is not None and most_ms - gained_ms <= AGREEMENT * objective_ms
        rows.append(
            [
                gain.change,
                gain.objective_ms,
                gained_ms,
                f"{gained_ms / objective_ms:.2%}" if objective_ms > 0 else None,
                None if most_ms is None or objective_ms <= 0 else f"{most_ms / objective_ms:.2%}",
                _ending(gain, proven, none=gained_ms <= AGREEMENT * objective_ms),
            ]
        )
    return table(["change", "plan (ms)", "gain (ms)", "gain", "at most", "search"], rows)


def _ending(gain: Gain, proven: bool, *, none: bool) -> str:
    if proven:
        return "no gain is possible" if none else "no more is possible"
    return STOPPED_BY[gain.stopped_by]
