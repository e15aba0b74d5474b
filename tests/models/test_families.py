"""Llama, T5 and Wide-ResNet: shapes against the literature, times and weights against Aceso's measured database."""

import csv
import os
from pathlib import Path

import pytest

from models import gpt, llama, t5, wide_resnet
from solver_plan.profiles.analytic import profile
from solver_plan.profiles.cluster import read_cluster
from solver_plan.profiles.description import ModelDescription

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("SOLVER_PLAN_DATA", ROOT.parent / "shared" / "data")) / "aceso" / "eurosys"
needs_database = pytest.mark.skipif(
    not DATA.is_dir(), reason=f"Aceso's measured database is not at {DATA}; set SOLVER_PLAN_DATA"
)
T5 = {"770M": t5.t5_770m, "3B": t5.t5_3b, "6B": t5.t5_6b, "11B": t5.t5_11b}
RESNET = {
    "500M": wide_resnet.wide_resnet_500m,
    "2B": wide_resnet.wide_resnet_2b,
    "4B": wide_resnet.wide_resnet_4b,
    "6_8B": wide_resnet.wide_resnet_6_8b,
    "13B": wide_resnet.wide_resnet_13b,
}


def rows(name: str, batch: int, degree: int) -> list[dict[str, str]]:
    """Operators of the whole chain, as the database's own README orders them."""
    with (DATA / f"{name}_mbs{batch}_tp{degree}_algo0.csv").open() as file:
        found = list(csv.DictReader(file))
    if name.startswith("t5"):
        return [found[0], *(found[1:14] * 24), *found[14:16], *(found[16:37] * 24), *found[37:]]
    return found


def predicted_and_measured(model: ModelDescription, name: str, batch: int, degree: int) -> tuple[float, float]:
    problem = profile(model, read_cluster("v100_8x32gb"), batch, batches=[batch])
    table = {
        (kind, entry.tensor_parallel): entry.forward_ms + entry.backward_ms
        for kind, entries in problem.profiles.items()
        for entry in entries
    }
    predicted = measured = 0.0
    for operator, row in zip(model.operators, rows(name, batch, degree), strict=True):
        if (operator.kind, degree) in table:
            predicted += table[operator.kind, degree]
            measured += (float(row["forward-compute"]) + float(row["backward-compute"])) / 1000
    return predicted, measured


@pytest.mark.parametrize(
    ("model", "layers", "parameters"),
    [
        (llama.llama3_8b(), 32, 8.03e9),
        (llama.llama3_70b(), 80, 70.6e9),
        (llama.llama3_405b(), 126, 405.9e9),
    ],
    ids=lambda value: value.name if isinstance(value, ModelDescription) else "",
)
def test_llama_has_its_published_parameters(model: ModelDescription, layers: int, parameters: float) -> None:
    assert model.weight_bytes / 2 == pytest.approx(parameters, rel=0.002)
    assert sum(operator.block_start for operator in model.operators) == layers
    assert model.tensor_parallel_divides == 8


def test_llama_computes_six_flops_for_each_weight_and_token_beside_attention() -> None:
    model = llama.llama3_8b()
    embedding = 128256 * 4096
    attention = 32 * 4 * 8192 * 8192 * 4096 // 2
    weights = model.weight_bytes / 2 - embedding
    assert model.forward_flops == pytest.approx(2 * 8192 * weights + attention, rel=0.001)


@pytest.mark.parametrize("describe", [gpt.tiny, llama.tiny, t5.tiny, wide_resnet.tiny])
def test_tiny_models_become_problems(describe: object) -> None:
    assert callable(describe)
    model = describe()
    cluster = read_cluster("a100_8x80gb" if model.name == "llama-tiny" else "v100_4x32gb")
    problem = profile(model, cluster, 4)
    assert [operator.name for operator in problem.operators] == [operator.name for operator in model.operators]
    assert all(entry.forward_ms > 0 for entries in problem.profiles.values() for entry in entries)


def test_what_enters_an_operator_left_the_one_before() -> None:
    problem = profile(t5.tiny(), read_cluster("v100_4x32gb"), 4)
    for before, after in zip(problem.operators, problem.operators[1:], strict=False):
        left = problem.profile_table[before.profile][2, 2, 0].output_bytes
        assert problem.profile_table[after.profile][2, 2, 0].input_bytes == left, after.name


def test_the_decoder_carries_the_encoders_output() -> None:
    model = t5.tiny()
    memory = 32 * 64 * 2
    carried = [operator for operator in model.operators if operator.kind.startswith("decoder_")][:-1]
    assert len(carried) == 1 + 21 * 2
    assert all(operator.partitions[0].output.sequence >= memory for operator in carried)


@needs_database
@pytest.mark.parametrize("size", T5)
def test_t5_weights_are_those_of_the_database(size: str) -> None:
    model = T5[size]()
    assert len(model.operators) == 821
    measured = sum(float(row["weights"]) for row in rows(f"t5_{size}", 1, 1)) * 2**20
    assert model.weight_bytes == pytest.approx(measured, rel=0.005)


@needs_database
@pytest.mark.parametrize("size", RESNET)
def test_wide_resnet_weights_are_those_of_the_database(size: str) -> None:
    model = RESNET[size]()
    measured = sum(float(row["weights"]) for row in rows(f"resnet_{size}", 16, 1)) * 2**20
    assert model.weight_bytes == pytest.approx(measured, rel=0.001)


@needs_database
@pytest.mark.parametrize(("size", "batch"), [("770M", 4), ("3B", 4), ("6B", 8), ("11B", 4)])
@pytest.mark.parametrize("degree", [1, 2, 8])
def test_t5_times_are_within_25_per_cent_of_the_measured_ones(size: str, batch: int, degree: int) -> None:
    predicted, measured = predicted_and_measured(T5[size](), f"t5_{size}", batch, degree)
    assert predicted == pytest.approx(measured, rel=0.25)


@needs_database
@pytest.mark.parametrize("size", RESNET)
@pytest.mark.parametrize("degree", [1, 4, 8])
def test_wide_resnet_times_are_within_20_per_cent_of_the_measured_ones(size: str, degree: int) -> None:
    predicted, measured = predicted_and_measured(RESNET[size](), f"resnet_{size}", 32, degree)
    assert predicted == pytest.approx(measured, rel=0.20)
