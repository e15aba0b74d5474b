"""Recomputes the bound that a plan's certificate claims, where it comes from a formula or a program.

A bound from CP-SAT's search cannot be recomputed without searching again.
"""

from solver_plan.solving import Budget, Clock
from solver_plan.wavefront.bounds import PROGRAM, allotment_bound, closed_form_bound
from solver_plan.wavefront.instance import instance_of
from solver_plan.wavefront.plan import WavefrontPlan
from solver_plan.wavefront.problem import WavefrontProblem

AGREEMENT = 1e-6
"""Relative margin for floating-point error."""
SECONDS = 60.0


def refuted_bound(problem: WavefrontProblem, plan: WavefrontPlan) -> tuple[str, ...]:
    """Return a violation if the claimed bound is above what its source gives; nothing if it cannot be recomputed."""
    certificate = plan.certificate
    if certificate is None or certificate.bound is None or certificate.bound_from is None:
        return ()
    instance = instance_of(problem)
    method, _, name = certificate.bound_from.partition(":")
    if method == "closed-form":
        right: float | None = closed_form_bound(instance)
    elif method in ("lp", "milp") and name == PROGRAM:
        clock = Clock(Budget(time_limit_s=SECONDS))
        found = allotment_bound(instance, clock, whole=method == "milp")
        if method == "milp" and clock.expired:
            return ()
        right = found.value_ms
    else:
        return ()
    if right is None or certificate.bound > right * (1 + AGREEMENT):
        text = "nothing" if right is None else f"{right:.9g}"
        return (f"certificate.bound: found {certificate.bound:.9g}; {certificate.bound_from} gives {text}",)
    return ()
