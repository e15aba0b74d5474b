"""Tiny versions of the multi-task families are planned by the command line and run as planned."""

import dataclasses
import re
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("torch")

import solver_plan
from models import multitask_clip, ofasys, qwen_val
from solver_plan.cli import main
from solver_plan.documents import write_document
from solver_plan.execution.launch import run_local
from solver_plan.execution.run import load_model
from solver_plan.execution.waves.compile import compile_waves
from solver_plan.execution.waves.model import MultitaskModel
from solver_plan.execution.waves.program import WaveProgram
from solver_plan.kinds import read_plan
from solver_plan.profiles.multitask import MultitaskDescription
from solver_plan.wavefront.from_operators import problem_from_operators
from solver_plan.wavefront.plan import WavefrontPlan
from solver_plan.wavefront.problem import Cluster, WavefrontProblem
from tests.execution.equality import Trained, difference
from tests.execution.waves.equality import alone, together

ROOT = Path(__file__).parents[2]
FAMILIES = {
    "models/multitask_clip.py:tiny": multitask_clip.tiny(),
    "models/ofasys.py:tiny": ofasys.tiny(),
    "models/qwen_val.py:tiny": qwen_val.tiny(),
    "models/qwen_val.py:tiny_frozen": qwen_val.tiny_frozen(),
}
TOLERANCE = 1e-12


def problem(source: str, **options: object) -> WavefrontProblem:
    cluster = Cluster(devices=4, devices_per_node=4, intra_node_bytes_per_s=1e11)
    return problem_from_operators(FAMILIES[source].operators, cluster, model=source, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("source", FAMILIES)
def test_planned_and_run_by_the_command_line(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    files = [str(tmp_path / "problem.json"), str(tmp_path / "plan.json")]
    write_document(problem(source), files[0])
    assert main(["plan", files[0], "--out", files[1], "--deterministic", "--time-limit", "0.1"]) == 0
    capfd.readouterr()
    assert main(["run", *files, "--steps", "2", "--local", "4", "--trace", str(tmp_path / "trace.json")]) == 0
    told = capfd.readouterr()
    assert re.match(r"step 1: loss [\d.]+ \(\S+ [\d.]+, ", told.err)
    plan = read_plan(files[1])
    assert isinstance(plan, WavefrontPlan)
    assert told.out.count("\n") == 2 + len(plan.slices)


def programs() -> dict[str, WaveProgram]:
    found = {}
    split: dict[str, object] = {"tensor_parallel": (2,), "phases": "forward_backward"}
    cases: list[tuple[str, str, dict[str, object]]] = [
        ("models/multitask_clip.py:tiny", "", {}),
        ("models/ofasys.py:tiny", " tensor parallel", split),
        ("models/qwen_val.py:tiny_frozen", "", {}),
    ]
    for source, name, options in cases:
        made_for = problem(source, **options)
        plan = solver_plan.plan(made_for, time_limit_s=1.0, deterministic=True, heuristic="spindle")
        assert isinstance(plan, WavefrontPlan)
        found[source + name] = compile_waves(made_for, plan)
    return found


def model(name: str) -> MultitaskModel:
    found = load_model(name.split(" ")[0])
    assert isinstance(found, MultitaskModel)
    return found


def _train(made: dict[str, WaveProgram], rank: int) -> dict[str, Trained]:
    return {name: together(program, model(name)) for name, program in made.items()}


def _references(made: dict[str, WaveProgram], rank: int) -> dict[str, Trained]:
    return {name: alone(model(name), program) for name, program in made.items()}


def test_losses_and_gradients_are_those_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    made = {name: dataclasses.replace(program, world_size=4) for name, program in programs().items()}
    ranks = run_local(partial(_train, made), 4, timeout_s=240, group_timeout_s=60)
    (references,) = run_local(partial(_references, made), 1)
    for name in made:
        assert difference(references[name], [rank[name] for rank in ranks]) <= TOLERANCE, name


@pytest.mark.parametrize("description", [multitask_clip.clip10(), ofasys.ofasys7(), qwen_val.qwen_val_7b()])
def test_modules_have_the_parameters_that_planning_counts(description: MultitaskDescription) -> None:
    import torch

    assert description.modules is not None
    with torch.device("meta"):
        built = description.modules()
        assert isinstance(built, MultitaskModel)
        counted = {operator.weights: operator.parameters for operator in description.operators}
        for name, layers in built.weights.items():
            middle = layers[1].build()
            matrices = sum(p.numel() for p in middle.parameters() if p.dim() == 2)
            crossing = sum(
                p.numel() for key, p in middle.named_parameters() if key.startswith("cross.") and p.dim() == 2
            )
            assert matrices - crossing == counted[f"{name}.1"], name
