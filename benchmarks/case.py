"""What a benchmark case is, and where the reference data lies."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from solver_plan.documents import ProblemDocument
from solver_plan.solving import Budget

PROJECT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A figure to compare with."""

    source: str
    """Who says so, as ``Aceso, predicted``."""
    objective_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem, solved by the planner and by each baseline."""

    name: str
    build: Callable[[Path], ProblemDocument]
    """Makes the problem from the folder of reference data, which it reads only if `data` names something there."""
    data: str | None = None
    """What it needs of the reference data, relative to its folder; None: nothing."""
    budget: Budget = field(default_factory=Budget)
    baselines: tuple[str, ...] = ()
    """Heuristics of the kind to run beside the planner."""
    references: tuple[Reference, ...] = ()
    smoke: bool = False
    """Small enough for the tests."""


def data_folder() -> Path:
    """Folder of the reference data: `SOLVER_PLAN_DATA`, by default `shared/data` beside the repository."""
    return Path(os.environ.get("SOLVER_PLAN_DATA", PROJECT.parent / "shared" / "data"))
