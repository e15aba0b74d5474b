"""What came of one case with one method, in the units of the tables."""

import importlib.metadata
import platform
from dataclasses import asdict, dataclass
from typing import Literal

PLANNER = "planner"
"""The method that is no baseline."""

Ending = Literal["planned", "skipped", "infeasible", "no plan", "invalid", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One row of the results; None where a figure does not exist."""

    case: str
    method: str
    """`PLANNER`, or the name of a baseline."""
    ending: Ending
    reason: str | None = None
    """Why there is no valid plan."""
    status: str | None = None
    objective_ms: float | None = None
    bound_ms: float | None = None
    bound_from: str | None = None
    gap: float | None = None
    stopped_by: str | None = None
    incumbent: str | None = None
    """Who found the plan."""
    first_plan_s: float | None = None
    wall_s: float | None = None
    cpu_s: float | None = None
    """Of all threads, planning alone."""
    deterministic_s: float | None = None
    peak_memory_bytes: int | None = None
    """Of the process, imports included."""
    time_limit_s: float | None = None
    workers: int | None = None
    seed: int | None = None
    deterministic: bool | None = None

    def as_dict(self) -> dict[str, str | float | bool | None]:
        """Return the figures by name."""
        return asdict(self)


def versions() -> dict[str, str]:
    """Return the versions that figures depend on."""
    packages = ("solver-plan", "ortools", "highspy", "PuLP", "numpy", "networkx")
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
