"""The planner: every rule, then placement by MILP, timeline by simulation, and CP-SAT; each only if the gap is open.

1. Every rule of `heuristics.py` is a candidate, unless the gap is closed before: no plan is worse than a rule's.
2. The program of `bounds.py` gives the bound and a placement; its timeline is simulated in earliest-deadline order.
3. Without streaming CP-SAT orders the queues for that placement, then chooses placement and orders together
   (`model.py`).
4. With streaming a local search moves placement and orders (`streaming.py`), and on small problems CP-SAT solves the
   cyclic program (`cyclic_model.py`).

Every candidate is turned into a document and goes through `check` before it counts.
"""

import logging
from collections.abc import Callable

from ortools.sat.python import cp_model
from pydantic import ValidationError

from solver_plan.documents.fields import LARGEST_NUMBER
from solver_plan.errors import InputError, InvalidPlanError
from solver_plan.offload.assemble import Candidate, plan_document
from solver_plan.offload.bounds import BOUND_NAME, inequalities, placement_bound
from solver_plan.offload.check import period_of
from solver_plan.offload.cyclic_model import cyclic_model
from solver_plan.offload.flow import Rule, orders_of, run_orders, run_rule
from solver_plan.offload.heuristics import RULES, run_heuristic
from solver_plan.offload.local_search import alternating, improve
from solver_plan.offload.model import flow_model
from solver_plan.offload.operations import Placement, iteration_of, precedences_of
from solver_plan.offload.plan import OffloadPlan
from solver_plan.offload.problem import OffloadProblem
from solver_plan.offload.retiming import retime
from solver_plan.offload.streaming import Streamed
from solver_plan.solving.budget import Budget, Clock
from solver_plan.solving.cp_sat import cp_sat_version, solve_cp_sat
from solver_plan.solving.incumbent import Incumbent
from solver_plan.solving.milp import highs_version
from solver_plan.solving.outcome import Effort, Planned
from solver_plan.solving.progress import Progress, silent

log = logging.getLogger(__name__)

QUICK_RULES = ("zero_offload", "twin_flow", "coarse", "cpu_edf")
"""Rules without a choice, run before the bound; the others only if the gap is still open."""
MILP_SHARE = 0.5
"""Of the time that is left, at most this for the placement program."""
MILP_SHARE_OF_LARGE = 0.85
"""The same for problems of more chunks than CP-SAT can order."""
MILP_SHARE_WITH_STREAMING = 0.25
"""The same where a local search follows, whose plans are better the longer it runs."""
LARGE = 500
"""Layers times chunks."""
FIXED_SHARE = 0.2
"""Then at most this for the orders of its placement."""
WINDOW_MARGINS = (0.25, 0.5, 1.0, 2.0)
"""With streaming, placements are also sought whose windows bear this many copies of the largest state in and out."""
SEED_SHARE = 0.05
"""At most this share of what is left for each of them."""
SEED_GAP = 0.01
"""Relative; the margins are guesses, the best placement for them is worth no more time."""
CYCLIC_SHARE = 0.3
"""With streaming, this much of the time is left to CP-SAT after the local search, on small problems."""
LARGEST_CYCLIC = 16
"""Layers times chunks beyond which the cyclic program is not tried."""
SECONDS_PER_OPERATION = 2e-6
"""Deterministic cost of simulating one operation."""


def plan_offload(
    problem: OffloadProblem,
    budget: Budget,
    heuristic: str | None = None,
    on_progress: Progress = silent,
) -> Planned[OffloadPlan]:
    """Find a plan of least period and prove how good it is.

    Parameters
    ----------
    problem
        The problem. A plan always exists: everything on the CPU; if it takes so long that rounding hides whether it is
        valid, `InputError` says so.
    budget
        Limits of the search.
    heuristic
        One of `RULES`: only this rule, no solver, no bound.
    on_progress
        Told each better plan or bound.
    """
    clock = Clock(budget)
    incumbent: Incumbent[Candidate] = Incumbent(lambda candidate: _evaluate(problem, candidate), clock, on_progress)
    if heuristic is not None:
        found = run_heuristic(problem, heuristic)
        incumbent.offer(Candidate(found.placement, found.timing), f"heuristic:{heuristic}")
        _require_any(problem, incumbent)
        return _planned(problem, clock, incumbent, f"heuristic {heuristic}", True)
    with clock.interruptible():
        _search(problem, clock, incumbent)
    solver = f"{cp_sat_version()}, {highs_version()}, workers {budget.worker_count}, seed {budget.seed}"
    return _planned(problem, clock, incumbent, solver, False)


def _evaluate(problem: OffloadProblem, candidate: Candidate) -> float:
    try:
        plan = plan_document(problem, candidate)
    except ValidationError:
        raise InvalidPlanError((f"timeline: times go up to {LARGEST_NUMBER:g} ms",)) from None
    return period_of(problem, plan)


def _planned(
    problem: OffloadProblem, clock: Clock, incumbent: Incumbent[Candidate], solver: str, completed: bool
) -> Planned[OffloadPlan]:
    certificate = incumbent.certificate(solver, completed=completed)
    assert incumbent.plan is not None
    first = next((step.seconds for step in incumbent.trace if step.objective is not None), None)
    return Planned(
        plan=plan_document(problem, incumbent.plan, certificate),
        effort=Effort(wall_s=clock.seconds, deterministic_s=clock.deterministic_seconds, first_plan_s=first),
    )


def _search(problem: OffloadProblem, clock: Clock, incumbent: Incumbent[Candidate]) -> None:
    operations = len(problem.layers) * (2 + 3 * problem.chunks_per_layer)
    _run_rules(problem, clock, incumbent, QUICK_RULES)
    if clock.interrupted:
        return
    _require_any(problem, incumbent)
    large = len(problem.layers) * problem.chunks_per_layer > LARGE
    streaming = any(problem.may_stream(layer) for layer in range(len(problem.layers)))
    share = MILP_SHARE_WITH_STREAMING if streaming else MILP_SHARE_OF_LARGE if large else MILP_SHARE
    bound = placement_bound(problem, clock, limit=share * clock.remaining)
    if bound.bound_ms is not None:
        incumbent.raise_bound(bound.bound_ms, BOUND_NAME)
    if bound.placement is not None and "gpu_streamed" not in bound.placement:
        timing = run_rule(problem, bound.placement, Rule())[1]
        clock.spend(operations * SECONDS_PER_OPERATION)
        offer(incumbent, Candidate(bound.placement, timing), "milp")
    if incumbent.closed:
        return  # no rule can be better
    _run_rules(problem, clock, incumbent, tuple(name for name in RULES if name not in QUICK_RULES))
    if incumbent.closed or clock.expired:
        return
    if streaming:
        _search_streaming(problem, clock, incumbent, bound.placement)
        return
    if bound.placement is not None:
        _solve_flow(problem, clock, incumbent, bound.placement)
    _solve_flow(problem, clock, incumbent, None)


def _require_any(problem: OffloadProblem, incumbent: Incumbent[Candidate]) -> None:
    """Raise `InputError` if the plans of rules, which always exist, were not valid: times too long to be checked."""
    if incumbent.plan is not None:
        return
    operations = (problem.cpu_update_ms, problem.gpu_update_ms, problem.gradient_copy_ms, problem.weight_copy_ms)
    layers = range(len(problem.layers))
    longest_ms = max(problem.compute_ms, *(length_ms(layer) for length_ms in operations for layer in layers))
    raise InputError(
        f"layers and rates: found times of up to {longest_ms:.3g} ms, beside which the 1e-6 ms to which plans hold are "
        "lost to rounding; correct forward_ms, backward_ms, parameters, bytes_per_parameter or rates"
    )


def _run_rules(problem: OffloadProblem, clock: Clock, incumbent: Incumbent[Candidate], names: tuple[str, ...]) -> None:
    """Offer the plans of rules; also after the limit, so that no plan is worse than a rule's."""
    operations = len(problem.layers) * (2 + 3 * problem.chunks_per_layer)
    for name in names:
        if clock.interrupted:
            return
        found = run_heuristic(problem, name)
        offer(incumbent, Candidate(found.placement, found.timing), f"heuristic:{name}")
        clock.spend(10 * operations * SECONDS_PER_OPERATION)


def _search_streaming(
    problem: OffloadProblem, clock: Clock, incumbent: Incumbent[Candidate], from_bound: Placement | None
) -> None:
    """Local search from the placement of the bound and evenly alternating ones; CP-SAT where the model is small."""
    assert incumbent.plan is not None
    first = from_bound if from_bound is not None else incumbent.plan.placement
    streamed = first.count("gpu_streamed")
    copies_ms = [
        problem.state_copy_in_ms(layer) + problem.state_copy_out_ms(layer)
        for layer in range(len(problem.layers))
        if problem.may_stream(layer)
    ]
    seeds = [first, incumbent.plan.placement]
    for share in WINDOW_MARGINS:
        wider = placement_bound(
            problem,
            clock,
            limit=SEED_SHARE * clock.remaining,
            gap_limit=SEED_GAP,
            window_margin_ms=share * max(copies_ms),
        )
        if wider.placement is not None:
            seeds.append(wider.placement)
    for more in (0, -1, 1):
        seeds += alternating(problem, max(0, streamed + more))
    rows = inequalities(problem)
    small = len(problem.layers) * problem.chunks_per_layer <= LARGEST_CYCLIC
    improve(
        problem,
        rows,
        list(dict.fromkeys(seeds)),
        clock,
        limit=clock.remaining * (1 - CYCLIC_SHARE if small else 1.0),
        enough=lambda: incumbent.closed,
        on_better=lambda found: _offer_streamed(incumbent, found),
    )
    if small:
        _solve_cyclic(problem, clock, incumbent)


def _offer_streamed(incumbent: Incumbent[Candidate], found: Streamed) -> None:
    offer(incumbent, Candidate(found.placement, found.timing), "heuristic:local_search")


def _solve_cyclic(problem: OffloadProblem, clock: Clock, incumbent: Incumbent[Candidate]) -> None:
    """Let CP-SAT choose placement and cyclic timeline."""
    assert incumbent.plan is not None
    longest_ms = incumbent.plan.timing.period_ms
    if incumbent.closed or clock.expired or longest_ms <= 0:
        return
    model = cyclic_model(problem, inequalities(problem), longest_ms=longest_ms, bound_ms=incumbent.bound)
    hint = model.hint(*incumbent.plan)

    def on_solution(value: Callable[[cp_model.IntVar], int]) -> None:
        placement, iteration, rounded = model.timing_of(value)
        retimed = retime(problem, iteration, precedences_of(problem, iteration), rounded)
        if retimed is not None:
            offer(incumbent, Candidate(placement, retimed[0]), "cp-sat")

    outcome = solve_cp_sat(model.model, clock, hint=hint, on_solution=on_solution)
    if outcome.bound is not None:
        incumbent.raise_bound((outcome.bound - 1) * model.tick_ms, "cp-sat")


def offer(incumbent: Incumbent[Candidate], candidate: Candidate, source: str) -> bool:
    """Offer a candidate unless it is plainly no better: evaluating it means building and checking a document."""
    if incumbent.objective is not None and candidate.timing.period_ms >= incumbent.objective:
        return False
    return incumbent.offer(candidate, source)


def _solve_flow(
    problem: OffloadProblem, clock: Clock, incumbent: Incumbent[Candidate], fixed: Placement | None
) -> None:
    """Let CP-SAT order the queues of a placement, or choose placement and orders."""
    if incumbent.closed or clock.expired:
        return
    start = _flow_start(problem, incumbent, fixed)
    if start.timing.period_ms <= 0:
        return
    model = flow_model(
        problem,
        inequalities(problem),
        longest_ms=start.timing.period_ms,
        bound_ms=incumbent.bound if fixed is None else None,
        fixed=fixed,
    )

    def on_solution(value: Callable[[cp_model.IntVar], int]) -> None:
        placement, orders = model.solution(value)
        offer(incumbent, Candidate(placement, run_orders(problem, placement, orders)), "cp-sat")

    def on_bound(ticks: float) -> None:
        if fixed is None:
            incumbent.raise_bound(ticks * model.tick_ms, "cp-sat")

    outcome = solve_cp_sat(
        model.model,
        clock,
        hint=model.hint(start.placement, iteration_of(problem, start.placement), start.timing),
        limit=FIXED_SHARE * clock.remaining if fixed is not None else None,
        on_solution=on_solution,
        on_bound=on_bound,
    )
    if outcome.values is not None:
        placement, orders = model.solution(outcome.values)
        offer(incumbent, Candidate(placement, run_orders(problem, placement, orders)), "cp-sat")
    if fixed is None and outcome.bound is not None:
        incumbent.raise_bound(outcome.bound * model.tick_ms, "cp-sat")


def _flow_start(problem: OffloadProblem, incumbent: Incumbent[Candidate], fixed: Placement | None) -> Candidate:
    """Return the plan to start from, its device working without a break as the model assumes."""
    if fixed is not None:
        return Candidate(fixed, run_rule(problem, fixed, Rule())[1])
    assert incumbent.plan is not None
    placement, timing = incumbent.plan
    orders = orders_of(iteration_of(problem, placement), timing.starts_ms)
    return Candidate(placement, run_orders(problem, placement, orders))
