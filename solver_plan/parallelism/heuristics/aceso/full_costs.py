"""The `full` cost model as Aceso's search sees it: stages by prefix sums, iterations by the formula of 1F1B.

The search compares by  (N - 1) * max t_i + sum t_i + what comes once an iteration;  the plans that it offers are
evaluated by playing their schedule.
"""

from collections.abc import Sequence

import numpy as np

from solver_plan.parallelism.check import ROUNDING_BYTES
from solver_plan.parallelism.choices import ChoiceCosts, Floats, MicroBatch
from solver_plan.parallelism.costs.full import (
    exposed_ms,
    optimizer_ms,
    state_bytes,
    traffic,
    with_sharded_weights,
)
from solver_plan.parallelism.costs.full_plan import shared_ms, stage_work
from solver_plan.parallelism.full_spans import choice_ring, shared_weights
from solver_plan.parallelism.heuristics.aceso.configuration import StageLayout
from solver_plan.parallelism.heuristics.aceso.recompute import GreedyRecompute, greedy_recompute, recompute_rules
from solver_plan.parallelism.heuristics.aceso.stage_costs import (
    CACHED_STAGES,
    Place,
    StageTrial,
    ideal_prefix,
    prefix,
)
from solver_plan.parallelism.problem import ParallelismProblem


class _ChoiceSums:
    """Prefix sums over the operators for one choice: entry x is the sum over operators before x."""

    def __init__(self, problem: ParallelismProblem, costs: ChoiceCosts) -> None:
        self.costs = costs
        self.ring = choice_ring(problem, costs)
        self.forward: Floats = np.where(np.isfinite(costs.forward_ms), costs.forward_ms, 0.0)
        self.workspace: Floats = costs.forward_reserved_bytes + costs.backward_reserved_bytes
        self.missing = prefix(~np.isfinite(costs.forward_ms))
        self.forward_ms = prefix(self.forward)
        self.backward_ms = prefix(costs.backward_ms)
        self.weight_bytes = prefix(costs.weight_bytes)
        self.held_bytes = prefix(costs.held_bytes)


class FullStageCosts:
    """The `full` cost model (`costs.full_plan`) for stages of the search."""

    def __init__(self, problem: ParallelismProblem, batches: Sequence[MicroBatch]) -> None:
        self.evaluations = 0
        self._problem = problem
        self._batches = batches
        self._limit = problem.cluster.usable_bytes_per_device
        self._rules = recompute_rules(problem)
        self._sums = [[_ChoiceSums(problem, costs) for costs in batch.choices] for batch in batches]
        self._ideal = [ideal_prefix(batch) for batch in batches]
        self._starts = prefix(np.array([operator.block_start for operator in problem.operators]))
        self._shared = shared_weights(problem)
        self._cache: dict[tuple[int, StageLayout, int, int, int], StageTrial | None] = {}

    def iteration_ms(self, size: int, stages: Sequence[StageTrial]) -> float:
        """Return (N - 1) * max t_i + sum t_i, and the most that a stage takes once an iteration."""
        times = [stage.time_ms for stage in stages]
        once = max(stage.once_ms for stage in stages)
        return (self._batches[size].count - 1) * max(times) + sum(times) + once

    def stage(self, size: int, layout: StageLayout, place: Place) -> StageTrial | None:
        """Return what a stage costs; None if a choice was not profiled."""
        key = (size, layout, place.behind, place.receives_over, place.sends_over)
        if key not in self._cache:
            if len(self._cache) >= CACHED_STAGES:
                self._cache.clear()
            self.evaluations += 1
            self._cache[key] = self._evaluate(size, layout, place)
        return self._cache[key]

    def least_ms(self, size: int, layout: StageLayout) -> float:
        """Return forward and backward of the operators."""
        (run,) = layout
        sums = self._sums[size][run.choice]
        forward, backward = (table[run.end] - table[run.first] for table in (sums.forward_ms, sums.backward_ms))
        return forward + backward

    def marks(self, size: int, layout: StageLayout, place: Place) -> tuple[bool, ...]:
        """Return the recomputed operators of a stage that `stage` costs."""
        (run,) = layout
        fixed, each = self._memory(size, layout)
        flights = self._flights(size, place)
        found = self._recompute(size, layout, flights, fixed + flights * each - self._limit)
        return (False,) * (run.end - run.first) if found is None else tuple(found.marks.tolist())

    def resharding_between(self, size: int, before: int, after: int, operator: int) -> float | None:
        """Return None: a stage has one layout."""
        return 0.0 if before == after else None

    def _flights(self, size: int, place: Place) -> int:
        return min(place.behind + 1, self._batches[size].count)

    def _weights(self, size: int, layout: StageLayout) -> float:
        (run,) = layout
        sums = self._sums[size][run.choice]
        weights = sums.weight_bytes[run.end] - sums.weight_bytes[run.first]
        for number, other in self._shared:
            if run.first <= other and number < run.end:
                weights -= float(sums.costs.weight_bytes[number])
        return weights

    def _memory(self, size: int, layout: StageLayout) -> tuple[float, float]:
        """Return the bytes that a stage has once, and those of a micro-batch in flight without recomputation."""
        (run,) = layout
        sums = self._sums[size][run.choice]
        work = stage_work(
            self._problem,
            forward_ms=0.0,
            backward_ms=0.0,
            weight_bytes=self._weights(size, layout),
            replicas=sums.ring,
            sharding=sums.costs.choice.sharding,
            blocks=int(self._starts[run.end] - self._starts[run.first]),
        )
        each = float(sums.costs.input_bytes[run.first]) + sums.held_bytes[run.end] - sums.held_bytes[run.first]
        return state_bytes(work) + float(sums.workspace[run.first : run.end].max()), each

    def _recompute(self, size: int, layout: StageLayout, flights: int, excess: float) -> GreedyRecompute | None:
        if excess <= 0:
            return None
        (run,) = layout
        held = self._sums[size][run.choice].costs.held_bytes[run.first : run.end]
        return greedy_recompute(self._rules, run.first, held, flights, excess)

    def _evaluate(self, size: int, layout: StageLayout, place: Place) -> StageTrial | None:
        (run,) = layout
        first, end = run.first, run.end
        sums = self._sums[size][run.choice]
        if sums.missing[end] > sums.missing[first]:
            return None
        fixed, each = self._memory(size, layout)
        flights = self._flights(size, place)
        memory = fixed + flights * each
        found = self._recompute(size, layout, flights, memory - self._limit)
        recompute = 0.0
        if found is not None:
            recompute = float(sums.forward[first:end][found.marks].sum())
            memory += found.peak_bytes - flights * found.saved_bytes
        forward = sums.forward_ms[end] - sums.forward_ms[first]
        backward = sums.backward_ms[end] - sums.backward_ms[first]
        work = stage_work(
            self._problem,
            forward_ms=forward,
            backward_ms=backward + recompute,
            weight_bytes=self._weights(size, layout),
            replicas=sums.ring,
            sharding=sums.costs.choice.sharding,
            blocks=int(self._starts[end] - self._starts[first]),
        )
        loaded = sum(with_sharded_weights(work))
        last = len(self._problem.operators)
        receive = float(sums.costs.receive_ms[place.receives_over][first]) if first > 0 else 0.0
        send = float(sums.costs.send_ms[place.sends_over][end - 1]) if end < last else 0.0
        sent, overlapped = traffic(work), self._problem.overlap.reduction
        pieces = work.pieces if overlapped else 1
        rate = self._problem.cluster.device_memory_bytes_per_s
        once = (
            exposed_ms(sent.reduction_ms, work.backward_ms * overlapped, pieces)
            + exposed_ms(sent.gather_ms, work.forward_ms * overlapped, pieces)
            + (0.0 if rate is None else optimizer_ms(work, rate))
        )
        for number, other in self._shared:
            if other < first <= number < end:
                once += shared_ms(
                    self._problem, float(sums.costs.weight_bytes[number]), self._problem.cluster.intra_node
                )
        devices = sums.costs.choice.devices
        return StageTrial(
            devices=devices,
            time_ms=loaded + (0.0 if self._problem.overlap.transfers else receive + send),
            memory_bytes=memory,
            fits=memory <= self._limit + ROUNDING_BYTES,
            busy_ms=loaded - recompute,
            recompute_ms=recompute,
            ideal_ms=(self._ideal[size][end] - self._ideal[size][first]) / devices,
            once_ms=once,
        )
