"""Tables for terminals."""

from solver_plan.documents import Incumbency, certify
from solver_plan.report.tables import certificate_table, table, trace_table


def test_numbers_stand_to_the_right_and_text_to_the_left() -> None:
    text = table(["name", "ms", "share", "note"], [["a", 1.5, "5%", "x"], ["long name", 1200, None, "yy"]])
    assert text.splitlines() == [
        "name          ms  share  note",
        "---------  -----  -----  ----",
        "a          1.500     5%  x",
        "long name   1200      -  yy",
    ]


def test_a_table_without_rows() -> None:
    assert table(["name", "ms"], []) == "name  ms\n----  --"


def test_a_certificate_and_its_trace() -> None:
    steps = [
        Incumbency(seconds=0.1, objective=200.0, bound=None, source="heuristic:grid"),
        Incumbency(seconds=2.0, objective=100.0, bound=90.0, source="cp-sat"),
    ]
    certificate = certify(
        objective=100.0,
        bound=90.0,
        bound_from="cp-sat",
        stopped_by="time",
        seconds=2.5,
        incumbent="cp-sat",
        solver="CP-SAT",
        trace=steps,
    )
    assert certificate_table(certificate).splitlines() == [
        "feasible: 100.000 ms, bound 90.000 ms by cp-sat, gap 10.000%",
        "found by cp-sat; stopped at the time limit after 2.5 s; CP-SAT",
    ]
    assert trace_table(certificate).splitlines()[2:] == [
        "   0.10    200.000           -        -  heuristic:grid",
        "   2.00    100.000      90.000  10.000%  cp-sat",
    ]


def test_nothing_proven_is_said() -> None:
    certificate = certify(
        objective=100.0, bound=None, bound_from=None, stopped_by="completed", seconds=0.0, incumbent="x", solver="none"
    )
    assert "bound nothing proven" in certificate_table(certificate)
    assert trace_table(certificate) == ""


def test_names_cannot_speak_to_the_terminal() -> None:
    text = table(["name"], [["red \x1b[31m\nnext \ud800 ü"]])
    assert text.splitlines()[2:] == [r"red \x1b[31m\nnext \ud800 ü"]
