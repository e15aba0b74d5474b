"""Simulation of schedules, against the formula and its bounds."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, SupportsIndex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solver_plan.errors import InvalidPlanError
from solver_plan.parallelism.costs import StageCost
from solver_plan.parallelism.describe import describe
from solver_plan.parallelism.plan import ParallelismPlan, Schedule
from solver_plan.parallelism.schedule import ActionKind, Played, one_forward_one_backward, play
from solver_plan.parallelism.simulate import simulate
from tests.parallelism.problems import PER_MS, chain_of, plan_of, profile, stage

times = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=5)
fixed = settings(derandomize=True, database=None, max_examples=60, deadline=None)


def _cost(forward_ms: float, backward_ms: float) -> StageCost:
    return StageCost(
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        recompute_ms=0.0,
        communication_ms=0.0,
        weight_state_bytes=0.0,
        activation_bytes=0.0,
        peak_bytes=0.0,
        reserved_bytes=0.0,
    )


def _played(stage_times: Sequence[tuple[float, float]], micro_batches: int) -> list[Played]:
    count = len(stage_times)
    orders: list[list[tuple[int, ActionKind, int]]] = [
        [(number, kind, index) for kind, index in one_forward_one_backward(count, number, micro_batches)]
        for number in range(count)
    ]
    return play([_cost(*one).durations for one in stage_times], orders)


def _end(played: Sequence[Played]) -> float:
    return max(action.end_ms for action in played)


def test_the_order_of_1f1b() -> None:
    assert one_forward_one_backward(3, 2, 2) == [("F", 0), ("B", 0), ("F", 1), ("B", 1)]
    assert one_forward_one_backward(3, 0, 4) == [
        ("F", 0), ("F", 1), ("F", 2), ("B", 0), ("F", 3), ("B", 1), ("B", 2), ("B", 3)
    ]  # fmt: skip
    assert one_forward_one_backward(3, 0, 1) == [("F", 0), ("B", 0)]


@fixed
@given(st.integers(1, 8), st.integers(1, 12))
def test_1f1b_holds_as_many_micro_batches_as_stages_from_there_on(stages: int, micro_batches: int) -> None:
    for number in range(stages):
        order = one_forward_one_backward(stages, number, micro_batches)
        for wanted in "FB":
            assert [index for kind, index in order if kind == wanted] == list(range(micro_batches))
        held = list(itertools.accumulate(1 if kind == "F" else -1 for kind, _ in order))
        assert min(held) >= 0
        assert max(held) == min(stages - number, micro_batches)


@fixed
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 9), st.integers(1, 10))
def test_equal_stages_take_what_the_formula_says(stages: int, forward: int, backward: int, count: int) -> None:
    played = _played([(forward, backward)] * stages, count)
    assert _end(played) == pytest.approx((count - 1 + stages) * (forward + backward))


@fixed
@given(times, st.integers(1, 10))
def test_the_iteration_lies_between_its_bounds(stage_times: list[tuple[int, int]], count: int) -> None:
    """No stage begins before the forwards in front of it, and it is followed by the backwards in front of it."""
    end = _end(_played(stage_times, count))
    for number, (forward, backward) in enumerate(stage_times):
        before = stage_times[:number]
        assert end >= sum(f for f, _ in before) + count * (forward + backward) + sum(b for _, b in before) - 1e-9
    assert end >= sum(f + b for f, b in stage_times) - 1e-9
    assert end <= count * sum(f + b for f, b in stage_times) + 1e-9


@fixed
@given(times, st.integers(1, 8))
def test_what_is_played_is_a_schedule(stage_times: list[tuple[int, int]], count: int) -> None:
    played = _played(stage_times, count)
    last = len(stage_times) - 1
    at = {(action.stage, action.kind, action.micro_batch): action for action in played}
    assert len(at) == len(played) == 2 * count * len(stage_times)
    for (number, kind, index), action in at.items():
        assert action.end_ms - action.start_ms == pytest.approx(stage_times[number][kind == "B"])
        if kind == "F" and number > 0:
            assert action.start_ms >= at[number - 1, "F", index].end_ms
        if kind == "B":
            behind = at[number + 1, "B", index] if number < last else at[number, "F", index]
            assert action.start_ms >= behind.end_ms
    for number in range(len(stage_times)):
        own = sorted((a.start_ms, a.end_ms) for a in played if a.group == number)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(own))


def test_the_weight_gradient_may_wait() -> None:
    """Splitting the backward lets the stage before go on half a backward earlier."""
    costs = [_cost(1, 2), _cost(1, 2)]
    plain = play([cost.durations for cost in costs], [[(0, "F", 0), (0, "B", 0)], [(1, "F", 0), (1, "B", 0)]])
    split = play(
        [cost.durations for cost in costs],
        [[(0, "F", 0), (0, "I", 0), (0, "W", 0)], [(1, "F", 0), (1, "I", 0), (1, "W", 0)]],
    )
    assert (_end(plain), _end(split)) == (6.0, 5.0)


class Uncopied(list[tuple[int, ActionKind, int]]):
    """A list of actions that cannot be copied in part: doing so at every turn takes time quadratic in its length."""

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        assert not isinstance(index, slice)
        return super().__getitem__(index)


def test_long_lists_are_not_copied_at_every_turn() -> None:
    orders = [Uncopied([(stage, kind, at) for kind, at in one_forward_one_backward(2, stage, 50)]) for stage in (0, 1)]
    assert _end(play([_cost(1, 2).durations] * 2, orders)) == 3 * 51


def test_a_deadlock_names_who_waits() -> None:
    orders: list[list[tuple[int, ActionKind, int]]] = [[(0, "B", 0), (0, "F", 0)], [(1, "F", 0), (1, "B", 0)]]
    with pytest.raises(InvalidPlanError, match="deadlock, 0B0, 1F0 wait for each other"):
        play([_cost(1, 1).durations] * 2, orders)


def test_a_plan_is_played_with_its_transfers() -> None:
    problem = chain_of([[profile(input_bytes=3, output_bytes=3)]] * 2, devices=2, intra=PER_MS, inter=PER_MS)
    found = simulate(problem, plan_of(stage((0, 1), [0]), stage((1, 2), [1])))
    # every stage: 1 + 3 forward, 2 + 3 backward
    assert found.formula_ms == pytest.approx(3 * 9 + 18)
    assert found.iteration_ms == pytest.approx(45)
    assert found.busy_ms == pytest.approx((36, 36))
    assert found.groups == ((0,), (1,))


TWO_STAGES = plan_of(stage((0, 1), [0]), stage((1, 2), [1]))


@pytest.mark.parametrize(
    ("plan", "violation"),
    [
        (replace(TWO_STAGES, schedule=Schedule(orders=())), "schedule.orders: 0 lists"),
        (replace(TWO_STAGES, micro_batches=TWO_STAGES.micro_batches + 1), "are not the global batch"),
        (plan_of(stage((0, 1), [0], recompute=((0, 9),)), stage((1, 2), [1])), "recompute: \\[0, 9\\) overlaps"),
        (plan_of(stage((0, 1), [0]), stage((1, 2), [0])), "devices"),
    ],
    ids=["no orders", "batch", "recompute", "devices"],
)
def test_what_divides_nothing_is_not_played_but_shown(plan: ParallelismPlan, violation: str) -> None:
    problem = chain_of([[profile(input_bytes=3, output_bytes=3)]] * 2, devices=2, intra=PER_MS, inter=PER_MS)
    with pytest.raises(InvalidPlanError, match=violation):
        simulate(problem, plan)
    assert describe(plan, problem).startswith("micro-batch")
