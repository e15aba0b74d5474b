"""The torch modules of the models train as planned: any cut, split between tensor ranks, recomputed, by their names."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("torch")

from models import gpt, llama
from models.transformer import chain, decoder_layer
from models.transformer_modules import decoder
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


@dataclass(frozen=True)
class Case:
    model: Model
    stages: Sequence[Stage]
    shared: dict[int, str] | None = None

    def program(self) -> Program:
        made_for = problem([layer.name for layer in self.model.layers], 4, global_batch=SAMPLES, shared=self.shared)
        compiled = compile_plan(made_for, plan(made_for, self.stages, MICRO_BATCH))
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
        {0: "embedding", 22: "embedding"},
    ),
    "llama, dp4 with ZeRO 3": Case(small_llama(tied=False), [stage((0, 23), range(4), sharding=3)]),
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


SOURCES = ("models/gpt.py:tiny", "models/llama.py:tiny")


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
    cluster = read_cluster("v100_4x32gb" if "gpt" in source else "a100_8x80gb")
    return dataclasses.replace(cluster, nodes=1, devices_per_node=4)
