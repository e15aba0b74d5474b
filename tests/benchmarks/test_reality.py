"""The cost model against published runs, where the data are at hand, and the parts of the comparison that need none."""

import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.reality import PublishedRun, calibrate, compare, data_folder, outside, read_runs, report
from benchmarks.uniform import Configuration, uniform_pipeline
from models.gpt import tiny
from solver_plan.errors import InputError
from solver_plan.profiles.cluster import read_cluster

FILE = data_folder() / "published_runs" / "runs.json"
needs_runs = pytest.mark.skipif(not FILE.is_file(), reason=f"published runs are not at {FILE}; set SOLVER_PLAN_DATA")

PLAIN = Configuration(
    tensor_parallel=1,
    pipeline=1,
    virtual_stages=1,
    data_parallel=1,
    micro_batch=1,
    micro_batches=4,
    sequence_parallel=False,
    tensor_parallel_overlap=False,
    transfer_overlap=False,
    reduction_overlap=True,
    sharding=0,
    recompute="none",
    recomputed_share=0.0,
)
V100 = read_cluster("v100_4x32gb")


def test_a_folder_without_runs_is_answered_with_the_variable_to_set(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="set SOLVER_PLAN_DATA"):
        read_runs(tmp_path / "runs.json")


def test_recomputing_everything_costs_a_forward_of_the_blocks_and_holds_less() -> None:
    kept = uniform_pipeline(tiny(), V100, PLAIN)
    dropped = uniform_pipeline(tiny(), V100, replace(PLAIN, recompute="blocks", recomputed_share=1.0))
    half = uniform_pipeline(tiny(), V100, replace(PLAIN, recompute="blocks", recomputed_share=0.5))
    assert dropped.stages[0].forward_ms == kept.stages[0].forward_ms
    assert kept.stages[0].backward_ms < half.stages[0].backward_ms < dropped.stages[0].backward_ms
    assert dropped.memory_bytes < kept.memory_bytes


def test_twice_the_speed_halves_the_computation() -> None:
    pipeline = uniform_pipeline(tiny(), V100, PLAIN)
    stage = pipeline.stages[0]
    saved = pipeline.predict().step_ms - pipeline.predict(2.0).step_ms
    assert saved == pytest.approx(4 * (stage.forward_ms + stage.backward_ms) / 2)


def test_blocks_are_spread_over_the_stages_and_all_weights_are_somewhere() -> None:
    pipeline = uniform_pipeline(tiny(), V100, replace(PLAIN, pipeline=2))
    assert [stage.pieces for stage in pipeline.stages] == [1, 1]
    assert sum(stage.weight_bytes for stage in pipeline.stages) == tiny().weight_bytes


@needs_runs
def test_median_errors_are_within_15_per_cent_and_within_8_after_calibration() -> None:
    compared = [compare(run) for run in read_runs(FILE) if outside(run) is None]
    timed = [each for each in compared if each.run.step_time_s is not None]
    assert len(timed) >= 40
    assert statistics.median(abs(each.error()) for each in timed) <= 0.15
    factors = calibrate(timed)
    calibrated = [abs(each.error(factors[each.cluster.device.name])) for each in timed]
    assert statistics.median(calibrated) <= 0.08
    unfit = [each.run.id for each in compared if each.run.kind == "run" and not each.fits]
    assert unfit == []


@needs_runs
def test_memory_is_within_20_per_cent_of_the_formula_of_korthikanti() -> None:
    """Mostly within 8; the formula leaves out what the first stage's embedding keeps."""
    rows = [run for run in read_runs(FILE) if run.kind == "memory_model"]
    assert len(rows) == 10
    for run in rows:
        assert run.mem_states_gib is not None
        assert run.mem_act_gib is not None
        (pipeline,) = compare(run).candidates
        assert pipeline.held_bytes / 2**30 == pytest.approx(run.mem_states_gib + run.mem_act_gib, rel=0.2), run.id


@needs_runs
def test_the_report_counts_every_run_once() -> None:
    runs: list[PublishedRun] = read_runs(FILE)
    lines = list(report(runs))
    listed = {line.split()[0] for line in lines if line and line.split()[0] in {run.id for run in runs}}
    assert listed == {run.id for run in runs if outside(run) is None}
    counted = lines[lines.index("outside:") + 1 :]
    assert sum(int(line.split()[0]) for line in counted) + len(listed) == len(runs)
