"""The command line: exit codes, one-line errors, what goes to which stream."""

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import solver_plan
from solver_plan.cli import main
from solver_plan.commands import VERBS
from solver_plan.documents import Incumbency, document_text, write_document
from solver_plan.errors import InputError
from solver_plan.solving.progress import terminal_progress
from tests.conftest import PROJECT
from tests.shelf import Parcel, ShelfPlan, ShelfProblem, check, objective

pytestmark = pytest.mark.usefixtures("shelf")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in an empty folder and return its exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)

    def run_command(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return run_command


def _write_problem(length: int = 9, file: str = "problem.json") -> ShelfProblem:
    problem = ShelfProblem(length=length, parcels=(Parcel(name="a", wait_ms=1.5), Parcel(name="b", wait_ms=2.0)))
    write_document(problem, file)
    return problem


def test_plan_check_show_simulate(run: Run) -> None:
    _write_problem()
    code, out, err = run("plan", "problem.json", "--out", "plan.json")
    assert (code, err) == (0, "")
    assert out.startswith("feasible: 3.500 ms, bound 1.750 ms by closed-form:half, gap 50.000%\n")
    code, out, err = run("check", "problem.json", "plan.json")
    assert (code, out, err) == (0, "plan.json: valid, 3.500000 ms (recomputed)\n", "")
    code, out, err = run("show", "plan.json")
    assert (code, err) == (0, "")
    assert out.startswith("order: a b\n")
    assert "seconds  plan (ms)  bound (ms)      gap  source" in out
    code, out, err = run("show", "plan.json", "--problem", "problem.json")
    assert out.startswith("order: a b on 9\n")
    assert run("simulate", "problem.json", "plan.json") == (0, "2 parcels carried\n", "")


def test_a_plan_to_standard_output_leaves_people_on_standard_error(run: Run) -> None:
    problem = _write_problem()
    code, out, err = run("plan", "problem.json", "--out", "-")
    assert code == 0
    assert json.loads(out)["order"] == ["a", "b"]
    assert err.startswith("feasible: 3.500 ms")
    assert problem.length == 9


def test_json_sends_facts_to_standard_output(run: Run) -> None:
    _write_problem()
    code, out, err = run("plan", "problem.json", "--out", "plan.json", "--json")
    assert (code, json.loads(out)["objective"], err.splitlines()[0][:9]) == (0, 3.5, "feasible:")
    code, out, err = run("check", "problem.json", "plan.json", "--json")
    assert json.loads(out) == {"valid": True, "violations": [], "objective": 3.5}
    assert "recomputed" in err
    code, out, err = run("plan", "problem.json", "--out", "-", "--json")
    assert (code, out) == (2, "")


def test_options_reach_the_planner(run: Run) -> None:
    _write_problem()
    code, out, _ = run("plan", "problem.json", "--out", "plan.json", "--seed", "7", "--heuristic", "longest")
    assert code == 0
    assert "found by heuristic:longest" in out
    assert "none, seed 7" in out


def test_violations_are_printed_each_and_exit_5(run: Run) -> None:
    problem = _write_problem()
    plan = ShelfPlan(problem_digest=solver_plan.digest_of(problem), order=("a", "a"))
    write_document(plan, "plan.json")
    code, out, err = run("check", "problem.json", "plan.json")
    assert (code, err) == (5, "")
    assert out.splitlines() == [*check(problem, plan), "plan.json: 2 violations"]
    code, out, _ = run("check", "problem.json", "plan.json", "--json")
    assert (code, json.loads(out)["valid"], len(json.loads(out)["violations"])) == (5, False, 2)


def test_a_plan_of_another_problem_is_refused(run: Run) -> None:
    _write_problem()
    run("plan", "problem.json", "--out", "plan.json")
    _write_problem(length=10)
    for command in (
        ("check", "problem.json", "plan.json"),
        ("simulate", "problem.json", "plan.json"),
        ("show", "plan.json", "--problem", "problem.json"),
    ):
        code, out, err = run(*command)
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        assert "the plan was made for problem sha256:" in err


def test_a_plan_written_by_hand_is_checked_with_a_warning(run: Run) -> None:
    _write_problem()
    write_document(ShelfPlan(problem_digest=None, order=("b", "a")), "plan.json")
    code, out, err = run("check", "problem.json", "plan.json")
    assert (code, out) == (0, "plan.json: valid, 3.500000 ms (recomputed)\n")
    assert err == "plan.json: names no problem (problem_digest is null): written by hand?\n"


@pytest.mark.parametrize(
    ("length", "code", "line"),
    [
        (3, 3, "solver-plan: length: 3 is too short by 1; a shelf of 4 holds the parcels\n"),
        (4, 4, "solver-plan: no plan found within the limit (0.1 s): give more time; one may exist\n"),
        (
            666,
            1,
            "solver-plan: unexpected ZeroDivisionError: a fault of ours; --verbose shows where\n",
        ),
        (
            640,
            1,
            "solver-plan: out of memory (Unable to allocate 104. GiB); take a smaller problem, or a larger machine\n",
        ),
        (130, 1, "solver-plan: interrupted\n"),
    ],
)
def test_without_a_plan_no_file_is_written(run: Run, length: int, code: int, line: str) -> None:
    _write_problem(length)
    assert run("plan", "problem.json", "--out", "plan.json") == (code, "", line)
    assert os.listdir() == ["problem.json"]


def test_verbose_shows_where_a_fault_is(run: Run) -> None:
    _write_problem(666)
    with pytest.raises(ZeroDivisionError):
        run("plan", "problem.json", "--out", "plan.json", "--verbose")


WRONG = [
    ([], "the following arguments are required: VERB"),
    (["fly"], "invalid choice: 'fly'"),
    (["plan", "problem.json"], "--out"),
    (["plan", "problem.json", "--out", "plan.json", "--time-limit", "0"], "time limit: found 0 s"),
    (["plan", "problem.json", "--out", "plan.json", "--time-limit", "-1"], "time limit: found -1 s"),
    (["plan", "problem.json", "--out", "plan.json", "--time-limit", "nan"], "time limit: found nan s"),
    (["plan", "problem.json", "--out", "plan.json", "--time-limit", "inf"], "time limit: found inf s"),
    (["plan", "problem.json", "--out", "plan.json", "--time-limit", "soon"], "found 'soon'; a number"),
    (["plan", "problem.json", "--out", "plan.json", "--gap", "1"], "gap: found 1"),
    (["plan", "problem.json", "--out", "plan.json", "--gap", "-0.1"], "gap: found -0.1"),
    (["plan", "problem.json", "--out", "plan.json", "--workers", "0"], "workers: found 0"),
    (["plan", "problem.json", "--out", "plan.json", "--seed", "-1"], "seed: found -1"),
    (["plan", "problem.json", "--out", "plan.json", "--heuristic", "luck"], "for shelf one of sorted, longest"),
    (["plan", "nowhere.json", "--out", "plan.json"], "nowhere.json: found No such file or directory"),
    (["plan", "problem.json", "--out", "missing/plan.json"], "make the folder first"),
    (["plan", "", "--out", "plan.json"], "a document: found an empty name; name a file that can be read"),
    (["plan", "problem.json", "--out", "."], "is a folder"),
    (["plan", "problem.json", "--out", "/dev/full"], "the disk is full"),
    (["plan", "bad\n\x1b[31m.json", "--out", "plan.json"], r"bad \x1b[31m.json"),
    (["check", "problem.json", "problem.json"], "format: found 'solver-plan/problem'"),
    (["schema", "cupboard", "plan"], "kind: found 'cupboard'; one of shelf"),
    (["schema", "shelf", "song"], "invalid choice: 'song'"),
    (["import", "aceso", "x", "--nodes", "0"], "found '0'; a whole number of at least 1"),
    (["import", "aceso", "x", "--micro-batches", "1,,2"], "found ''; a whole number of at least 1"),
]


@pytest.mark.parametrize(("arguments", "part"), WRONG, ids=[" ".join(arguments) or "nothing" for arguments, _ in WRONG])
def test_wrong_input_is_one_line_and_exit_2(run: Run, arguments: list[str], part: str) -> None:
    _write_problem()
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert part in err
    assert err.startswith("solver-plan")
    assert err.count("\n") == 1
    assert "\x1b" not in err
    assert os.listdir() == ["problem.json"]


def test_an_output_that_cannot_be_written_is_refused_before_planning(run: Run) -> None:
    _write_problem(666)  # planning would fail with another exit code
    assert run("plan", "problem.json", "--out", "missing/plan.json")[0] == 2


def test_an_existing_plan_survives_a_failure(run: Run) -> None:
    _write_problem(4)
    Path("plan.json").write_text("precious")
    assert run("plan", "problem.json", "--out", "plan.json")[0] == 4
    assert Path("plan.json").read_text() == "precious"


def test_schema_prints_json(run: Run) -> None:
    code, out, err = run("schema", "shelf", "plan")
    assert (code, err) == (0, "")
    assert "order" in json.loads(out)["properties"]


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert re.findall(r"^    (\w+)  ", capsys.readouterr().out, re.MULTILINE) == [verb.name for verb in VERBS]


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from solver_plan.cli import main\ntry: main(['--help'])\nfinally: print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=True)
    modules = set(shown.stdout.split())
    assert {"solver_plan.commands.plan", "argparse"} <= modules
    assert not modules & {"pydantic", "ortools", "numpy", "networkx", "pulp", "highspy", "torch", "solver_plan.kinds"}


def test_planning_documents_need_no_torch() -> None:
    code = "import sys, solver_plan; solver_plan.plan; solver_plan.read_problem; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert not set(shown.stdout.split()) & {"torch", "ortools", "pulp"}


def test_every_public_name_can_be_imported() -> None:
    for name in solver_plan.__all__:
        assert callable(getattr(solver_plan, name)), name
    assert set(solver_plan.__all__) <= set(dir(solver_plan))
    with pytest.raises(AttributeError, match="no attribute 'fly'"):
        solver_plan.fly  # noqa: B018


def _solver_plan(*arguments: str, stdout: int, cwd: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-m", "solver_plan", *arguments]
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=cwd, env=environment)


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = _solver_plan("schema", "parallelism", "problem", stdout=write_end, cwd=tmp_path)
    os.close(write_end)
    assert process.communicate() == (None, "")
    assert process.returncode == 1


@pytest.mark.parametrize("arguments", [("schema", "parallelism", "problem"), ("--help",)])
def test_a_full_standard_output_is_one_line(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        process = _solver_plan(*arguments, stdout=full.fileno(), cwd=tmp_path)
    assert process.stderr is not None
    err = process.stderr.read()
    assert process.wait() == 2
    assert err == "solver-plan: standard output: cannot write (No space left on device); choose another place\n"


def test_a_closed_standard_output_is_one_line() -> None:
    command = f"{sys.executable} -m solver_plan schema parallelism plan >&-"
    shown = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=PROJECT, check=False)
    assert (shown.returncode, shown.stderr.count("\n")) == (2, 1)
    assert "standard output: cannot write (it is closed)" in shown.stderr


def test_progress_is_for_terminals_only() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    step = Incumbency(seconds=1.0, objective=4.0, bound=3.0, source="cp-sat")
    terminal, pipe = Terminal(), io.StringIO()
    terminal_progress(terminal)(step)
    terminal_progress(pipe)(step)
    assert terminal.getvalue() == "    1.0 s  plan 4.00 ms  bound 3.00 ms  gap 25.00%  cp-sat\n"
    assert pipe.getvalue() == ""


def test_progress_of_a_plan_that_costs_nothing() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    terminal_progress(terminal)(Incumbency(seconds=1.0, objective=0.0, bound=None, source="x"))
    terminal_progress(terminal)(Incumbency(seconds=1.0, objective=0.0, bound=0.0, source="x"))
    assert "plan 0.00 ms" in terminal.getvalue()


def test_python_does_what_the_commands_do() -> None:
    problem = ShelfProblem(length=9, parcels=(Parcel(name="a", wait_ms=1.5),))
    plan = solver_plan.plan(problem, time_limit_s=5.0, seed=3)
    assert solver_plan.check(problem, plan) == ()
    assert solver_plan.simulate(problem, plan) == "1 parcels carried"
    assert solver_plan.show(plan, problem).startswith("order: a on 9\n")
    assert plan.certificate is not None
    assert plan.certificate.objective == objective(problem, plan)  # type: ignore[arg-type]
    assert json.loads(document_text(plan))["order"] == ["a"]
    with pytest.raises(InputError):
        solver_plan.plan(problem, time_limit_s=0)
