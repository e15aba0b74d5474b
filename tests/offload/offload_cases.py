"""Small offload problems and plans for the tests, and the reference data where it is present."""

import dataclasses

import pytest

from solver_plan.documents import read_document
from solver_plan.offload.assemble import Candidate, plan_document
from solver_plan.offload.flow import Rule, run_rule
from solver_plan.offload.operations import Placement
from solver_plan.offload.plan import OffloadPlan, OperationName
from solver_plan.offload.problem import BytesPerParameter, Layer, OffloadProblem, Rates
from tests.conftest import data_folder

DATA = data_folder() / "offload"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"the reference data is not at {DATA}: set SOLVER_PLAN_DATA")

THREE_LAYERS = [(10, 10.0, 20.0), (20, 15.0, 30.0), (30, 20.0, 40.0)]
"""(parameters, forward ms, backward ms)"""


def make_problem(
    layers: list[tuple[int, float, float]] | None = None,
    *,
    room: int = 0,
    staging: int = 0,
    chunks: int = 1,
    clip: bool = False,
    accumulation: int = 1,
    rates: tuple[float, float, float, float] = (1e3, 1e5, 2e4, 2e4),
) -> OffloadProblem:
    """Make a problem; rates are those of CPU and GPU updates (parameters), d2h and h2d (bytes)."""
    return OffloadProblem(
        layers=tuple(
            Layer(name=f"l{index}", parameters=parameters, forward_ms=forward, backward_ms=backward)
            for index, (parameters, forward, backward) in enumerate(layers or THREE_LAYERS)
        ),
        rates=Rates(
            cpu_update_parameters_per_s=rates[0],
            gpu_update_parameters_per_s=rates[1],
            d2h_bytes_per_s=rates[2],
            h2d_bytes_per_s=rates[3],
        ),
        bytes_per_parameter=BytesPerParameter(gradient=2, weight=2, optimizer_state=12),
        gpu_state_bytes=room,
        staging_bytes=staging,
        chunks_per_layer=chunks,
        accumulation_steps=accumulation,
        clip_gradients=clip,
    )


def make_plan(problem: OffloadProblem, placement: Placement) -> OffloadPlan:
    """Plan a placement without streaming by earliest deadline."""
    return plan_document(problem, Candidate(placement, run_rule(problem, placement, Rule())[1]))


def moved(
    plan: OffloadPlan, operation: OperationName, layer: str, by_ms: float, *, chunk: int = 0, longer_ms: float = 0.0
) -> OffloadPlan:
    """Return the plan with one operation moved, and lengthened at its end."""
    timeline = tuple(
        dataclasses.replace(item, start_ms=item.start_ms + by_ms, end_ms=item.end_ms + by_ms + longer_ms)
        if (item.operation, item.layer, item.chunk) == (operation, layer, chunk)
        else item
        for item in plan.timeline
    )
    assert timeline != plan.timeline
    return dataclasses.replace(plan, timeline=timeline)


def with_period(plan: OffloadPlan, period_ms: float) -> OffloadPlan:
    """Return the plan with another period."""
    return dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, period_ms=period_ms))


def reference_problem(name: str) -> OffloadProblem:
    """Read an instance of the reference data."""
    return read_document(DATA / f"{name}.json", {"offload": OffloadProblem}, "solver-plan/problem")
