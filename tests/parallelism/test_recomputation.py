"""Least recomputation of a stage, and its bounds, against every set of recomputed operators."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from solver_plan.parallelism.blocks import block_ranges
from solver_plan.parallelism.choices import ChoiceCosts, micro_batch
from solver_plan.parallelism.costs.recompute import saved_and_peak
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.parallelism.recomputation import exact
from solver_plan.parallelism.recomputation.exact import TooManyLabelsError, least_recomputation
from solver_plan.parallelism.recomputation.fronts import pareto, sum_of
from solver_plan.parallelism.recomputation.patterns import masks
from solver_plan.parallelism.recomputation.shape import chain_shape
from solver_plan.parallelism.recomputation.stages import StageRecomputation
from solver_plan.parallelism.stage_table import RecomputationBound, RecomputationTables, spans
from tests.parallelism.exhaustive import marks_of
from tests.parallelism.problems import random_problem

ROUNDING = 1e-3


@dataclass(frozen=True)
class SmallStage:
    """A stage of a random chain, and what every set of recomputed operators does to it."""

    recomputation: StageRecomputation
    costs: ChoiceCosts
    problem: ParallelismProblem
    first: int
    end: int
    behind: int
    options: list[tuple[float, float]]
    """(memory taken off, time) of each set."""

    def least_ms(self, need_bytes: float) -> float | None:
        return min((time for relief, time in self.options if relief >= need_bytes - ROUNDING), default=None)

    def needs(self) -> list[float]:
        """Return needs that are met exactly, met just not, and met by nothing."""
        reliefs = sorted({relief for relief, _ in self.options if relief > 0})
        few = reliefs[:: max(1, len(reliefs) // 12)] + reliefs[-1:]
        return [1.0, *few, *(relief + 1 for relief in few)]


def small_stages(count: int, rule: str = "operator", offset: int = 0) -> Iterator[SmallStage]:
    for seed in range(offset, offset + count):
        chance = random.Random(seed)
        problem = random_problem(seed, most_operators=9)
        problem = replace(problem, space=replace(problem.space, recompute=rule))  # type: ignore[arg-type]
        costs = micro_batch(problem, 2).choices[0]
        first = chance.randrange(len(problem.operators) - 1)
        end = chance.randint(first + 1, len(problem.operators))
        if not np.isfinite(costs.forward_ms[first:end]).all():
            continue
        behind = chance.randint(0, 3)
        operators, options = problem.operators[first:end], []
        for marks in marks_of(problem, first, end):
            saved, peak = saved_and_peak(
                marks,
                costs.held_bytes[first:end].tolist(),
                [operator.block_start for operator in operators],
                [operator.activation_factor != 1 for operator in operators],
            )
            time = float(costs.forward_ms[first:end][list(marks)].sum())
            options.append(((behind + 1) * saved - peak, time))
        recomputation = StageRecomputation(chain_shape(problem, block_ranges(problem)), costs)
        yield SmallStage(recomputation, costs, problem, first, end, behind, options)


@pytest.mark.parametrize("rule", ["operator", "block"])
def test_the_least_recomputation_is_that_of_every_set(rule: str) -> None:
    compared = 0
    for stage in small_stages(150, rule):
        for need in stage.needs():
            found = stage.recomputation.cheapest(stage.first, stage.end, need, stage.behind)
            least = stage.least_ms(need)
            assert (found is None) == (least is None)
            if found is not None:
                assert found.time_ms == pytest.approx(least)
                assert stage.recomputation.fits(stage.first, stage.end, need, stage.behind, found.marks)
                compared += 1
    assert compared > 200


def test_nothing_is_recomputed_where_it_is_not_needed_or_not_allowed() -> None:
    for stage in small_stages(10):
        found = stage.recomputation.cheapest(stage.first, stage.end, 0.0, stage.behind)
        assert found is not None
        assert (found.time_ms, set(found.marks)) == (0.0, {False})
    for stage in small_stages(10, "none"):
        assert stage.recomputation.cheapest(stage.first, stage.end, 1.0, stage.behind) is None


def test_the_bounds_hold_for_every_stage() -> None:
    """The bound of a span never exceeds its least recomputation, and the most saved never falls short of the most."""
    positive = 0
    for stage in small_stages(120, offset=1000):
        everywhere = np.ones(len(stage.problem.operators) + 1, dtype=np.bool_)
        table = spans(stage.costs, stage.problem.state_bytes_per_weight_byte, np.inf, everywhere)
        at = np.flatnonzero((table.first == stage.first) & (table.end == stage.end))
        without = float(table.fixed_bytes[at[0]] + (stage.behind + 1) * table.input_and_held_bytes[at[0]])
        for need in stage.needs():
            bound = RecomputationBound(table, RecomputationTables(stage.recomputation), 0)
            bound._limit = without - need  # type: ignore[assignment]
            least = stage.least_ms(need)
            value = float(bound.milliseconds(stage.behind, at)[0])
            assert least is None or value <= least + 1e-9
            positive += value > 0
            assert float(bound.most_saved_bytes(stage.behind, at)[0]) >= max(r for r, _ in stage.options) - ROUNDING
    assert positive > 100  # a bound of nothing would hold too


def test_a_segment_that_runs_on_into_the_next_block_counts() -> None:
    """Two blocks of two operators that hold 1 each: a block alone brings back 1, with the next one behind it 2."""
    starts, shares = [True, False] * 2, [False] * 4
    assert saved_and_peak([True, True, False, False], [1.0] * 4, starts, shares) == (1.0, 1.0)
    assert saved_and_peak([True] * 4, [1.0] * 4, starts, shares) == (2.0, 2.0)
    least = [
        least_recomputation([1.0] * 4, [1.0] * 4, starts, shares, need_bytes=need, in_flight=3) for need in (2, 3, 4, 5)
    ]
    assert least == [(2.0, (True, True, False, False)), *[(4.0, (True,) * 4)] * 2, None]


def test_a_segment_that_never_closes_does_not_count() -> None:
    """Past a shared buffer right before the stage's end the segment stays open: nothing is brought back, it is said."""
    assert saved_and_peak([True] * 3, [2.0, 3.0, 9.0], [True, False, False], [False, True, False]) == (5.0, 0.0)
    arguments = ([1.0] * 3, [2.0, 3.0, 9.0], [True, False, False])
    assert least_recomputation(*arguments, [False, True, False], need_bytes=5.0, in_flight=1) == (3.0, (True,) * 3)
    assert least_recomputation(*arguments, [False] * 3, need_bytes=5.0, in_flight=1) is None


def test_a_long_stage_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "MOST_LABELS", 10)
    chance = random.Random(1)
    values = [chance.uniform(1, 2) for _ in range(12)]
    with pytest.raises(TooManyLabelsError):
        least_recomputation(values, values[::-1], [False] * 12, [False] * 12, need_bytes=1.0, in_flight=2)


def test_patterns_have_no_run_of_one() -> None:
    assert [row.tolist() for row in masks(3)] == [
        [True, True, True],
        [True, True, False],
        [False, True, True],
        [False] * 3,
    ]
    assert [len(masks(count)) for count in range(1, 7)] == [1, 2, 4, 7, 12, 21]


def test_fronts() -> None:
    time, saved = np.array([0.0, 1.0, 2.0, 2.0, 3.0, 5.0]), np.array([0.0, 3.0, 2.0, 4.0, 4.0, 9.0])
    index = np.arange(6)
    front = pareto(time, saved, index, index)
    assert front.left.tolist() == [0, 1, 3, 5]
    least, point = front.cheapest(np.array([0.0, 3.5, 9.0, 9.5]))
    assert least.tolist() == [0.0, 2.0, 5.0, np.inf]
    assert point.tolist() == [0, 2, 3, -1]
    both = sum_of(front, front)
    reached = {(t, s) for t, s in zip(both.time_ms.tolist(), both.saved_bytes.tolist(), strict=True)}
    sums = [(a + b, x + y) for a, x in zip(time, saved, strict=True) for b, y in zip(time, saved, strict=True)]
    for t, s in sums:
        assert any(u <= t and v >= s for u, v in reached)
    assert reached <= set(sums)
