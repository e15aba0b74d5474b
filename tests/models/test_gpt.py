"""GPT: shapes against the literature, times against Aceso's measured database where it is at hand."""

import csv
import os
from pathlib import Path

import pytest

from models.gpt import deep, gpt3_1_3b, gpt3_2_6b, gpt3_6_7b, gpt3_13b, gpt3_350m, tiny
from solver_plan.profiles.analytic import profile
from solver_plan.profiles.cluster import read_cluster
from solver_plan.profiles.description import ModelDescription

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("SOLVER_PLAN_DATA", ROOT.parent / "shared" / "data")) / "aceso" / "eurosys"
MEASURED = {"1_3B": gpt3_1_3b, "2_6B": gpt3_2_6b, "6_7B": gpt3_6_7b}


@pytest.mark.parametrize(
    ("model", "layers", "parameters"),
    [
        (gpt3_350m(), 24, 0.41e9),
        (gpt3_1_3b(), 24, 1.42e9),
        (gpt3_2_6b(), 32, 2.79e9),
        (gpt3_6_7b(), 32, 6.87e9),
        (gpt3_13b(), 40, 13.1e9),
        (deep(8), 8, 0.0787e9),
    ],
    ids=lambda value: value.name if isinstance(value, ModelDescription) else str(value),
)
def test_operators_and_parameters(model: ModelDescription, layers: int, parameters: float) -> None:
    assert len(model.operators) == 1 + 13 * layers + 2
    assert sum(operator.block_start for operator in model.operators) == layers
    assert model.weight_bytes / 2 == pytest.approx(parameters, rel=0.01)


def test_flops_of_a_layer() -> None:
    """24 s h^2 + 4 s^2 h for a layer, 2 s h V for the head (Narayanan et al., SC 2021, appendix)."""
    s, h, layers, vocabulary = 2048, 2048, 24, 51200
    assert gpt3_1_3b().forward_flops == layers * (24 * s * h * h + 4 * s * s * h) + 2 * s * h * vocabulary


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_activations_of_a_layer(degree: int) -> None:
    """s h (10 + 24 / t + 5 a s / (h t)); s h (34 + 5 a s / h) / t with sequence parallelism (Korthikanti et al.)."""
    s, h, a = 2048, 2048, 32
    layer = gpt3_1_3b().operators[1:14]
    kept = sum(operator.partitions[0].kept.per_device(degree) for operator in layer)
    shared = sum(operator.partitions[0].kept.per_device(degree, sequence_parallel=True) for operator in layer)
    assert kept == pytest.approx(s * h * (10 + 24 / degree + 5 * a * s / (h * degree)))
    assert shared == pytest.approx(s * h * (34 + 5 * a * s / h) / degree)


def test_all_blocks_share_their_profiles() -> None:
    problem = profile(deep(1024), read_cluster("v100_8x32gb"), 1024)
    assert len(problem.operators) == 1 + 13 * 1024 + 2
    assert len(problem.profiles) == 16


def test_tiny_is_small_enough_for_tests() -> None:
    assert tiny().weight_bytes < 2**20


@pytest.mark.skipif(not DATA.is_dir(), reason=f"Aceso's measured database is not at {DATA}; set SOLVER_PLAN_DATA")
@pytest.mark.parametrize("size", MEASURED)
@pytest.mark.parametrize("degree", [1, 2, 4, 8])
@pytest.mark.parametrize("batch", [1, 2, 4, 8])
def test_layer_time_is_within_15_per_cent_of_the_measured_one(size: str, degree: int, batch: int) -> None:
    with (DATA / f"gpt_{size}_mbs{batch}_tp{degree}_algo0.csv").open() as file:
        rows = list(csv.DictReader(file))[1:14]
    measured = sum(float(row["forward-compute"]) + float(row["backward-compute"]) for row in rows) / 1000
    model = MEASURED[size]()
    problem = profile(model, read_cluster("v100_8x32gb"), 8)
    predicted = 0.0
    for operator in model.operators[1:14]:
        entry = next(each for each in problem.profiles[operator.kind] if each.key == (batch, degree, 0))
        predicted += entry.forward_ms + entry.backward_ms
    assert predicted == pytest.approx(measured, rel=0.15)
