"""Status, limit hit, bound and gap are separate facts, and each says what it says."""

from dataclasses import replace
from typing import Literal

import pytest
from pydantic import ValidationError

from solver_plan.documents import Certificate, certify

StoppedBy = Literal["proof", "gap", "time", "deterministic_time", "interrupt", "completed"]


def _certify(objective: float, bound: float | None, stopped_by: StoppedBy = "time") -> Certificate:
    return certify(
        objective=objective,
        bound=bound,
        bound_from="cp-sat",
        stopped_by=stopped_by,
        seconds=1.23456,
        incumbent="cp-sat",
        solver="a solver",
    )


@pytest.mark.parametrize(
    ("objective", "bound", "status", "stopped_by", "gap"),
    [
        (100.0, 100.0, "optimal", "proof", 0.0),
        (100.0, 99.99995, "optimal", "proof", pytest.approx(5e-7)),
        (100.0, 99.9998, "feasible", "time", pytest.approx(2e-6)),
        (100.0, 75.0, "feasible", "time", 0.25),
        (100.0, 100.00005, "optimal", "proof", 0.0),
        (100.0, None, "feasible", "time", None),
        (100.0, 0.0, "feasible", "time", None),
        (100.0, -5.0, "feasible", "time", None),
        (0.0, 0.0, "feasible", "time", None),
    ],
)
def test_status_and_gap_follow_from_objective_and_bound(
    objective: float, bound: float | None, status: str, stopped_by: str, gap: float | None
) -> None:
    certificate = _certify(objective, bound)
    assert (certificate.status, certificate.stopped_by, certificate.gap) == (status, stopped_by, gap)
    assert (certificate.bound is None) == (certificate.bound_from is None) == (gap is None)
    assert certificate.seconds == 1.235


def test_a_gap_limit_is_not_optimal() -> None:
    assert _certify(100.0, 99.0, "gap").status == "feasible"
    assert _certify(100.0, 99.0, "gap").stopped_by == "gap"


def test_a_bound_above_the_objective_is_a_fault_of_ours() -> None:
    with pytest.raises(AssertionError, match="above objective"):
        _certify(100.0, 100.1)


def _stated(**changes: object) -> Certificate:
    return replace(_certify(100.0, 75.0), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"status": "optimal"}, "'feasible': optimal if and only if the gap is at most 1e-06"),
        ({"bound": 100.0, "gap": 0.0}, "'optimal': optimal if and only if"),
        ({"gap": 0.1}, r"\(objective - bound\) / objective, null without a bound: 0.25"),
        ({"gap": None}, "null without a bound: 0.25"),
        ({"bound": None}, "null without a bound: None"),
        ({"bound": 0.0, "gap": 1.0}, "greater than 0"),
    ],
)
def test_a_certificate_that_contradicts_itself_is_refused(changes: dict[str, object], rule: str) -> None:
    with pytest.raises(ValidationError, match=rule):
        _stated(**changes)


def test_a_certificate_that_agrees_with_itself_is_let_through() -> None:
    assert _stated(gap=0.25 + 1e-7).bound == 75.0
    assert _stated(bound=None, gap=None).status == "feasible"
    assert _stated(bound=100.0, gap=0.0, status="optimal").gap == 0.0
