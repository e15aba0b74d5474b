"""One way to solve a PuLP program with HiGHS, where warm start and dual bound really arrive.

PuLP's HiGHS interface ignores `warmStart`, and PuLP calls a solution found at a time limit optimal; here the start is
handed to HiGHS itself, and status and bound are HiGHS's own.
"""

import importlib.metadata
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import highspy
import pulp

from solver_plan.errors import SolverError
from solver_plan.solving.budget import Clock

MilpStatus = Literal["optimal", "feasible", "infeasible", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MilpOutcome:
    """What came of one call; values are on the program's variables. `bound` is HiGHS's dual bound, None if unknown."""

    status: MilpStatus
    objective: float | None
    bound: float | None
    start_was_used: bool
    wall_s: float


class _HiGHS(pulp.HiGHS):  # type: ignore[misc]
    """PuLP's interface to HiGHS that passes a start on."""

    def __init__(self, start: Mapping[pulp.LpVariable, float] | None, **options: float | str | bool) -> None:
        super().__init__(msg=False, **options)
        self._start = start
        self.start_was_used = False

    def callSolver(self, lp: pulp.LpProblem) -> None:
        if self._start is not None:
            solution = highspy.HighsSolution()
            variables = sorted(lp.variables(), key=lambda variable: variable.index)
            solution.col_value = [float(self._start[variable]) for variable in variables]
            self.start_was_used = lp.solverModel.setSolution(solution) == highspy.HighsStatus.kOk
        super().callSolver(lp)


def highs_version() -> str:
    """Return the name and version of the solver, for certificates."""
    return f"HiGHS {importlib.metadata.version('highspy')}"


def solve_milp(
    program: pulp.LpProblem,
    clock: Clock,
    *,
    start: Mapping[pulp.LpVariable, float] | None = None,
    limit: float | None = None,
    gap_limit: float | None = None,
    integrality: bool = True,
) -> MilpOutcome:
    """Solve a minimisation within what is left of the budget.

    Parameters
    ----------
    program
        The program; its variables hold the solution afterwards.
    clock
        Budget. HiGHS counts no deterministic time: in deterministic mode the limit is a safety net of ten times the
        value, and a program is best bounded by its size.
    start
        Value of every variable of a feasible point.
    limit
        Use at most this much of what is left, in the clock's unit.
    gap_limit
        Relative gap to stop at; None: the budget's.
    integrality
        False solves the linear relaxation.

    Raises
    ------
    SolverError
        If HiGHS fails.
    """
    if program.sense != pulp.LpMinimize:
        raise SolverError("solve_milp minimises; negate the objective")
    remaining = clock.remaining if limit is None else min(limit, clock.remaining)
    if remaining <= 0:
        return MilpOutcome(status="unknown", objective=None, bound=None, start_was_used=False, wall_s=0.0)
    gap = clock.budget.gap_limit if gap_limit is None else gap_limit
    solver = _HiGHS(
        start,
        mip=integrality,
        timeLimit=remaining * 10 if clock.budget.deterministic else remaining,
        gapRel=gap,
        threads=1 if clock.budget.deterministic else clock.budget.worker_count,
        random_seed=clock.budget.seed,
    )
    begin = clock.seconds
    try:
        program.solve(solver)
    except pulp.PulpSolverError as error:
        raise SolverError(f"HiGHS failed: {error}") from error
    highs = program.solverModel
    wall_s = clock.seconds - begin
    info = highs.getInfo()
    clock.spend(1e-5 * max(0, info.simplex_iteration_count) + 1e-3 * max(0, info.mip_node_count))
    return _outcome(program, highs, integrality, solver.start_was_used, wall_s)


def _outcome(
    program: pulp.LpProblem, highs: highspy.Highs, integrality: bool, start_was_used: bool, wall_s: float
) -> MilpOutcome:
    model_status = highs.getModelStatus()
    info = highs.getInfo()
    statuses = highspy.HighsModelStatus
    objective: float | None = None
    bound: float | None = None
    status: MilpStatus
    if model_status in (statuses.kInfeasible, statuses.kUnboundedOrInfeasible):
        status = "infeasible"
    else:
        solved = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        if solved:
            objective = float(pulp.value(program.objective))
        is_mip = integrality and any(variable.cat == pulp.LpInteger for variable in program.variables())
        optimal = model_status == statuses.kOptimal
        constant = float(program.objective.constant)
        if is_mip:
            dual = float(info.mip_dual_bound)
            bound = dual if math.isfinite(dual) and abs(dual) < 1e20 else None
        elif optimal and objective is not None:
            bound = float(info.objective_function_value) + (0.0 if _has_offset(highs) else constant)
        if bound is not None and is_mip and not _has_offset(highs):
            bound += constant
        if optimal and objective is not None and bound is not None:
            status = "optimal" if objective - bound <= 1e-6 * max(1.0, abs(objective)) else "feasible"
        else:
            status = "feasible" if solved else "unknown"
    return MilpOutcome(status=status, objective=objective, bound=bound, start_was_used=start_was_used, wall_s=wall_s)


def _has_offset(highs: highspy.Highs) -> bool:
    return float(highs.getLp().offset_) != 0.0
