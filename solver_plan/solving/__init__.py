"""Solver plumbing shared by the planners: limits, the incumbent, CP-SAT, MILP, progress, interruption."""

from solver_plan.solving.budget import Budget, Clock
from solver_plan.solving.cp_sat import CpSatOutcome, Hint, solve_cp_sat
from solver_plan.solving.incumbent import Incumbent
from solver_plan.solving.milp import MilpOutcome, solve_milp
from solver_plan.solving.outcome import Planned
from solver_plan.solving.progress import Progress, silent, terminal_progress

__all__ = [
    "Budget",
    "Clock",
    "CpSatOutcome",
    "Hint",
    "Incumbent",
    "MilpOutcome",
    "Planned",
    "Progress",
    "silent",
    "solve_cp_sat",
    "solve_milp",
    "terminal_progress",
]
