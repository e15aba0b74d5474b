"""Recomputes the bound that a plan's certificate claims, where it comes from the program of `bounds.py`.

A bound from CP-SAT's search cannot be recomputed without searching again.
"""

from solver_plan.offload.bounds import BOUND_NAME, inequalities, placement_below, relaxed_period_ms
from solver_plan.offload.plan import OffloadPlan
from solver_plan.offload.problem import OffloadProblem
from solver_plan.solving.budget import Budget, Clock

MARGIN = 1e-6
"""Relative; above what the solver's tolerances and the rounding of sums can make of a true bound."""
SECONDS = 1.5
"""A program that takes longer leaves the claim undecided, and the plan valid."""


def refuted_bound(problem: OffloadProblem, plan: OffloadPlan) -> tuple[str, ...]:
    """Return a violation if the claimed bound is above the optimum of the program that it names.

    A placement whose value in the program is below the claim refutes it: first the plan's own is tried, then the
    solver looks for one. That it finds none, proven or for want of time, lets the claim stand.
    """
    certificate = plan.certificate
    if certificate is None or certificate.bound is None or certificate.bound_from != BOUND_NAME:
        return ()
    allowed_ms = certificate.bound * (1 - MARGIN)
    rows = inequalities(problem)
    placed = {item.layer: item.update_on for item in plan.placement}
    value_ms = relaxed_period_ms(rows, tuple(placed[layer.name] for layer in problem.layers))
    if value_ms >= allowed_ms:
        clock = Clock(Budget(time_limit_s=SECONDS, workers=1))
        found = placement_below(problem, rows, allowed_ms, clock)
        if found is None:
            return ()
        value_ms = relaxed_period_ms(rows, found)
    return (f"certificate.bound: found {certificate.bound:.9g}; {BOUND_NAME} gives at most {value_ms:.9g}",)
