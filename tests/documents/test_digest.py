"""The digest follows what the file says: not the order of keys, not provenance, not defaults."""

import hashlib
import json
from pathlib import Path

import pytest

from solver_plan.documents import digest_of, read_document, require_same_problem
from solver_plan.errors import PlanMismatchError
from tests.shelf import Parcel, ShelfPlan, ShelfProblem

PARSED = {
    "format": "solver-plan/problem",
    "version": 1,
    "kind": "shelf",
    "length": 9,
    "parcels": [{"name": "ü", "wait_ms": 1}],
}


def _digest(folder: Path, parsed: object) -> str:
    file = folder / "problem.json"
    file.write_text(json.dumps(parsed))
    return digest_of(read_document(file, {"shelf": ShelfProblem}, "solver-plan/problem"))


def test_the_digest_is_the_documented_one(tmp_path: Path) -> None:
    canonical = (
        '{"format":"solver-plan/problem","kind":"shelf","length":9,"parcels":[{"name":"ü","wait_ms":1}],"version":1}'
    )
    assert _digest(tmp_path, PARSED) == "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        (dict(reversed(PARSED.items())), True),
        ({**PARSED, "provenance": {"by": "hand"}}, True),
        ({**PARSED, "ordered": False}, False),
        ({**PARSED, "length": 8}, False),
        ({**PARSED, "parcels": [{"name": "ü", "wait_ms": 1.0}]}, False),
        ({**PARSED, "parcels": [{"name": "u", "wait_ms": 1}]}, False),
    ],
)
def test_what_the_digest_follows(tmp_path: Path, changed: object, same: bool) -> None:
    assert (_digest(tmp_path, changed) == _digest(tmp_path, PARSED)) is same


def test_a_document_in_memory_has_the_digest_of_its_file() -> None:
    problem = ShelfProblem(length=9, parcels=(Parcel(name="a", wait_ms=1.0),))
    assert digest_of(problem) == digest_of(ShelfProblem(length=9, parcels=(Parcel(name="a", wait_ms=1.0),)))
    assert digest_of(problem) != digest_of(ShelfProblem(length=8, parcels=(Parcel(name="a", wait_ms=1.0),)))


def test_a_plan_belongs_to_its_problem() -> None:
    problem = ShelfProblem(length=9, parcels=(Parcel(name="a", wait_ms=1.0),))
    require_same_problem(problem, ShelfPlan(problem_digest=digest_of(problem), order=("a",)))
    require_same_problem(problem, ShelfPlan(problem_digest=None, order=("a",)))
    with pytest.raises(PlanMismatchError, match="plan again"):
        require_same_problem(problem, ShelfPlan(problem_digest="sha256:0", order=("a",)))
