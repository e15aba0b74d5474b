"""Status, limit hit, bound and gap are separate facts, and each says what it says."""

from typing import Literal

import pytest

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
