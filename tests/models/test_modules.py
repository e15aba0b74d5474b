"""The torch modules of the models train as planned: any cut, split between tensor ranks, recomputed, by their names."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("torch")

from models import gpt, llama, t5, wide_resnet
from models.t5_modules import encoder_decoder
from models.transformer import chain, decoder_layer
from models.transformer_modules import decoder
from models.wide_resnet_modules import wide_resnet as build_wide_resnet
from solver_plan import plan as find_plan
from solver_plan.documents import write_document
from solver_plan.execution.compile import compile_plan
from solver_plan.execution.launch import run_local
from solver_plan.execution.model import Model
from solver_plan.execution.program import Program
from solver_plan.execution.run import Training, load_model, run
from solver_plan.parallelism.plan import Stage
from solver_plan.profiles.analytic import profile
from solver_plan.profiles.cluster import read_cluster
from solver_plan.profiles.loading import load_description
from tests.execution.cases import plan, problem, stage
from tests.execution.equality import Trained, alone, difference, together

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-12
SAMPLES, MICRO_BATCH = 8, 4
SMALL = {"layers": 2, "hidden": 32, "heads": 4, "sequence": 12, "vocabulary": 32}


def small_gpt() -> Model:
    shape = gpt.gpt("gpt", **SMALL)  # type: ignore[arg-type]
    return decoder(shape, chain(shape, decoder_layer(shape)), dropout=0.0)


def small_llama(tied: bool) -> Model:
    shape = llama.llama("llama", **SMALL, key_value_heads=2, feed_forward=48)  # type: ignore[arg-type]
    shape = dataclasses.replace(shape, tied_head=tied)
    return decoder(shape, chain(shape, decoder_layer(shape)))


def small_t5() -> Model:
    """39 operators: 16 of the encoder, 21 of the decoder's layer, and 2."""
    shapes = t5.t5("t5", layers=1, heads=4, head_dim=8, feed_forward=48, hidden=32, source=10, target=6, vocabulary=32)
    return encoder_decoder(*shapes, t5.describe(*shapes).operators, dropout=0.0)


def small_wide_resnet() -> Model:
    """22 operators."""
    return build_wide_resnet(wide_resnet.WideResNet(name="w", base=8, blocks=(1, 1), image=32, classes=16))


ZERO_BUBBLE = ("0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1W0 1I1 1W1")


@dataclass(frozen=True)
class Case:
    model: Model
    stages: Sequence[Stage]
    orders: Sequence[str] | None = None
    shared: dict[int, str] | None = None

    def program(self) -> Program:
        made_for = problem([layer.name for layer in self.model.layers], 4, global_batch=SAMPLES, shared=self.shared)
        compiled = compile_plan(made_for, plan(made_for, self.stages, MICRO_BATCH, self.orders))
        return dataclasses.replace(compiled, world_size=4)


CASES = {
    "gpt, four stages": Case(
        small_gpt(),
        [stage((0, 4), [0]), stage((4, 5), [1]), stage((5, 20), [2], recompute=[(6, 14)]), stage((20, 29), [3])],
    ),
    "gpt, tp2 cut between scores and softmax": Case(
        small_gpt(), [stage((0, 4), [0, 1], 2), stage((4, 29), [2, 3], 2, recompute=[(14, 27)])]
    ),
    "llama, tied head, tp2 to dp2": Case(
        small_llama(tied=True),
        [stage((0, 9), [0, 1], 2), stage((9, 23), [2, 3], sharding=2)],
        shared={22: "embedding"},
    ),
    "llama, dp4 with ZeRO 3": Case(small_llama(tied=False), [stage((0, 23), range(4), sharding=3)]),
    "t5, four stages": Case(
        small_t5(),
        [stage((0, 8), [0]), stage((8, 17), [1]), stage((17, 28), [2], recompute=[(18, 27)]), stage((28, 39), [3])],
    ),
    "t5, cut behind the encoder, zero bubble": Case(
        small_t5(), [stage((0, 17), [0]), stage((17, 39), [1])], ZERO_BUBBLE
    ),
    "t5, tp2 to dp2": Case(small_t5(), [stage((0, 28), [0, 1], 2), stage((28, 39), [2, 3])]),
    "wide resnet, two stages": Case(
        small_wide_resnet(), [stage((0, 7), [0]), stage((7, 22), [1], recompute=[(8, 12)])]
    ),
    "wide resnet, tp2": Case(small_wide_resnet(), [stage((0, 7), [0, 1], 2), stage((7, 22), [2, 3], 2)]),
}


def _train(programs: dict[str, Program], rank: int) -> dict[str, Trained]:
    return {name: together(programs[name], case.model) for name, case in CASES.items()}


def _alone(rank: int) -> dict[str, Trained]:
    return {name: alone(case.model, SAMPLES, MICRO_BATCH) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def differences() -> dict[str, float]:
    programs = {name: case.program() for name, case in CASES.items()}
    ranks = run_local(lambda rank: _train(programs, rank), 4, timeout_s=200, group_timeout_s=60)
    (references,) = run_local(_alone, 1)
    return {name: difference(references[name], [rank[name] for rank in ranks]) for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_trains_as_in_one_process(name: str, differences: dict[str, float]) -> None:
    assert differences[name] <= TOLERANCE


SOURCES = tuple(f"models/{name}.py:tiny" for name in ("gpt", "llama", "t5", "wide_resnet"))


@pytest.mark.parametrize("source", SOURCES)
def test_modules_are_those_of_the_description(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    description = load_description(source)
    model = load_model(source)
    assert [layer.name for layer in model.layers] == [operator.name for operator in description.operators]
    element = {"float16": 2, "bfloat16": 2, "float32": 4}[description.data_type]
    for layer, operator in zip(model.layers, description.operators, strict=True):
        count = sum(parameter.numel() for parameter in layer.build().parameters())
        assert count * element == operator.partitions[0].weights.per_device(1), operator.name


@pytest.mark.parametrize("source", SOURCES)
def test_a_found_plan_runs_unchanged_on_four_processes(
    source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    made_for = profile(load_description(source), _cluster(source), 16, model=source)
    found = find_plan(made_for, deterministic=True, time_limit_s=5.0)
    report = run(made_for, found, Training(steps=2), local=4)
    assert len(report.losses) == 2
    assert all(row.predicted_ms is not None and row.measured_ms > 0 for row in report.comparison)
    write_document(report.program, tmp_path / "program.json")


def _cluster(source: str):  # type: ignore[no-untyped-def]
    cluster = read_cluster("a100_8x80gb" if "llama" in source else "v100_4x32gb")
    return dataclasses.replace(cluster, nodes=1, devices_per_node=4)
