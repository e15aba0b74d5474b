"""The kinds of problem, each with its rooms, behind one interface for the command line and the benchmarks.

A kind is loaded only when a document asks for it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from solver_plan.documents import PlanDocument, ProblemDocument, read_document
from solver_plan.enlargement import Larger, gains, gains_table
from solver_plan.errors import InputError
from solver_plan.solving.budget import Budget
from solver_plan.solving.outcome import Planned
from solver_plan.solving.progress import Progress, silent

ProblemT = TypeVar("ProblemT", bound=ProblemDocument)
PlanT = TypeVar("PlanT", bound=PlanDocument)

KINDS = ("parallelism", "wavefront", "offload")


class Kind(ABC):
    """What can be done with problems and plans of one kind."""

    name: str
    heuristics: tuple[str, ...]
    """Names that `--heuristic` takes."""

    @abstractmethod
    def plan(
        self,
        problem: ProblemDocument,
        budget: Budget,
        *,
        heuristic: str | None = None,
        on_progress: Progress = silent,
    ) -> Planned[PlanDocument]:
        """Find a plan; see `solver_plan.plan`."""

    @abstractmethod
    def check(self, problem: ProblemDocument, plan: PlanDocument) -> tuple[str, ...]:
        """Return every violation of the plan, one line each."""

    @abstractmethod
    def objective(self, problem: ProblemDocument, plan: PlanDocument) -> float:
        """Return the objective of a valid plan, recomputed. Raises `InvalidPlanError`."""

    @abstractmethod
    def describe(self, plan: PlanDocument, problem: ProblemDocument | None) -> str:
        """Return the plan as tables for a terminal."""

    @abstractmethod
    def simulate(self, problem: ProblemDocument, plan: PlanDocument) -> str:
        """Play the plan event by event and return what happened, as text for a terminal."""

    @abstractmethod
    def picture(self, plan: PlanDocument, problem: ProblemDocument | None) -> str | None:
        """Return the plan as a self-contained SVG; None: this kind has none, or it cannot be drawn."""

    @abstractmethod
    def what_if(self, problem: ProblemDocument, plan: PlanDocument, budget: Budget) -> str:
        """Return what binds a valid plan and what a larger machine would bring. Raises `InvalidPlanError`."""


@dataclass(frozen=True, kw_only=True)
class Wing(Kind, Generic[ProblemT, PlanT]):
    """A kind made of the functions of its wing."""

    name: str
    problem_type: type[ProblemT]
    plan_type: type[PlanT]
    heuristics: tuple[str, ...]
    planner: Callable[[ProblemT, Budget, str | None, Progress], Planned[PlanT]]
    checker: Callable[[ProblemT, PlanT], tuple[str, ...]]
    evaluator: Callable[[ProblemT, PlanT], float]
    describer: Callable[[PlanT, ProblemT | None], str]
    simulator: Callable[[ProblemT, PlanT], str]
    drawer: Callable[[PlanT, ProblemT | None], str | None] | None = None
    """A self-contained SVG, its texts escaped; None where it cannot be drawn, for want of the problem, say."""
    what_binds: Callable[[ProblemT, PlanT], str] | None = None
    """Which limits a plan meets, and what each costs, as tables."""
    larger: Callable[[ProblemT], list[Larger[ProblemT]]] | None = None
    """The problem with more of one resource each."""
    replanner: Callable[[ProblemT, PlanT, Budget], Planned[PlanT]] | None = None
    """A search that starts from a plan; None: it starts anew."""

    def plan(
        self,
        problem: ProblemDocument,
        budget: Budget,
        *,
        heuristic: str | None = None,
        on_progress: Progress = silent,
    ) -> Planned[PlanDocument]:
        """Find a plan; see `solver_plan.plan`."""
        if heuristic is not None and heuristic not in self.heuristics:
            raise InputError(f"heuristic: found {heuristic!r}; for {self.name} one of {', '.join(self.heuristics)}")
        found = self.planner(self._problem(problem), budget, heuristic, on_progress)
        return Planned(plan=found.plan, effort=found.effort)

    def check(self, problem: ProblemDocument, plan: PlanDocument) -> tuple[str, ...]:
        """Return every violation of the plan, one line each."""
        return self.checker(self._problem(problem), self._plan(plan))

    def objective(self, problem: ProblemDocument, plan: PlanDocument) -> float:
        """Return the objective of a valid plan, recomputed. Raises `InvalidPlanError`."""
        return self.evaluator(self._problem(problem), self._plan(plan))

    def describe(self, plan: PlanDocument, problem: ProblemDocument | None) -> str:
        """Return the plan as tables for a terminal."""
        return self.describer(self._plan(plan), None if problem is None else self._problem(problem))

    def simulate(self, problem: ProblemDocument, plan: PlanDocument) -> str:
        """Play the plan event by event and return what happened, as text for a terminal."""
        return self.simulator(self._problem(problem), self._plan(plan))

    def picture(self, plan: PlanDocument, problem: ProblemDocument | None) -> str | None:
        """Return the plan as a self-contained SVG; None: this kind has none, or it cannot be drawn."""
        if self.drawer is None:
            return None
        return self.drawer(self._plan(plan), None if problem is None else self._problem(problem))

    def what_if(self, problem: ProblemDocument, plan: PlanDocument, budget: Budget) -> str:
        """Return what binds a valid plan and what a larger machine would bring. Raises `InvalidPlanError`."""
        own_problem, own_plan = self._problem(problem), self._plan(plan)
        objective_ms = self.evaluator(own_problem, own_plan)
        optimal = own_plan.certificate is not None and own_plan.certificate.status == "optimal"
        asked = [] if optimal else [Larger(change="nothing but more search", problem=own_problem)]
        asked += [] if self.larger is None else self.larger(own_problem)
        found = gains(objective_ms, own_plan, asked, self.replanner or self._planned_anew, budget)
        parts = ["" if self.what_binds is None else self.what_binds(own_problem, own_plan)]
        parts.append("What more would bring:\n\n" + gains_table(objective_ms, found) if found else "")
        return "\n\n".join(part for part in parts if part)

    def _planned_anew(self, problem: ProblemT, start: PlanT, budget: Budget) -> Planned[PlanT]:
        return self.planner(problem, budget, None, silent)

    def _problem(self, problem: ProblemDocument) -> ProblemT:
        if not isinstance(problem, self.problem_type):
            raise InputError(
                f"the problem is of kind {problem.kind}, the plan of kind {self.name}: give two that match"
            )
        return problem

    def _plan(self, plan: PlanDocument) -> PlanT:
        if not isinstance(plan, self.plan_type):
            raise InputError(f"the plan is of kind {plan.kind}, the problem of kind {self.name}: give two that match")
        return plan


def kind_of(document: ProblemDocument | PlanDocument) -> Kind:
    """Return the kind of a document."""
    return kind_named(document.kind)


def kind_named(name: str) -> Kind:
    """Return a kind by its name; only that wing is imported."""
    assert name in KINDS, name
    if name == "wavefront":
        from solver_plan.wavefront.kind import WAVEFRONT

        return WAVEFRONT
    if name == "offload":
        from solver_plan.offload.kind import OFFLOAD

        return OFFLOAD
    from solver_plan.parallelism.kind import PARALLELISM

    return PARALLELISM


def problem_types() -> dict[str, type[ProblemDocument]]:
    """Return the document class of the problems of each kind."""
    from solver_plan.offload.problem import OffloadProblem
    from solver_plan.parallelism.problem import ParallelismProblem
    from solver_plan.wavefront.problem import WavefrontProblem

    return {"parallelism": ParallelismProblem, "offload": OffloadProblem, "wavefront": WavefrontProblem}


def plan_types() -> dict[str, type[PlanDocument]]:
    """Return the document class of the plans of each kind."""
    from solver_plan.offload.plan import OffloadPlan
    from solver_plan.parallelism.plan import ParallelismPlan
    from solver_plan.wavefront.plan import WavefrontPlan

    return {"parallelism": ParallelismPlan, "offload": OffloadPlan, "wavefront": WavefrontPlan}


def read_problem(path: str | Path) -> ProblemDocument:
    """Read and validate a problem of any kind. Raises `DocumentError`."""
    return read_document(path, problem_types(), "solver-plan/problem")


def read_plan(path: str | Path) -> PlanDocument:
    """Read and validate a plan of any kind. Raises `DocumentError`."""
    return read_document(path, plan_types(), "solver-plan/plan")


def read_problem_and_plan(problem: str | Path, plan: str | Path) -> tuple[ProblemDocument, PlanDocument]:
    """Read both files. Raises `DocumentError`, and `InputError` if they are of different kinds."""
    found, made = read_problem(problem), read_plan(plan)
    if found.kind != made.kind:
        raise InputError(
            f"{plan}: found a plan of kind {made.kind}; {problem} is a problem of kind {found.kind}: "
            "give two that match"
        )
    return found, made
