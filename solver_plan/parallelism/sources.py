"""Where the stages of a stage graph come from: one layout for a stage, or one for each of its operators.

A source prices the stages of one micro-batch size: a lower bound for all of them at once, a better one for single
stages on demand, and stages that really fit.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from solver_plan.parallelism.choices import Choice, MicroBatch
from solver_plan.parallelism.drafts import DraftStage
from solver_plan.parallelism.mixed import MixedBound, MixedStages, cheapest_choices, options
from solver_plan.parallelism.mixed_search import MixedStage
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.parallelism.recomputation.shape import ChainShape
from solver_plan.parallelism.recomputation.stages import Side, StageRecomputation
from solver_plan.parallelism.stage_graph import INTER, INTRA
from solver_plan.parallelism.stage_table import RecomputationBound, RecomputationTables, SpanBound, Spans

StageKey = tuple[int, int, int, int]
"""(choice, first, end, behind)."""
Found = tuple[float, DraftStage | None]
"""What a stage takes beyond its operators' time, in ms, and the stage; infinite and None: none was found."""


class StageSource(Protocol):
    """Prices stages; what a stage takes beyond its operators' time is called *extra*."""

    batch: MicroBatch
    """The choices that the stage graph tells apart."""
    has_windows: bool
    """The bound can be used for blocks alone (`windows`)."""
    finds_all: bool
    """A stage that fits is found fast enough to ask for thousands of them."""

    def bound(self, choice: int, table: Spans) -> SpanBound:
        """Return the lower bound on the extra time of many stages."""

    def least(self, key: StageKey, need_bytes: float) -> float:
        """Return a lower bound on the extra time of one stage; infinite: it never fits."""

    def real(self, key: StageKey, need_bytes: float) -> Found:
        """Return a stage that fits."""

    def proven(self, key: StageKey) -> float:
        """Return a lower bound that the search for a stage that fits brought; it takes long to repeat."""

    def fits(self, key: StageKey, need_bytes: float) -> bool:
        """Return whether recomputation can lower the memory of a stage by so much."""

    def tuned(self, stages: Sequence[DraftStage]) -> list[DraftStage]:
        """Return the stages of a pipeline, made faster by what is known of the links between them."""


class UniformSource:
    """One layout for all operators of a stage; recomputation of any of them."""

    has_windows = True
    finds_all = True

    def __init__(
        self, problem: ParallelismProblem, shape: ChainShape, batch: MicroBatch, work: Callable[[float], None]
    ) -> None:
        self.batch = batch
        self._limit = problem.cluster.usable_bytes_per_device
        # how weights are sharded changes nothing in what recomputation saves and takes
        known: dict[Choice, tuple[RecomputationTables, StageRecomputation]] = {}
        for costs in batch.choices:
            lower, upper = (StageRecomputation(shape, costs, side, work) for side in (Side.LOWER, Side.UPPER))
            known.setdefault(replace(costs.choice, sharding=0), (RecomputationTables(lower), upper))
        pairs = [known[replace(costs.choice, sharding=0)] for costs in batch.choices]
        self._tables = [tables for tables, _ in pairs]
        self._lower = [tables.recomputation for tables in self._tables]
        self._upper = [upper for _, upper in pairs]
        self._least: dict[StageKey, tuple[float, tuple[bool, ...]]] = {}
        self._real: dict[StageKey, Found] = {}

    def bound(self, choice: int, table: Spans) -> SpanBound:
        """Return the lower bound on the recomputation of many stages."""
        return RecomputationBound(table, self._tables[choice], self._limit)

    def least(self, key: StageKey, need_bytes: float) -> float:
        """Return the least recomputation of a stage, exact but for what reaches across pieces."""
        return self._cheapest(key, need_bytes)[0]

    def _cheapest(self, key: StageKey, need_bytes: float) -> tuple[float, tuple[bool, ...]]:
        if key not in self._least:
            choice, first, end, behind = key
            found = self._lower[choice].cheapest(first, end, need_bytes, behind)
            self._least[key] = (np.inf, ()) if found is None else (found.time_ms, found.marks)
        return self._least[key]

    def fits(self, key: StageKey, need_bytes: float) -> bool:
        """Return whether recomputation can lower the memory of a stage by so much."""
        choice, first, end, behind = key
        found = self._lower[choice].cheapest(first, end, need_bytes, behind)
        if found is None or self._upper[choice].fits(first, end, need_bytes, behind, found.marks):
            return found is not None
        return self._upper[choice].cheapest(first, end, need_bytes, behind) is not None

    def real(self, key: StageKey, need_bytes: float) -> Found:
        """Return a stage with a recomputation that really fits."""
        if key not in self._real:
            choice, first, end, behind = key
            marks = self._cheapest(key, need_bytes)[1]
            if marks and not self._upper[choice].fits(first, end, need_bytes, behind, marks):
                found = self._upper[choice].cheapest(first, end, need_bytes, behind)
                marks = () if found is None else found.marks
            self._real[key] = (np.inf, None)
            if marks:
                costs = self.batch.choices[choice]
                extra_ms = float(costs.forward_ms[first:end] @ np.array(marks))
                self._real[key] = (extra_ms, DraftStage(first, end, (costs.choice,) * (end - first), marks))
        return self._real[key]

    def proven(self, key: StageKey) -> float:
        """Return 0: `least` tells all."""
        return 0.0

    def tuned(self, stages: Sequence[DraftStage]) -> list[DraftStage]:
        """Return the stages: their layouts are given."""
        return list(stages)


class MixedSource:
    """A layout for each operator; the stage graph tells numbers of devices apart."""

    has_windows = False
    finds_all = False

    def __init__(
        self, problem: ParallelismProblem, shape: ChainShape, batch: MicroBatch, work: Callable[[float], None]
    ) -> None:
        self.batch = cheapest_choices(batch)
        self._stages = [MixedStages(problem, shape, layouts, work) for layouts in options(problem, batch)]
        self._per_node = problem.cluster.devices_per_node
        self._real: dict[StageKey, Found] = {}
        self._tuned: dict[tuple[StageKey, tuple[int, int]], DraftStage | None] = {}
        """By (devices, first, end, behind) and the links before and behind."""

    def bound(self, choice: int, table: Spans) -> SpanBound:
        """Return the lower bound on resharding, recomputation and slower layouts of many stages."""
        return MixedBound(table, self._stages[choice])

    def least(self, key: StageKey, need_bytes: float) -> float:
        """Return the same bound for one stage."""
        choice, first, end, behind = key
        least_ms = self._stages[choice].least_ms(behind, np.array([first]), np.array([end]))
        return max(0.0, float(least_ms[0]) - self._busy_ms(choice, first, end))

    def proven(self, key: StageKey) -> float:
        """Return what the search for the stage proved."""
        choice, first, end, behind = key
        known = self._stages[choice].proven_ms.get((first, end, behind))
        return 0.0 if known is None else known - self._busy_ms(choice, first, end)

    def _busy_ms(self, choice: int, first: int, end: int) -> float:
        costs = self.batch.choices[choice]
        return float((costs.forward_ms + costs.backward_ms)[first:end].sum())

    def fits(self, key: StageKey, need_bytes: float) -> bool:
        """Return True: only the lower bound on the memory is known."""
        return True

    def real(self, key: StageKey, need_bytes: float) -> Found:
        """Return a stage that fits, found by shortest paths and single changes."""
        if key not in self._real:
            choice, first, end, behind = key
            stages = self._stages[choice]
            found = stages.find(first, end, behind)
            self._real[key] = (np.inf, None)
            if found is not None:
                self._real[key] = (found.time_ms - self._busy_ms(choice, first, end), _draft(stages, first, end, found))
        return self._real[key]

    def tuned(self, stages: Sequence[DraftStage]) -> list[DraftStage]:
        """Return the stages with layouts that suit the links before and behind them."""
        tuned = []
        for number, stage in enumerate(stages):
            place = (stage.devices, stage.first, stage.end, len(stages) - 1 - number)
            behind = stage.devices_behind or 0
            before = INTER if stage.first and (behind + stage.devices) % self._per_node == 0 else INTRA
            links = (before, INTRA if behind % self._per_node else INTER)
            if (place, links) not in self._tuned:
                source = next(one for one in self._stages if one.options.choices[0].devices == stage.devices)
                found = source.find(*place[1:], links)
                self._tuned[place, links] = None if found is None else _draft(source, stage.first, stage.end, found)
            best = self._tuned[place, links]
            tuned.append(stage if best is None else replace(best, devices_behind=stage.devices_behind))
        return tuned


def _draft(stages: MixedStages, first: int, end: int, found: MixedStage) -> DraftStage:
    return DraftStage(first, end, tuple(stages.options.choices[layout] for layout in found.layouts), found.marks)


def stage_source(
    problem: ParallelismProblem, shape: ChainShape, batch: MicroBatch, work: Callable[[float], None]
) -> StageSource:
    """Return the source of stages that the problem's space asks for."""
    mixed = problem.space.layout == "operator" and len({costs.choice.devices for costs in batch.choices}) < len(
        batch.choices
    )
    return MixedSource(problem, shape, batch, work) if mixed else UniformSource(problem, shape, batch, work)
