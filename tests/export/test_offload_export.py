"""Offload plans: the fraction that is updated on the CPU, and what that costs."""

import json

import pytest

from solver_plan import check, export_plan
from solver_plan.errors import NotExportableError
from solver_plan.offload.assemble import Candidate, plan_document
from solver_plan.offload.flow import run_rule
from solver_plan.offload.heuristics import SERIAL
from solver_plan.offload.plan import OffloadPlan, Place
from solver_plan.offload.streaming import streamed_timing
from tests.offload.offload_cases import make_plan, make_problem

LAYERS = [(10, 10.0, 20.0), (20, 15.0, 30.0), (30, 20.0, 40.0), (40, 20.0, 40.0)]
"""100 parameters."""
PROBLEM = make_problem(LAYERS, room=12 * 100)


def fraction_of(text: str) -> float:
    words = dict(line.split(" ") for line in text.splitlines() if line.startswith("--") and " " in line)
    return float(words["--optimizer-offload-fraction"])


def on_cpu(plan: object) -> list[str]:
    assert isinstance(plan, OffloadPlan)
    return [item.layer for item in plan.placement if item.update_on == "cpu"]


def test_all_on_the_device_loses_nothing() -> None:
    plan = make_plan(PROBLEM, ("gpu",) * 4)
    for to in ("megatron", "torchtitan", "deepspeed"):
        export = export_plan(PROBLEM, plan, to)
        assert export.losses == ()
        assert "offload_optimizer" not in export.text
        assert "--optimizer-cpu-offload" not in export.text


def test_megatron_updates_the_first_on_the_cpu_deepspeed_the_last() -> None:
    plan = make_plan(PROBLEM, ("gpu", "cpu", "cpu", "gpu"))
    first = export_plan(PROBLEM, plan, "megatron", allow_losses=True)
    assert on_cpu(first.exported) == ["l0", "l1", "l2"]
    assert fraction_of(first.text) == 0.6
    last = export_plan(PROBLEM, plan, "deepspeed", allow_losses=True)
    assert on_cpu(last.exported) == ["l2", "l3"]
    zero = json.loads(last.text)["zero_optimization"]
    assert zero["stage"] == 3
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True, "ratio": 0.7}
    for export in (first, last):
        assert {loss.about for loss in export.losses} == {"updates", "timeline"}
        assert check(PROBLEM, export.exported) == ()
        assert export.exported_ms > export.plan_ms
        assert f"{export.exported_ms:.3f} ms" in export.text


def test_the_same_layers_lose_the_timeline_only() -> None:
    plan = make_plan(PROBLEM, ("cpu", "cpu", "gpu", "gpu"))
    with pytest.raises(NotExportableError, match=r"\(1\) timeline"):
        export_plan(PROBLEM, plan, "megatron")
    export = export_plan(PROBLEM, plan, "megatron", allow_losses=True)
    assert [loss.about for loss in export.losses] == ["timeline"]
    assert fraction_of(export.text) == 0.3


def test_a_plan_that_waits_as_they_do_loses_nothing() -> None:
    placement: tuple[Place, ...] = ("cpu", "cpu", "gpu", "gpu")
    plan = plan_document(PROBLEM, Candidate(placement, run_rule(PROBLEM, placement, SERIAL)[1]))
    export = export_plan(PROBLEM, plan, "megatron")
    assert (export.losses, export.exported_ms) == ((), export.plan_ms)


def test_streamed_state_goes_to_the_cpu() -> None:
    placement: tuple[Place, ...] = ("gpu_streamed", "gpu", "gpu", "gpu")
    problem = make_problem(LAYERS, room=12 * 90, staging=12 * 40)
    timing = streamed_timing(problem, placement)
    assert timing is not None
    plan = plan_document(problem, Candidate(placement, timing))
    export = export_plan(problem, plan, "megatron", allow_losses=True)
    assert "streaming" in {loss.about for loss in export.losses}
    assert "updates" not in {loss.about for loss in export.losses}
    assert on_cpu(export.exported) == ["l0"]


def test_torchtitan_moves_all_or_nothing() -> None:
    plan = make_plan(PROBLEM, ("gpu", "cpu", "cpu", "gpu"))
    with pytest.raises(NotExportableError, match="export to megatron or deepspeed"):
        export_plan(PROBLEM, plan, "torchtitan", allow_losses=True)


def test_a_fraction_never_takes_a_parameter_more() -> None:
    problem = make_problem([(1, 1.0, 1.0), (2, 1.0, 1.0)], room=100)
    export = export_plan(problem, make_plan(problem, ("cpu", "gpu")), "megatron", allow_losses=True)
    assert 0 < fraction_of(export.text) * 3 <= 1
