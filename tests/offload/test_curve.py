"""Period over room, least room for a period, and the menu: against exhaustive search on small problems."""

import dataclasses
import itertools

import pytest

from solver_plan.errors import InfeasibleProblemError, InputError
from solver_plan.offload.check import violations
from solver_plan.offload.curve import MenuEntry, best_of_menu, least_room, period_over_room, problem_of
from solver_plan.offload.layers import equal_layers, problem_from_layers, with_room
from solver_plan.offload.operations import resident_bytes
from solver_plan.offload.plan import PLACES
from solver_plan.offload.planner import plan_offload
from solver_plan.solving.budget import Budget
from tests.offload.offload_cases import make_problem

BUDGET = Budget(time_limit_s=20.0, deterministic=True)
LAYERS = [(40, 1.0, 3.0), (10, 6.0, 14.0), (25, 3.0, 9.0), (30, 2.0, 3.0)]


def test_the_period_never_rises_with_the_room() -> None:
    problem = make_problem(LAYERS)
    points = period_over_room(problem, BUDGET, points=6)
    assert [point.gpu_state_bytes for point in points] == [0, 252, 504, 756, 1008, 1260]
    assert all(before.period_ms >= after.period_ms for before, after in itertools.pairwise(points))
    for point in points:
        assert point.bound_ms is not None
        assert point.bound_ms == pytest.approx(point.period_ms, rel=2e-6)
        assert point.plan.predicted.gpu_state_bytes <= point.gpu_state_bytes


def test_rooms_by_hand_and_bad_rooms() -> None:
    problem = make_problem(LAYERS)
    assert [point.gpu_state_bytes for point in period_over_room(problem, BUDGET, rooms=[300, 0])] == [0, 300]
    with pytest.raises(InputError, match="room"):
        period_over_room(problem, BUDGET, rooms=[-1])
    with pytest.raises(InputError, match="points"):
        period_over_room(problem, BUDGET, points=1)


@pytest.mark.parametrize("period_ms", [60.0, 75.0, 90.0, 200.0])
def test_the_least_room_is_the_least(period_ms: float) -> None:
    problem = make_problem(LAYERS)
    found = least_room(problem, period_ms, BUDGET)
    assert found.plan.predicted.period_ms <= period_ms * (1 + 1e-9)
    assert found.bound_bytes <= found.gpu_state_bytes
    assert (
        violations(with_room(problem, found.gpu_state_bytes), dataclasses.replace(found.plan, problem_digest=None))
        == ()
    )
    sums = {resident_bytes(problem, placement) for placement in itertools.product(PLACES[:2], repeat=4)}
    smaller = [room for room in sums if room < found.gpu_state_bytes]
    if smaller:
        plan = plan_offload(with_room(problem, max(smaller)), BUDGET).plan
        assert plan.certificate is not None
        assert plan.certificate.status == "optimal"
        assert plan.predicted.period_ms > period_ms


def test_a_period_that_no_room_gives_is_explained() -> None:
    with pytest.raises(InfeasibleProblemError, match="none takes less than") as caught:
        least_room(make_problem(LAYERS), 41.0, BUDGET)
    assert "ask for a longer period" in str(caught.value)
    with pytest.raises(InputError, match="period"):
        least_room(make_problem(LAYERS), 0.0, BUDGET)


def test_the_menu_weighs_room_against_recomputation() -> None:
    # recomputation costs a third more backward but leaves room for the two large layers
    problem = make_problem(LAYERS, rates=(500.0, 1e5, 2e4, 2e4))
    forward, backward = (1.0, 6.0, 3.0, 2.0), (3.0, 14.0, 9.0, 3.0)
    plain = MenuEntry(micro_batch=1, recomputation="none", gpu_state_bytes=0, forward_ms=forward, backward_ms=backward)
    longer = tuple(time * 4 / 3 for time in backward)
    spared = MenuEntry(
        micro_batch=1, recomputation="block", gpu_state_bytes=900, forward_ms=forward, backward_ms=longer
    )
    large = MenuEntry(
        micro_batch=2,
        recomputation="block",
        gpu_state_bytes=600,
        forward_ms=tuple(2 * time for time in forward),
        backward_ms=tuple(2 * time for time in longer),
    )
    menu = [plain, spared, large]
    found = best_of_menu(problem, menu, BUDGET)
    values = {
        entry: plan_offload(problem_of(problem, entry), BUDGET).plan.predicted.period_ms / entry.samples
        for entry in menu
    }
    assert values[found.entry] == min(values.values())
    assert found.ms_per_sample == pytest.approx(min(values.values()))
    assert found.bound_ms_per_sample is not None
    assert found.bound_ms_per_sample <= found.ms_per_sample
    assert violations(found.problem, found.plan) == ()


def test_bad_menus_are_refused() -> None:
    problem = make_problem(LAYERS)
    with pytest.raises(InputError, match="no entry"):
        best_of_menu(problem, [], BUDGET)
    short = MenuEntry(micro_batch=1, recomputation="none", gpu_state_bytes=0, forward_ms=(1.0,), backward_ms=(1.0,))
    with pytest.raises(InputError, match="4 layers"):
        best_of_menu(problem, [short], BUDGET)


def test_problems_from_lists_of_layers() -> None:
    problem = problem_from_layers(
        [*equal_layers(3, 300, 3.0, 6.0), ("head", 0, 1.0, 2.0)], make_problem().rates, gpu_state_bytes=10
    )
    assert [layer.parameters for layer in problem.layers] == [100, 100, 100, 0]
    assert problem.compute_ms == pytest.approx(12.0)
    with pytest.raises(InputError, match="layers"):
        equal_layers(0, 300, 3.0, 6.0)
