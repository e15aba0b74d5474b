"""The command: where text goes, what is refused, and exit codes."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from solver_plan.documents import write_document
from solver_plan.parallelism.costs import evaluate
from tests.conftest import Run
from tests.export.export_cases import LAYERS, pipeline, small_problem, whole
from tests.export.readers import of_megatron, of_plan
from tests.export.test_losses import ALL_FIRST
from tests.wavefront.wavefront_problems import component, piece
from tests.wavefront.wavefront_problems import plan as wavefront_plan
from tests.wavefront.wavefront_problems import problem as wavefront_problem

EXACT = pipeline([3, 5], degrees=[(2, 2)])
LOSSY = pipeline([3, 5], degrees=[(2, 2)], recomputed=[(5, 9)])


@pytest.fixture
def files(run: Run) -> Run:
    write_document(small_problem(), "problem.json")
    write_document(EXACT, "plan.json")
    write_document(LOSSY, "lossy.json")
    return run


def test_to_standard_output(files: Run) -> None:
    for given in ((), ("--out", "-")):
        code, out, err = files("export", "problem.json", "plan.json", "--to", "megatron", *given)
        assert code == 0
        assert of_megatron(out, 8) == of_plan(small_problem(), EXACT)
        assert "as planned" in err


def test_to_a_file(files: Run) -> None:
    Path("plan.args").write_text("old")
    code, out, err = files("export", "problem.json", "plan.json", "--to", "megatron", "--out", "plan.args")
    assert (code, err) == (0, "")
    assert "as planned" in out
    assert of_megatron(Path("plan.args").read_text(), 8).groups == 2
    assert sorted(os.listdir()) == ["lossy.json", "plan.args", "plan.json", "problem.json"]


def test_losses_are_refused_unless_allowed(files: Run) -> None:
    code, out, err = files("export", "problem.json", "lossy.json", "--to", "megatron", "--out", "x")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "(1) recomputation" in err
    assert not Path("x").exists()
    code, out, _ = files("export", "problem.json", "lossy.json", "--to", "megatron", "--out", "x", "--allow-losses")
    assert code == 0
    assert "lost: recomputation" in out
    assert "lost: recomputation" in Path("x").read_text()


def test_an_order_lies_beside_its_configuration(run: Run) -> None:
    write_document(small_problem(cost_model="aceso"), "problem.json")
    write_document(pipeline([3, 5], degrees=[(2, 2)], orders=ALL_FIRST), "plan.json")
    code, _, err = run("export", "problem.json", "plan.json", "--to", "torchtitan")
    assert code == 2
    assert "name a file, not -" in err
    assert run("export", "problem.json", "plan.json", "--to", "torchtitan", "--out", "run.py")[0] == 0
    assert "'run.schedule.csv'" in Path("run.py").read_text()
    assert Path("run.schedule.csv").read_text().startswith("0F0,0F1")


def test_what_does_not_fit_is_written_and_told(run: Run) -> None:
    plan = pipeline([4, 4], degrees=[(1, 4)], sharding=[3], recomputed=whole(*range(LAYERS)))
    problem = small_problem()
    peak = int(max(stage.memory_bytes for stage in evaluate(problem, plan).stages))
    cluster = replace(problem.cluster, memory_bytes_per_device=peak + 1, memory_margin=0.0)
    write_document(replace(problem, cluster=cluster), "problem.json")
    write_document(plan, "plan.json")
    code, out, _ = run("export", "problem.json", "plan.json", "--to", "deepspeed", "--out", "x", "--allow-losses")
    assert code == 5
    assert "does NOT fit" in out
    assert "does NOT fit" in Path("x").read_text()


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("problem.json", "plan.json", "--to", "alpa"), "one of megatron, torchtitan, deepspeed"),
        (("problem.json", "plan.json"), "--to"),
        (("plan.json", "plan.json", "--to", "megatron"), "plan.json"),
        (("problem.json", "plan.json", "--to", "megatron", "--out", "plan.json"), "which would be replaced"),
        (("problem.json", "plan.json", "--to", "megatron", "--out", "nowhere/x"), "make the folder first"),
    ],
)
def test_wrong_input(files: Run, arguments: tuple[str, ...], found: str) -> None:
    before = Path("plan.json").read_text()
    code, out, err = files("export", *arguments)
    assert (code, out) == (2, "")
    assert found in err
    assert Path("plan.json").read_text() == before


def test_waves_are_refused(run: Run) -> None:
    write_document(wavefront_problem([component("a")]), "problem.json")
    write_document(wavefront_plan(piece("a", (0, 2), [0], 0, 8)), "plan.json")
    code, _, err = run("export", "problem.json", "plan.json", "--to", "torchtitan")
    assert code == 2
    assert "run it with solver-plan run" in err
