"""`compile` and `run` on the command line."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from solver_plan.cli import main
from solver_plan.documents import write_document
from solver_plan.errors import RunFailedError
from solver_plan.execution.programs import read_program
from solver_plan.profiles.loading import load_description
from tests.execution.cases import plan, problem, stage

ROOT = Path(__file__).parents[2]
MODEL = "models/gpt.py:tiny"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    monkeypatch.chdir(ROOT)
    names = [operator.name for operator in load_description(MODEL).operators]
    made_for = problem(names, 2, model=MODEL)
    made = plan(made_for, [stage((0, 12), [0]), stage((12, 29), [1])], 4)
    write_document(made_for, tmp_path / "problem.json")
    write_document(made, tmp_path / "plan.json")
    return str(tmp_path / "problem.json"), str(tmp_path / "plan.json")


def test_compile_writes_a_program(files: tuple[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "program.json"
    assert main(["compile", *files, "--out", str(out), "--dry-run", "0,1"]) == 0
    assert read_program(out).world_size == 2
    told = capfd.readouterr().err
    assert "stage 1: layer0.second_norm" in told or "stage 1: layer0." in told
    assert "rank 1: created 0 groups" in told
    other = tmp_path / "other.json"
    assert main(["compile", *files, "--out", str(other), "--dry-run", "2"]) == 2
    assert capfd.readouterr().err.startswith("solver-plan: ranks: found '2'")
    assert not other.exists()


def test_run_trains_and_traces(files: tuple[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    assert main(["run", *files, "--steps", "2", "--local", "2", "--trace", str(trace)]) == 0
    out, err = capfd.readouterr()
    assert err.startswith("step 1: loss ")
    assert out.splitlines()[0].startswith("stage   predicted ms   measured ms")
    assert {event["pid"] for event in json.loads(trace.read_text())["traceEvents"]} == {0, 1}


def test_run_refuses_with_one_line(
    files: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *files, "--steps", "2", "--local", "3"]) == 2
    assert capfd.readouterr().err == ("solver-plan: world size: the plan has 2 ranks, found 3 processes; start 2\n")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "1")
    assert main(["run", *files, "--steps", "2"]) == 2
    assert capfd.readouterr().err == ""
    assert main(["run", *files, "--steps", "2", "--local", "2", "--model", "models/llama.py:tiny"]) == 2


def test_run_says_what_a_model_file_raises(
    files: tuple[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "import dataclasses\n"
        "from models.gpt import tiny\n"
        "def broken():\n"
        "    return dataclasses.replace(tiny(), modules=lambda: 1 / 0)\n"
    )
    model = f"{tmp_path}/mine.py:broken"
    assert main(["run", *files, "--steps", "1", "--local", "2", "--model", model]) == 2
    told = capfd.readouterr().err
    assert "raised ZeroDivisionError: division by zero; correct the model file" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--checkpoint", ""], "--checkpoint: found ''; name a folder"),
        (["--checkpoint-every", "2"], "--checkpoint-every: found no --checkpoint"),
        (["--max-norm", "1"], "--max-norm is for offload plans"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    files: tuple[str, str], options: list[str], told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *files, "--steps", "1", "--local", "2", *options]) == 2
    assert told in capfd.readouterr().err


def test_a_run_with_nothing_left_to_train_says_so(
    files: tuple[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["run", *files, "--steps", "1", "--local", "2", "--checkpoint", str(tmp_path / "saved")]
    assert main(command) == 0
    assert main(command) == 0
    assert "saved: has step 1 already, none was left to train; raise --steps" in capfd.readouterr().err


def test_a_trace_is_a_file(files: tuple[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *files, "--steps", "1", "--local", "2", "--trace", "-"]) == 2
    assert "--trace: found '-'" in capfd.readouterr().err


def test_what_failed_on_another_rank_is_told_under_torchrun(
    files: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise RunFailedError("1F0: ValueError: broken")

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("solver_plan.execution.run.run", fail)
    assert main(["run", *files, "--steps", "1"]) == 1
    assert "1F0: ValueError: broken" in capfd.readouterr().err
