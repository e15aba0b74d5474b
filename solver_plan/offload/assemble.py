"""From a placement and its timing to a plan document."""

from typing import NamedTuple

from solver_plan.documents import Certificate, digest_of
from solver_plan.offload.operations import Placement, iteration_of, resident_bytes
from solver_plan.offload.plan import LayerPlacement, OffloadPlan, Predicted, TimedOperation
from solver_plan.offload.problem import OffloadProblem
from solver_plan.offload.retiming import Timing, from_zero


class Candidate(NamedTuple):
    """A placement with its timing, before it is a document."""

    placement: Placement
    timing: Timing


def plan_document(problem: OffloadProblem, candidate: Candidate, certificate: Certificate | None = None) -> OffloadPlan:
    """Return the plan of a candidate; its timeline is sorted by resource and start."""
    placement, timing = candidate
    iteration = iteration_of(problem, placement)
    names = [layer.name for layer in problem.layers]
    rank = {"gpu": 0, "cpu": 1, "d2h": 2, "h2d": 3}
    starts_ms = from_zero(timing.starts_ms)
    in_order = sorted(
        range(len(starts_ms)), key=lambda index: (rank[iteration.operations[index].resource], starts_ms[index], index)
    )
    timeline = tuple(
        TimedOperation(
            resource=item.resource,
            operation=item.operation,
            layer=names[item.layer],
            chunk=item.chunk,
            start_ms=starts_ms[index],
            end_ms=starts_ms[index] + item.duration_ms,
        )
        for index in in_order
        for item in (iteration.operations[index],)
    )
    return OffloadPlan(
        problem_digest=digest_of(problem),
        certificate=certificate,
        placement=tuple(
            LayerPlacement(layer=name, update_on=place) for name, place in zip(names, placement, strict=True)
        ),
        timeline=timeline,
        predicted=Predicted(period_ms=timing.period_ms, gpu_state_bytes=resident_bytes(problem, placement)),
    )


def candidate_of(problem: OffloadProblem, plan: OffloadPlan) -> Candidate:
    """Return placement and timing of a valid plan document."""
    place_of = {item.layer: item.update_on for item in plan.placement}
    placement: Placement = tuple(place_of[layer.name] for layer in problem.layers)
    start_of = {(item.operation, item.layer, item.chunk): item.start_ms for item in plan.timeline}
    starts_ms = tuple(
        start_of[item.operation, problem.layers[item.layer].name, item.chunk]
        for item in iteration_of(problem, placement).operations
    )
    return Candidate(placement, Timing(starts_ms, plan.predicted.period_ms))
