"""One way to solve a PuLP program with HiGHS, where warm start and dual bound really arrive.

PuLP's HiGHS interface ignores `warmStart` and the constant of the objective, calls a solution found at a time limit
optimal, and passes the values of a program without solution on as if they were one; HiGHS itself refuses, silently, to
run with another number of threads than before in one process. Here start and constant are handed to HiGHS, and status
and bound are HiGHS's own.
"""

import functools
import importlib.metadata
import logging
import math
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import highspy
import pulp

from solver_plan.errors import SolverError
from solver_plan.solving.background import run_interruptibly
from solver_plan.solving.budget import Clock
from solver_plan.solving.lp_bound import dual_bound

log = logging.getLogger(__name__)

MilpStatus = Literal["optimal", "feasible", "infeasible", "unknown"]
START_IS_FEASIBLE = "MIP start solution is feasible"
"""What HiGHS's log says of a start it could use."""
OPTIMALITY = 1e-6
"""Objective and bound that agree to this, relative, are equal: HiGHS's own tolerances are of this size."""

_RAN_INTO_A_LIMIT = (
    highspy.HighsModelStatus.kTimeLimit,
    highspy.HighsModelStatus.kInterrupt,
    highspy.HighsModelStatus.kIterationLimit,
    highspy.HighsModelStatus.kSolutionLimit,
    highspy.HighsModelStatus.kUnknown,
)
_one_solve_at_a_time = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class MilpOutcome:
    """What came of one call.

    Values are on the program's variables (`varValue`; None if there is no solution). `bound` holds for every solution:
    HiGHS's dual bound, or for a linear program what its duals prove; None if nothing is known.
    """

    status: MilpStatus
    objective: float | None
    bound: float | None
    start_was_used: bool
    wall_s: float
    log: str


@functools.cache
def _swallow_banner() -> None:
    """Build the first instance of HiGHS with standard output closed off.

    HiGHS 1.16 prints a banner to file descriptor 1 when the first instance of a process is built, before any option
    can be set; a plan on standard output would begin with it.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        highspy.Highs()  # type: ignore[no-untyped-call]
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


class _HiGHS(pulp.HiGHS):  # type: ignore[misc]
    """PuLP's interface to HiGHS, with start, constant and interruption."""

    def __init__(
        self, clock: Clock, start: Mapping[pulp.LpVariable, float] | None, **options: float | str | bool
    ) -> None:
        super().__init__(msg=False, **options)
        self._clock = clock
        self._start = start
        self.lines: list[str] = []

    def actualSolve(self, lp: pulp.LpProblem) -> int:
        _swallow_banner()
        self.createAndConfigureSolver(lp)
        self.buildSolverModel(lp)
        highs: highspy.Highs = lp.solverModel
        highs.setOptionValue("log_to_console", False)
        highs.setOptionValue("output_flag", True)
        highs.cbLogging.subscribe(lambda event: self.lines.append(event.message))
        highs.changeObjectiveOffset(float(lp.objective.constant))
        variables = sorted(lp.variables(), key=lambda variable: variable.index)
        if self._start is not None:
            solution = highspy.HighsSolution()
            solution.col_value = [float(self._start[variable]) for variable in variables]
            highs.setSolution(solution)
        highs.HandleUserInterrupt = True
        _run(highs, self._clock)
        if highs.getModelStatus() == highspy.HighsModelStatus.kUnboundedOrInfeasible:
            highs.setOptionValue("presolve", "off")
            _run(highs, self._clock)
        found = highs.getInfo().primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        values = highs.getSolution().col_value
        for variable in variables:
            variable.varValue = values[variable.index] if found else None
            if found and self.mip and variable.cat == pulp.LpInteger:
                variable.varValue = float(round(variable.varValue))
        status = pulp.LpStatusOptimal if found else pulp.LpStatusNotSolved
        lp.assignStatus(status)
        return int(status)


def _run(highs: highspy.Highs, clock: Clock) -> None:
    run_interruptibly(highs.run, highs.cancelSolve, clock)


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
    node_limit: int | None = None,
) -> MilpOutcome:
    """Solve a minimisation within what is left of the budget.

    Parameters
    ----------
    program
        The program; its variables hold the solution afterwards, whole numbers rounded.
    clock
        Budget and interruption. HiGHS counts no deterministic time: in deterministic mode the limit is a safety net of
        ten times the value, and a program is best bounded by its size.
    start
        Value of every variable of a feasible point.
    limit
        Use at most this much of what is left, in the clock's unit.
    gap_limit
        Relative gap to stop at; None: the budget's.
    integrality
        False solves the linear relaxation.
    node_limit
        Search at most this many branch-and-bound nodes: a limit that does not depend on the machine.

    Raises
    ------
    SolverError
        If HiGHS fails, or the program has no lower bound.
    """
    if program.sense != pulp.LpMinimize:
        raise SolverError("solve_milp minimises; negate the objective")
    remaining = clock.remaining if limit is None else min(limit, clock.remaining)
    if remaining <= 0:
        return MilpOutcome(status="unknown", objective=None, bound=None, start_was_used=False, wall_s=0.0, log="")
    solver = _HiGHS(
        clock,
        start,
        mip=integrality,
        timeLimit=remaining * 10 if clock.budget.deterministic else remaining,
        gapRel=clock.budget.gap_limit if gap_limit is None else gap_limit,
        gapAbs=0.0,
        threads=1 if clock.budget.deterministic else clock.budget.worker_count,
        random_seed=clock.budget.seed,
        **({} if node_limit is None else {"mip_max_nodes": node_limit}),
    )
    begin = clock.seconds
    with _one_solve_at_a_time:
        highspy.Highs.resetGlobalScheduler(True)
        program.solve(solver)
    highs: highspy.Highs = program.solverModel
    info = highs.getInfo()
    clock.spend(1e-5 * max(0, info.simplex_iteration_count) + 1e-3 * max(0, info.mip_node_count))
    text = "".join(solver.lines)
    log.debug("%s", text)
    return _outcome(program, highs, integrality, text, clock.seconds - begin)


def _outcome(program: pulp.LpProblem, highs: highspy.Highs, integrality: bool, text: str, wall_s: float) -> MilpOutcome:
    model_status, statuses = highs.getModelStatus(), highspy.HighsModelStatus
    info = highs.getInfo()
    objective: float | None = None
    bound: float | None = None
    status: MilpStatus
    if model_status == statuses.kInfeasible:
        status = "infeasible"
    elif model_status == statuses.kOptimal or model_status in _RAN_INTO_A_LIMIT:
        found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        if found:
            objective = 0.0 if program.objective is None else float(pulp.value(program.objective))
        if integrality and any(variable.cat == pulp.LpInteger for variable in program.variables()):
            raw = float(info.mip_dual_bound)
            bound = raw if math.isfinite(raw) and abs(raw) < 1e20 else None
        else:
            bound = dual_bound(highs)
        optimal = (
            model_status == statuses.kOptimal
            and objective is not None
            and bound is not None
            and objective - bound <= OPTIMALITY * max(1.0, abs(objective))
        )
        status = "optimal" if optimal else "feasible" if found else "unknown"
    elif model_status == statuses.kUnbounded:
        raise SolverError("the objective has no lower bound: a variable or a constraint is missing")
    else:
        raise SolverError(f"HiGHS failed: {highs.modelStatusToString(model_status)}; {text[-300:].strip()}")
    return MilpOutcome(
        status=status,
        objective=objective,
        bound=bound,
        start_was_used=START_IS_FEASIBLE in text,
        wall_s=wall_s,
        log=text,
    )
