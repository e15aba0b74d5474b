"""The commands on real problems: from shapes or measured profiles to a checked plan, and every way not to get there."""

import importlib.util
import itertools
import json
import os
import pty
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.parallelism import MEBIBYTE, chain
from solver_plan.cli import main
from solver_plan.documents import write_document
from tests.conftest import PROJECT, Run
from tests.offload.offload_cases import make_problem
from tests.wavefront.wavefront_problems import random_problem


def test_from_shapes_to_a_checked_plan(run: Run) -> None:
    source = f"{PROJECT}/models/gpt.py:gpt3_350m"
    code, out, err = run("profile", source, "--cluster", "v100_4x32gb", "--global-batch", "64", "--out", "problem.json")
    assert (code, err) == (0, "")
    assert "4 devices" in out
    assert run("plan", "problem.json", "--heuristic", "grid", "--out", "plan.json")[0] == 0
    code, out, _ = run("check", "problem.json", "plan.json", "--json")
    assert code == 0
    assert json.loads(out)["valid"] is True
    code, out, _ = run("show", "plan.json", "--problem", "problem.json")
    assert code == 0
    assert "heuristic:grid" in out
    assert run("simulate", "problem.json", "plan.json")[0] == 0


def test_a_plan_does_not_replace_its_problem(run: Run) -> None:
    write_document(chain(Path(), blocks=2, devices=2, memory_bytes=1500 * MEBIBYTE, global_batch=8), "problem.json")
    before = Path("problem.json").read_text()
    code, _, err = run("plan", "problem.json", "--heuristic", "grid", "--out", "./problem.json")
    assert code == 2
    assert "is the problem file" in err
    assert Path("problem.json").read_text() == before


def test_a_problem_edited_after_planning_is_refused(run: Run) -> None:
    write_document(chain(Path(), blocks=2, devices=2, memory_bytes=1500 * MEBIBYTE, global_batch=8), "problem.json")
    run("plan", "problem.json", "--heuristic", "grid", "--out", "plan.json")
    text = Path("problem.json").read_text()
    Path("problem.json").write_text(text.replace('"global_batch": 8', '"global_batch": 16'))
    code, out, err = run("check", "problem.json", "plan.json")
    assert (code, out) == (2, "")
    assert "plan again, or use the problem file as it was" in err


def test_a_plan_edited_after_planning_is_found_out(run: Run) -> None:
    write_document(chain(Path(), blocks=2, devices=2, memory_bytes=1500 * MEBIBYTE, global_batch=8), "problem.json")
    run("plan", "problem.json", "--heuristic", "grid", "--out", "plan.json")
    plan = json.loads(Path("plan.json").read_text())
    plan["micro_batches"] += 1
    Path("plan.json").write_text(json.dumps(plan))
    code, out, _ = run("check", "problem.json", "plan.json")
    assert code == 5
    assert "micro_batches" in out


@pytest.mark.parametrize("workers", ["1", "2"])
def test_deterministic_plans_are_the_same_but_for_seconds(run: Run, workers: str) -> None:
    write_document(chain(Path(), blocks=4, devices=4, memory_bytes=1200 * MEBIBYTE, global_batch=16), "problem.json")
    texts = []
    for _ in range(2):
        options = ("--deterministic", "--workers", workers, "--time-limit", "2", "--out", "plan.json")
        assert run("plan", "problem.json", *options)[0] == 0
        texts.append(re.sub(r'"seconds": [0-9.e-]+', '"seconds": 0', Path("plan.json").read_text()))
    assert texts[0] == texts[1]


def test_a_problem_that_fits_nowhere_is_explained(run: Run) -> None:
    write_document(chain(Path(), blocks=2, devices=2, memory_bytes=600 * MEBIBYTE, global_batch=8), "problem.json")
    code, out, err = run("plan", "problem.json", "--out", "plan.json")
    assert (code, out) == (3, "")
    assert re.search(r"bytes short on stage \d+ .*a plan exists from \d+ MB per device", err)
    assert os.listdir() == ["problem.json"]


def test_a_batch_that_no_micro_batch_divides(run: Run) -> None:
    problem = chain(Path(), blocks=2, devices=2, memory_bytes=1500 * MEBIBYTE, global_batch=9)
    write_document(replace(problem, space=replace(problem.space, micro_batch_sizes=(2, 4))), "problem.json")
    code, _, err = run("plan", "problem.json", "--out", "plan.json")
    assert code == 2
    assert "divides 9" in err


def test_no_time_for_any_plan(run: Run) -> None:
    write_document(chain(Path(), blocks=2, devices=2, memory_bytes=1500 * MEBIBYTE, global_batch=8), "problem.json")
    code, out, err = run("plan", "problem.json", "--deterministic", "--time-limit", "1e-9", "--out", "plan.json")
    assert (code, out) == (4, "")
    assert "one may exist" in err
    assert os.listdir() == ["problem.json"]


def test_measured_profiles_are_imported(run: Run, data: Path) -> None:
    source = ("import", "aceso", str(data / "aceso" / "miniset"), "--model", "gpt", "--size", "1_3B")
    machine = ("--devices-per-node", "4", "--memory-mb", "12000", "--global-batch", "512")
    code, out, err = run(*source, *machine, "--out", "problem.json")
    assert (code, out, err) == (0, "gpt 1_3B: 315 operators, 4 devices\n", "")
    code, narrow, _ = run(*source, *machine, "--micro-batches", "2,4", "--out", "-")
    assert code == 0
    assert json.loads(narrow)["space"]["micro_batch_sizes"] == [2, 4]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("nowhere", "--model", "gpt", "--size", "1_3B"), "nowhere"),
        ((".", "--model", "gpt", "--size", "9B"), "gpt_9B"),
        ((".", "--model", "bert", "--size", "1B"), "bert"),
    ],
)
def test_a_database_that_is_none(run: Run, arguments: tuple[str, ...], part: str) -> None:
    machine = ("--devices-per-node", "4", "--memory-mb", "12000", "--global-batch", "512", "--out", "problem.json")
    code, out, err = run("import", "aceso", *arguments, *machine)
    assert (code, out) == (2, "")
    assert part in err
    assert err.count("\n") == 1
    assert os.listdir() == []


def test_ctrl_c_on_a_terminal_gives_the_best_plan_so_far(tmp_path: Path) -> None:
    """Progress is shown on a terminal; the signal is sent when it tells of the first plan."""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-m", "solver_plan"]
    problem, plan = str(tmp_path / "problem.json"), str(tmp_path / "plan.json")
    profile = [f"{PROJECT}/models/gpt.py:gpt3_13b", "--cluster", "v100_4nodes_8x32gb", "--global-batch", "1024"]
    subprocess.run([*command, "profile", *profile, "--out", problem], env=environment, check=True, capture_output=True)
    terminal, end = pty.openpty()
    planning = [*command, "plan", problem, "--time-limit", "3600", "--out", plan, "--json"]
    process = subprocess.Popen(planning, env=environment, stdout=subprocess.PIPE, stderr=end, text=True)
    os.close(end)
    seen = ""
    while "plan " not in seen:
        seen += os.read(terminal, 1000).decode()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate()
    os.close(terminal)
    assert process.returncode == 0
    certificate = json.loads(out)
    assert (certificate["status"], certificate["stopped_by"]) == ("feasible", "interrupt")
    assert main(["check", problem, plan]) == 0


def test_what_if_says_what_binds_and_what_more_would_bring(run: Run) -> None:
    write_document(chain(Path(), blocks=2, devices=2, memory_bytes=1500 * MEBIBYTE, global_batch=8), "problem.json")
    run("plan", "problem.json", "--heuristic", "grid", "--out", "plan.json")
    asked = ("show", "plan.json", "--problem", "problem.json", "--what-if", "--deterministic", "--time-limit", "3")
    code, out, err = run(*asked)
    assert (code, err) == (0, "")
    for text in ("What binds", "1 GiB more on each device", "1 device more (3)", "nothing but more search"):
        assert text in out
    assert run(*asked, "--html", "plan.html")[0] == 0
    assert "1 device more (3)" in Path("plan.html").read_text()


def test_what_if_needs_a_problem_and_limits_need_what_if(run: Run) -> None:
    write_document(chain(Path(), blocks=2, devices=2, memory_bytes=1500 * MEBIBYTE, global_batch=8), "problem.json")
    run("plan", "problem.json", "--heuristic", "grid", "--out", "plan.json")
    code, _, err = run("show", "plan.json", "--what-if")
    assert code == 2
    assert "--what-if: found no --problem" in err
    code, _, err = run("show", "plan.json", "--problem", "problem.json", "--time-limit", "3")
    assert code == 2
    assert "--time-limit: found no --what-if" in err


KINDS_OF_FILES = {"parallelism": "grid", "wavefront": "spindle", "offload": "prefix"}


@pytest.fixture(scope="module")
def of_each_kind(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a problem and a plan of each kind."""
    folder = tmp_path_factory.mktemp("kinds")
    problems = {
        "parallelism": chain(Path(), blocks=2, devices=2, memory_bytes=1500 * MEBIBYTE, global_batch=8),
        "wavefront": random_problem(1),
        "offload": make_problem([(100, 5.0, 9.0), (100, 5.0, 9.0)]),
    }
    for kind, problem in problems.items():
        write_document(problem, folder / f"{kind}.json")
        written = str(folder / f"{kind}.json"), "--out", str(folder / f"{kind}_plan.json")
        assert main(["plan", *written, "--heuristic", KINDS_OF_FILES[kind]]) == 0
    return folder


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(KINDS_OF_FILES, 2)))
def test_problem_and_plan_of_two_kinds_are_both_named(run: Run, of_each_kind: Path, one: str, other: str) -> None:
    problem, plan = str(of_each_kind / f"{one}.json"), str(of_each_kind / f"{other}_plan.json")
    found = f"{plan}: found a plan of kind {other}; {problem} is a problem of kind {one}"
    line = f"solver-plan: {found}: give two that match\n"
    verbs = ["check", "simulate", "compile"]
    if importlib.util.find_spec("torch") is not None:
        verbs.append("run")
    more = {"compile": ("--out", "x"), "run": ("--steps", "1", "--local", "1")}
    for verb in verbs:
        assert run(verb, problem, plan, *more.get(verb, ())) == (2, "", line)
    assert run("show", plan, "--problem", problem) == (2, "", line)
    assert run("show", plan, "--problem", problem, "--what-if") == (2, "", line)


@pytest.mark.parametrize(
    "options",
    [
        f"{PROJECT}/models/gpt.py:tiny --global-batch 8",
        f"{PROJECT}/models/gpt.py:tiny --global-batch 8 --kind offload",
        f"{PROJECT}/models/multitask_clip.py:tiny --kind wavefront",
    ],
)
def test_a_machine_of_absurd_numbers_is_refused_in_one_line(run: Run, options: str) -> None:
    machine = (PROJECT / "solver_plan/clusters/v100_4x32gb.toml").read_text()
    Path("slow.toml").write_text(re.sub("launch_ms = .*", "launch_ms = 1e18", machine))
    code, out, err = run("profile", *options.split(), "--cluster", "slow.toml", "--out", "problem.json")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(
        r"on v100_4x32gb: \w+\.forward_ms: found .*; input should be less than .*: correct the numbers", err
    )


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ("--overlap none,transfers", "found 'none,transfers'; of tensor_parallel, transfers, reduction each once"),
        ("--overlap transfers,transfers", "each once, or none alone"),
        ("--overlap reduction --cost-model aceso", "--overlap: found --cost-model aceso, which hides nothing"),
        ("--sharding 0,1 --cost-model aceso", "--sharding: found --cost-model aceso, which shards nothing; take full"),
        (
            "--virtual-stages 1,2 --cost-model aceso",
            "--virtual-stages: found --cost-model aceso, which knows one stage",
        ),
        ("--cost-model aceso --sequence-parallel", "--sequence-parallel: found --cost-model aceso, which knows no"),
        ("--virtual-stages 1,1000000", "found 1000000; each has at least one whole block, and gpt-tiny has 2: give"),
        ("--sharding=-1", "found '-1'; a whole number of at least 0"),
        ("--virtual-stages 2", "found '2'; 1, and others beside it"),
    ],
)
def test_options_of_the_full_cost_model_are_refused_in_one_line(run: Run, options: str, part: str) -> None:
    model = f"{PROJECT}/models/gpt.py:tiny"
    asked = ("--cluster", "v100_4x32gb", "--global-batch", "8", "--out", "problem.json")
    code, out, err = run("profile", model, *asked, *options.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert part in err
    assert os.listdir() == []
