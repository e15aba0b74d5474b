"""One way to call CP-SAT: limits, hints, callbacks, log, and what came of it.

Statuses are read with the traps of CP-SAT 9.15 in mind: under a gap limit the solver says OPTIMAL at the gap, a time
limit that ends in presolve loses a complete feasible hint and gives a bound of 0 that nobody proved, a wrong parameter
is MODEL_INVALID, and its own way of catching Ctrl-C leaves Python's handler out, during the call and after it.
"""

import importlib.metadata
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from ortools.sat.python import cp_model

from solver_plan.errors import SolverError
from solver_plan.solving.background import run_interruptibly
from solver_plan.solving.budget import Clock

log = logging.getLogger(__name__)

Hint = Mapping[cp_model.IntVar, int]
"""Value of every variable of a model, in full."""
CpSatStatus = Literal["optimal", "feasible", "infeasible", "unknown"]
HINT_IS_FEASIBLE = "The solution hint is complete and is feasible."
"""What CP-SAT's log says of a hint it could use as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpSatOutcome:
    """What came of one call.

    `values` gives the value of a variable in the best solution of this call; None where there is none. `objective` and
    `bound` are in the model's own (integer) unit, `bound` rounded up to a whole number and None where nothing is known.
    """

    status: CpSatStatus
    objective: int | None
    bound: int | None
    values: Callable[[cp_model.IntVar], int] | None
    hint_was_feasible: bool
    deterministic_s: float
    wall_s: float
    log: str


PROVERS = ("max_lp", "no_lp", "default_lp", "quick_restart", "reduced_costs")
"""Subsolvers that search the whole tree, in the order in which workers get one."""


class _Watcher(cp_model.CpSolverSolutionCallback):
    """Passes solutions on."""

    def __init__(self, on_solution: Callable[[Callable[[cp_model.IntVar], int]], None] | None) -> None:
        super().__init__()
        self._on_solution = on_solution

    def on_solution_callback(self) -> None:
        if self._on_solution is not None:
            self._on_solution(self.value)


def cp_sat_version() -> str:
    """Return the name and version of the solver, for certificates."""
    return f"CP-SAT {importlib.metadata.version('ortools')}"


def solve_cp_sat(
    model: cp_model.CpModel,
    clock: Clock,
    *,
    hint: Hint | None = None,
    limit: float | None = None,
    gap_limit: float | None = None,
    workers: int | None = None,
    seed: int | None = None,
    on_solution: Callable[[Callable[[cp_model.IntVar], int]], None] | None = None,
    on_bound: Callable[[float], None] | None = None,
    fix_to_hint: bool = False,
    light: bool = False,
    for_proof: bool = False,
) -> CpSatOutcome:
    """Solve a minimisation, or a model without objective, within what is left of the budget.

    Parameters
    ----------
    model
        The model. Hints it already has are replaced.
    clock
        Budget and interruption; the deterministic time used is spent on it.
    hint
        A warm start; it must name every variable of the model.
    limit
        Use at most this much of what is left, in the clock's unit.
    gap_limit
        Relative gap to stop at; None: the budget's.
    workers
        Solver workers; None: the budget's.
    seed
        Random seed; None: the budget's.
    on_solution
        Called with a function from variable to value at each better solution, in a solver thread; with several workers
        in deterministic mode once, with the best. What it raises ends the search and is raised here.
    on_bound
        The same with each better bound, in the model's unit.
    fix_to_hint
        Solve with every variable fixed to its hinted value: infeasible if the hint is (for tests of hints).
    light
        No linear relaxation, no probing, no symmetries: for programs so small that these take longer than the search.
    for_proof
        With several workers, let all of them search the whole tree, with the strongest linear relaxation and without
        any: where a good solution is known and the proof is missing. By default all but one look for solutions.

    Raises
    ------
    SolverError
        If the model or a parameter is invalid, with the solver's words.
    """
    invalid = model.validate()
    if invalid:
        raise SolverError(f"CP-SAT refuses the model: {invalid}")
    if model.has_objective() and model.proto.objective.scaling_factor < 0:
        raise SolverError("solve_cp_sat minimises; negate the objective")
    remaining = clock.remaining if limit is None else min(limit, clock.remaining)
    if remaining <= 0:
        return CpSatOutcome(
            status="unknown",
            objective=None,
            bound=None,
            values=None,
            hint_was_feasible=False,
            deterministic_s=0.0,
            wall_s=0.0,
            log="",
        )
    model.clear_hints()  # type: ignore[no-untyped-call]
    for variable, value in (hint or {}).items():
        model.add_hint(variable, value)

    solver = cp_model.CpSolver()
    parameters = solver.parameters
    budget = clock.budget
    parameters.num_workers = workers if workers is not None else budget.worker_count
    parameters.random_seed = budget.seed if seed is None else seed
    parameters.relative_gap_limit = budget.gap_limit if gap_limit is None else gap_limit
    parameters.log_search_progress = True
    parameters.log_to_stdout = False
    parameters.fix_variables_to_their_hinted_value = fix_to_hint
    if for_proof and parameters.num_workers > 1:
        parameters.subsolvers.extend(PROVERS)
        parameters.num_full_subsolvers = min(len(PROVERS), parameters.num_workers)
    if light:
        parameters.linearization_level = parameters.cp_model_probing_level = parameters.symmetry_level = 0
    if budget.deterministic:
        parameters.max_deterministic_time = remaining
        parameters.interleave_search = parameters.num_workers > 1
    else:
        parameters.max_time_in_seconds = remaining
    parameters.catch_sigint_signal = False
    lines: list[str] = []
    solver.log_callback = lines.append
    bounds: list[float] = []
    # interleaved workers end the same way every time, but tell of more or fewer solutions on the way
    tell_at_end = budget.deterministic and parameters.num_workers > 1

    def note_bound(bound: float) -> None:
        bounds.append(bound)
        if on_bound is not None and not tell_at_end:
            on_bound(bound)

    solver.best_bound_callback = note_bound
    watch = _Watcher(None if tell_at_end else on_solution)
    raw = run_interruptibly(lambda: solver.solve(model, watch), solver.stop_search, clock)
    if tell_at_end and on_solution is not None and raw in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        on_solution(solver.value)
    if tell_at_end and on_bound is not None and bounds:
        on_bound(max(bounds))
    deterministic_s = float(solver.response_proto.deterministic_time)
    clock.spend(deterministic_s)
    if raw == cp_model.MODEL_INVALID:
        raise SolverError(f"CP-SAT refuses a parameter: {solver.solution_info()}")
    text = "\n".join(lines)
    log.debug("%s", text)
    return _outcome(solver, raw, bool(model.has_objective()), bounds, text, deterministic_s)


def _outcome(
    solver: cp_model.CpSolver,
    raw: cp_model.CpSolverStatus,
    has_objective: bool,
    bounds: list[float],
    text: str,
    deterministic_s: float,
) -> CpSatOutcome:
    found = raw in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    objective: int | None = None
    bound: int | None = None
    status: CpSatStatus
    if raw == cp_model.INFEASIBLE:
        status = "infeasible"
    elif not found:
        status = "unknown"
    else:
        status = "optimal" if raw == cp_model.OPTIMAL else "feasible"
    if has_objective and status != "infeasible":
        if found:
            objective = round(solver.objective_value)
        # without a solution the response may hold a 0 that stands for nothing: only bounds that were announced count
        raw_bound = solver.best_objective_bound if found else max(bounds, default=-math.inf)
        # before any bound is known CP-SAT reports one of the ends of int64
        if math.isfinite(raw_bound) and abs(raw_bound) < 2**62:
            bound = math.ceil(raw_bound - 1e-6)
        if status == "optimal" and (bound is None or objective is None or objective - bound >= 1):
            status = "feasible"  # stopped at the gap limit
    return CpSatOutcome(
        status=status,
        objective=objective,
        bound=bound,
        values=solver.value if found else None,
        hint_was_feasible=HINT_IS_FEASIBLE in text,
        deterministic_s=deterministic_s,
        wall_s=float(solver.wall_time),
        log=text,
    )
