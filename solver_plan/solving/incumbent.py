"""The best plan and the best bound of a search, kept outside every solver."""

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from solver_plan.documents.certificate import AGREEMENT, Certificate, Incumbency, StoppedBy, certify
from solver_plan.errors import InvalidPlanError, NoPlanFoundError
from solver_plan.solving.budget import Clock
from solver_plan.solving.progress import Progress, silent

PlanT = TypeVar("PlanT")
log = logging.getLogger(__name__)


class Incumbent(Generic[PlanT]):
    """Holds the best plan found by anyone and the best bound proven by anyone.

    Every plan that is offered is evaluated here, outside the solver that found it: the solver's word on feasibility
    and objective is never taken. Thread-safe.

    Parameters
    ----------
    evaluate
        Returns the objective of a plan; raises `InvalidPlanError` if the plan violates the problem.
    clock
        Gives the time of each step.
    on_progress
        Is told each step.
    """

    def __init__(self, evaluate: Callable[[PlanT], float], clock: Clock, on_progress: Progress = silent) -> None:
        self._evaluate = evaluate
        self._clock = clock
        self._on_progress = on_progress
        self._lock = threading.RLock()
        self.plan: PlanT | None = None
        self.objective: float | None = None
        self.source: str | None = None
        self.bound: float | None = None
        self.bound_from: str | None = None
        self.trace: list[Incumbency] = []

    def offer(self, plan: PlanT, source: str) -> bool:
        """Take the plan if it is valid and better than the best so far; True if it was taken."""
        try:
            objective = self._evaluate(plan)
        except InvalidPlanError as error:
            # heuristics enumerate plans that may not fit; a solver's plan that does not is worth a look
            level = logging.DEBUG if source.startswith("heuristic:") else logging.WARNING
            log.log(level, "a plan of %s is not valid and was dropped: %s", source, error)
            return False
        with self._lock:
            if self.objective is not None and objective >= self.objective:
                return False
            self.plan, self.objective, self.source = plan, objective, source
            self._record(source)
        return True

    def raise_bound(self, bound: float, source: str) -> bool:
        """Take a proven lower bound on every valid plan if it is above the best so far; True if it was taken."""
        with self._lock:
            if bound <= 0 or (self.bound is not None and bound <= self.bound):
                return False
            self.bound, self.bound_from = bound, source
            self._record(source)
        return True

    @property
    def gap(self) -> float | None:
        """(objective - bound) / objective, at least 0; None while either is missing."""
        with self._lock:
            if self.objective is None or self.bound is None:
                return None
            if self.objective <= 0:
                return 0.0
            return max(0.0, (self.objective - self.bound) / self.objective)

    @property
    def closed(self) -> bool:
        """True when the plan is optimal, or within the gap that was asked for."""
        gap = self.gap
        return gap is not None and gap <= max(AGREEMENT, self._clock.budget.gap_limit)

    def certificate(self, solver: str, *, completed: bool = False) -> Certificate:
        """Certify the best plan.

        Parameters
        ----------
        solver
            Name, version, workers, seed.
        completed
            The search ran to its end (a heuristic), rather than into a limit.

        Raises
        ------
        NoPlanFoundError
            If there is no plan: within the limit, or at all in what was searched.
        """
        with self._lock:
            if (self.objective is None or self.source is None) and completed and not self._clock.interrupted:
                raise NoPlanFoundError(
                    "no plan found: the search ended by itself, more time would not help; search without --heuristic, "
                    "or loosen a limit of the problem"
                )
            if self.objective is None or self.source is None:
                raise NoPlanFoundError(
                    f"no plan found within the limit ({self._clock.seconds:.1f} s): give more time; one may exist"
                )
            stopped: StoppedBy
            if self.closed:
                stopped = "gap"
            else:
                stopped = "completed" if completed and not self._clock.interrupted else self._clock.limit_reached
            return certify(
                objective=self.objective,
                bound=self.bound,
                bound_from=self.bound_from,
                stopped_by=stopped,
                seconds=self._clock.seconds,
                incumbent=self.source,
                solver=solver,
                trace=self.trace,
            )

    def _record(self, source: str) -> None:
        step = Incumbency(
            seconds=round(self._clock.seconds, 3), objective=self.objective, bound=self.bound, source=source
        )
        self.trace.append(step)
        self._on_progress(step)
