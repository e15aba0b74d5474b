"""Solver plumbing shared by the planners: limits, the incumbent, CP-SAT, MILP, progress, interruption.

The solvers themselves take a second to import and are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING

from solver_plan.solving.budget import Budget, Clock, OutOfTimeError
from solver_plan.solving.incumbent import Incumbent
from solver_plan.solving.outcome import Effort, Planned
from solver_plan.solving.progress import Progress, silent, terminal_progress

if TYPE_CHECKING:
    from solver_plan.solving.cp_sat import CpSatOutcome, Hint, solve_cp_sat
    from solver_plan.solving.milp import MilpOutcome, solve_milp

_ROOMS = {
    "CpSatOutcome": "solver_plan.solving.cp_sat",
    "Hint": "solver_plan.solving.cp_sat",
    "MilpOutcome": "solver_plan.solving.milp",
    "solve_cp_sat": "solver_plan.solving.cp_sat",
    "solve_milp": "solver_plan.solving.milp",
}

__all__ = [
    "Budget",
    "Clock",
    "CpSatOutcome",
    "Effort",
    "Hint",
    "Incumbent",
    "MilpOutcome",
    "OutOfTimeError",
    "Planned",
    "Progress",
    "silent",
    "solve_cp_sat",
    "solve_milp",
    "terminal_progress",
]


def __getattr__(name: str) -> object:
    if name not in _ROOMS:
        raise AttributeError(f"module 'solver_plan.solving' has no attribute {name!r}")
    return getattr(importlib.import_module(_ROOMS[name]), name)
