"""The benchmarks run: registry, one case in this process, the tiny cases of every group, the files they write."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import registry
from benchmarks.__main__ import main
from benchmarks.case import Case, Reference, data_folder
from benchmarks.outcome import PLANNER, Outcome
from benchmarks.results import csv_text, json_text, markdown, terminal_table
from benchmarks.runner import run
from benchmarks.worker import solve
from solver_plan.errors import InputError
from solver_plan.kinds import KINDS
from solver_plan.solving import Budget
from tests.shelf import Parcel, ShelfProblem


def _shelf_case(length: int = 9) -> Case:
    return Case(
        name="a shelf",
        build=lambda data: ShelfProblem(length=length, parcels=(Parcel(name="a", wait_ms=1500.0),)),
        baselines=("longest",),
        references=(Reference(source="a book", objective_ms=2000.0),),
    )


@pytest.mark.parametrize("group", registry.GROUPS)
def test_every_group_has_tiny_cases_and_names_are_unique(group: str) -> None:
    cases = registry.cases_of(group)
    assert any(case.smoke for case in cases)
    assert all(case.data is None for case in cases if case.smoke)
    assert len({case.name for case in cases}) == len(cases)
    assert group in (*KINDS, "full")


def test_unknown_groups_and_cases_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="group: found 'x'"):
        registry.cases_of("x")
    assert main(["parallelism", "--cases", "tiny-2,nowhere"]) == 2
    assert "case: found 'nowhere'; one of tiny-2" in capsys.readouterr().err


@pytest.mark.usefixtures("shelf")
def test_a_case_is_planned_checked_and_measured(tmp_path: Path) -> None:
    outcome = solve(_shelf_case(), PLANNER, Budget(seed=5, workers=3), tmp_path)
    assert (outcome.ending, outcome.status, outcome.objective_ms) == ("planned", "feasible", 1500.0)
    assert (outcome.bound_ms, outcome.gap, outcome.workers, outcome.seed) == (750.0, 0.5, 3, 5)
    assert outcome.wall_s is not None
    assert outcome.cpu_s is not None
    assert outcome.peak_memory_bytes is not None
    assert outcome.peak_memory_bytes > 2**20
    assert json.loads((tmp_path / "plan.json").read_text())["order"] == ["a"]


@pytest.mark.usefixtures("shelf")
@pytest.mark.parametrize(
    ("length", "method", "ending", "reason"),
    [
        (3, PLANNER, "infeasible", "too short"),
        (4, PLANNER, "no plan", "one may exist"),
        (9, "luck", "failed", "one of sorted, longest"),
    ],
)
def test_a_case_without_a_plan_says_why(tmp_path: Path, length: int, method: str, ending: str, reason: str) -> None:
    outcome = solve(_shelf_case(length), method, Budget(), tmp_path)
    assert outcome.ending == ending
    assert reason in (outcome.reason or "")
    assert outcome.objective_ms is None


def test_a_case_without_its_data_is_skipped_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOLVER_PLAN_DATA", str(tmp_path))
    assert data_folder() == tmp_path
    outcomes = list(run("parallelism", [replace(_shelf_case(), data="aceso/none")], None))
    assert [(outcome.method, outcome.ending) for outcome in outcomes] == [("longest", "skipped"), (PLANNER, "skipped")]
    assert outcomes[0].reason == "needs aceso/none of the reference data; set SOLVER_PLAN_DATA"


def test_a_case_whose_process_dies_is_a_failure_with_its_last_words() -> None:
    outcomes = list(run("parallelism", [_shelf_case()], None))  # the child knows no such case
    assert [outcome.ending for outcome in outcomes] == ["failed", "failed"]
    assert "case: found 'a shelf'" in (outcomes[0].reason or "")


def test_figures_stand_beside_each_other_in_every_form() -> None:
    case = _shelf_case()
    outcomes = [
        Outcome(case="a shelf", method="longest", ending="planned", status="feasible", objective_ms=1800.0),
        Outcome(
            case="a shelf",
            method=PLANNER,
            ending="planned",
            status="optimal",
            objective_ms=1500.0,
            bound_ms=1500.0,
            gap=0.0,
        ),
        Outcome(case="a shelf", method="sorted", ending="infeasible", reason="too short"),
    ]
    text = terminal_table([case], outcomes)
    assert "1.5000" in text.splitlines()[3]
    assert "a book 2.000 (-25.00%)" in text.splitlines()[3]
    assert text.splitlines()[-1] == "a shelf sorted: too short"
    assert "| a shelf | planner | optimal | 1.5000 | 1.5000 | 0.000% |" in markdown("shelves", [case], outcomes)
    facts = json.loads(json_text("shelves", [case], outcomes))
    assert facts["references_ms"] == {"a shelf": {"a book": 2000.0}}
    assert facts["outcomes"][1]["objective_ms"] == 1500.0
    assert set(facts["versions"]) >= {"python", "ortools", "highspy"}
    rows = list(csv.DictReader(csv_text(outcomes).splitlines()))
    assert [row["objective_ms"] for row in rows] == ["1800.0", "1500.0", ""]


@pytest.mark.parametrize("group", registry.GROUPS)
def test_the_tiny_cases_run(group: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([group, "--smoke", "--out", str(tmp_path)]) == 0, capsys.readouterr()
    facts = json.loads((tmp_path / "results.json").read_text())
    planned = {(row["case"], row["method"]): row for row in facts["outcomes"]}
    for case in registry.chosen(group, smoke=True):
        best = planned[case.name, PLANNER]
        assert best["ending"] == "planned"
        assert (tmp_path / "plans" / f"{case.name}.{PLANNER}.json").exists()
        for baseline in case.baselines:
            assert best["objective_ms"] <= planned[case.name, baseline]["objective_ms"] * (1 + 1e-9)
    assert {path.name for path in tmp_path.iterdir()} == {"plans", "results.csv", "results.json", "results.md"}
    assert "planner" in capsys.readouterr().out
