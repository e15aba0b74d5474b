"""Kinds: documents of two kinds do not go together, and every kind is complete."""

from pathlib import Path

import pytest

from benchmarks.parallelism import MEBIBYTE, chain
from benchmarks.registry import GROUPS
from solver_plan.errors import InputError
from solver_plan.kinds import KINDS, kind_named, plan_types, problem_types
from solver_plan.solving import Budget
from tests.shelf import SHELF, Parcel, ShelfPlan, ShelfProblem

PROBLEM = chain(Path(), blocks=1, devices=1, memory_bytes=1500 * MEBIBYTE, global_batch=1)
SHELF_PROBLEM = ShelfProblem(length=9, parcels=(Parcel(name="a", wait_ms=1.0),))
SHELF_PLAN = ShelfPlan(problem_digest=None, order=("a",))


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_complete(name: str) -> None:
    kind = kind_named(name)
    assert kind.name == name
    assert kind.heuristics
    assert name in problem_types()
    assert name in plan_types()
    assert name in GROUPS


def test_a_plan_of_another_kind_is_refused() -> None:
    with pytest.raises(InputError, match="the plan is of kind shelf, the problem of kind parallelism"):
        kind_named("parallelism").check(PROBLEM, SHELF_PLAN)
    with pytest.raises(InputError, match="the problem is of kind parallelism, the plan of kind shelf"):
        SHELF.describe(SHELF_PLAN, PROBLEM)


def test_a_heuristic_of_another_kind_is_refused() -> None:
    with pytest.raises(InputError, match="heuristic: found 'grid'; for shelf one of sorted, longest"):
        SHELF.plan(SHELF_PROBLEM, Budget(), heuristic="grid")
