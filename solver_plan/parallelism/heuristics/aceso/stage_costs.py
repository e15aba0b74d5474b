"""What Aceso's search asks of a cost model, and Aceso's own behind it: prefix sums for each choice, and a cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from solver_plan.parallelism.check import ROUNDING_BYTES
from solver_plan.parallelism.choices import ChoiceCosts, Floats, MicroBatch
from solver_plan.parallelism.costs.links import transfer_ms
from solver_plan.parallelism.costs.resharding import resharding_ms
from solver_plan.parallelism.heuristics.aceso.configuration import StageLayout
from solver_plan.parallelism.heuristics.aceso.recompute import GreedyRecompute, greedy_recompute, recompute_rules
from solver_plan.parallelism.problem import Link, ParallelismProblem

INTRA, INTER = 0, 1
CACHED_STAGES = 200_000
"""The cache is emptied when it holds so many: about 100 MB."""


class Place(NamedTuple):
    """Where in the pipeline a stage lies."""

    behind: int
    """Stages behind it."""
    receives_over: int
    """`INTRA` or `INTER`: link from the stage before."""
    sends_over: int
    """Link to the stage behind."""
    first_device: int


@dataclass(frozen=True, slots=True)
class StageTrial:
    """Cost of one stage with its greedy recomputation."""

    devices: int
    time_ms: float
    """What the pipeline's formula takes of the stage."""
    memory_bytes: float
    fits: bool
    busy_ms: float
    """Forward and backward of the operators, without recomputation and communication between stages."""
    recompute_ms: float
    ideal_ms: float
    """What `busy_ms` would be if the devices shared the work of one device without loss."""
    once_ms: float = 0.0
    """What the stage takes once an iteration; `full` only."""


class StageCosts(Protocol):
    """A cost model as the search sees it."""

    evaluations: int
    """Stages evaluated so far, those found in a cache left out."""

    def stage(self, size: int, layout: StageLayout, place: Place) -> StageTrial | None:
        """Return what a stage costs; None if a choice was not profiled or a layout change is impossible."""

    def least_ms(self, size: int, layout: StageLayout) -> float:
        """Return a time that the stage takes at least, whatever it recomputes and communicates; cheap."""

    def marks(self, size: int, layout: StageLayout, place: Place) -> tuple[bool, ...]:
        """Return the recomputed operators of a stage that `stage` costs."""

    def resharding_between(self, size: int, before: int, after: int, operator: int) -> float | None:
        """Return the time of handing over to `operator` in choice `after` from its predecessor in choice `before`."""

    def iteration_ms(self, size: int, stages: Sequence[StageTrial]) -> float:
        """Return the time of an iteration."""


class _ChoiceSums:
    """Prefix sums over the operators for one choice: entry x is the sum over operators before x."""

    def __init__(self, costs: ChoiceCosts, resharding: Sequence[float | None]) -> None:
        self.costs = costs
        self.held: Floats = costs.held_bytes
        self.forward: Floats = np.where(np.isfinite(costs.forward_ms), costs.forward_ms, 0.0)
        self.missing = prefix(~np.isfinite(costs.forward_ms))
        self.busy_ms = prefix(self.forward + costs.backward_ms)
        self.weight_bytes = prefix(costs.weight_bytes)
        self.held_bytes = prefix(costs.held_bytes)
        self.resharding_ms = prefix(np.array([time or 0.0 for time in resharding]))
        self.impossible = prefix(np.array([time is None for time in resharding]))
        self.receive_ms: list[list[float]] = costs.receive_ms.tolist()
        self.send_ms: list[list[float]] = costs.send_ms.tolist()


class AcesoStageCosts:
    """Aceso's cost model (`costs.aceso`) for stages of the search."""

    def __init__(self, problem: ParallelismProblem, batches: Sequence[MicroBatch]) -> None:
        self.evaluations = 0
        self._problem = problem
        self._batches = batches
        self._limit = problem.cluster.usable_bytes_per_device
        self._rules = recompute_rules(problem)
        self._changes: dict[tuple[int, int, int, str, str], float | None] = {}
        self._sums = [self._size_sums(number) for number in range(len(batches))]
        self._ideal = [ideal_prefix(batch) for batch in batches]
        self._cache: dict[tuple[int, StageLayout, int, int, int], StageTrial | None] = {}

    def iteration_ms(self, size: int, stages: Sequence[StageTrial]) -> float:
        """Return (N - 1) * max t_i + sum t_i."""
        times = [stage.time_ms for stage in stages]
        return (self._batches[size].count - 1) * max(times) + sum(times)

    def stage(self, size: int, layout: StageLayout, place: Place) -> StageTrial | None:
        """Return what a stage costs; None if a choice was not profiled or a layout change is impossible."""
        key = (size, layout, place.behind, place.receives_over, place.sends_over)
        if key in self._cache:
            return self._cache[key]
        if len(self._cache) >= CACHED_STAGES:
            self._cache.clear()
        self.evaluations += 1
        trial = self._cache[key] = self._evaluate(size, layout, place)
        return trial

    def least_ms(self, size: int, layout: StageLayout) -> float:
        """Return forward and backward of the operators."""
        sums = self._sums[size]
        return sum(sums[run.choice].busy_ms[run.end] - sums[run.choice].busy_ms[run.first] for run in layout)

    def marks(self, size: int, layout: StageLayout, place: Place) -> tuple[bool, ...]:
        """Return the recomputed operators of a stage that `stage` costs."""
        excess = self._memory_bytes(size, layout, place) - self._limit
        found = self._recompute(size, layout, place, excess)
        return (False,) * (layout[-1].end - layout[0].first) if found is None else tuple(found.marks.tolist())

    def resharding_between(self, size: int, before: int, after: int, operator: int) -> float | None:
        """Return the time of handing over to `operator` in choice `after` from its predecessor in choice `before`."""
        problem, batch = self._problem, self._batches[size]
        operators = problem.operators
        key = (size, before, after, operators[operator - 1].profile, operators[operator].profile)
        if key not in self._changes:
            left, right = batch.choices[before].choice, batch.choices[after].choice
            produced = problem.profile_of(
                operator - 1, batch.size // left.data_parallel, left.tensor_parallel, left.partition
            )
            received = problem.profile_of(
                operator, batch.size // right.data_parallel, right.tensor_parallel, right.partition
            )
            time: float | None = None
            if produced is not None and received is not None:
                time = resharding_ms(
                    problem.resharding,
                    (produced.output_layout, left.tensor_parallel, left.data_parallel),
                    (received.input_layout, right.tensor_parallel, right.data_parallel),
                    received.input_bytes,
                )
            self._changes[key] = time
        return self._changes[key]

    def _size_sums(self, size: int) -> list[_ChoiceSums]:
        count = len(self._problem.operators)
        return [
            _ChoiceSums(costs, [0.0, *(self.resharding_between(size, number, number, x) for x in range(1, count))])
            for number, costs in enumerate(self._batches[size].choices)
        ]

    def _evaluate(self, size: int, layout: StageLayout, place: Place) -> StageTrial | None:
        sums = self._sums[size]
        busy = resharding = 0.0
        for number, run in enumerate(layout):
            table = sums[run.choice]
            first, end = run.first, run.end
            if table.missing[end] > table.missing[first] or table.impossible[end] > table.impossible[first + 1]:
                return None
            busy += table.busy_ms[end] - table.busy_ms[first]
            resharding += table.resharding_ms[end] - table.resharding_ms[first + 1]
            if number:
                change = self.resharding_between(size, layout[number - 1].choice, run.choice, first)
                if change is None:
                    return None
                resharding += change
        memory = self._memory_bytes(size, layout, place)
        recomputed = self._recompute(size, layout, place, memory - self._limit)
        recompute = 0.0
        if recomputed is not None:
            forward = _joined([sums[run.choice].forward[run.first : run.end] for run in layout])
            recompute = float(forward[recomputed.marks].sum())
            memory += recomputed.peak_bytes - (place.behind + 1) * recomputed.saved_bytes
        first, end = layout[0].first, layout[-1].end
        devices = sums[layout[0].choice].costs.choice.devices
        receive = sums[layout[0].choice].receive_ms[place.receives_over][first]
        return StageTrial(
            devices=devices,
            time_ms=busy + recompute + resharding + receive + self._send_ms(size, layout, place),
            memory_bytes=memory,
            fits=memory <= self._limit + ROUNDING_BYTES,
            busy_ms=busy + resharding,
            recompute_ms=recompute,
            ideal_ms=(self._ideal[size][end] - self._ideal[size][first]) / devices,
        )

    def _memory_bytes(self, size: int, layout: StageLayout, place: Place) -> float:
        """Return the memory of a stage without recomputation."""
        weights = held = forward = backward = 0.0
        stop = layout[-1].end - 1
        for run in layout:
            table = self._sums[size][run.choice]
            weights += table.weight_bytes[run.end] - table.weight_bytes[run.first]
            held += table.held_bytes[run.end] - table.held_bytes[run.first]
            end = min(run.end, stop)
            if end > run.first:
                forward = max(forward, float(table.costs.forward_reserved_bytes[run.first : end].max()))
                backward = max(backward, float(table.costs.backward_reserved_bytes[run.first : end].max()))
        received = float(self._sums[size][layout[0].choice].costs.input_bytes[layout[0].first])
        return (
            weights * self._problem.state_bytes_per_weight_byte
            + (place.behind + 1) * (received + held)
            + max(forward + backward, weights)
        )

    def _recompute(self, size: int, layout: StageLayout, place: Place, excess: float) -> GreedyRecompute | None:
        if excess <= 0:
            return None
        held = _joined([self._sums[size][run.choice].held[run.first : run.end] for run in layout])
        return greedy_recompute(self._rules, layout[0].first, held, place.behind + 1, excess)

    def _send_ms(self, size: int, layout: StageLayout, place: Place) -> float:
        """Return the time to send the output, whose size Aceso reads at the first operator's degree."""
        sums = self._sums[size]
        last = sums[layout[-1].choice]
        usual = last.send_ms[place.sends_over][layout[-1].end - 1]
        degree = sums[layout[0].choice].costs.choice.tensor_parallel
        if degree == last.costs.choice.tensor_parallel:
            return usual
        choice = last.costs.choice
        other = self._problem.profile_of(
            layout[-1].end - 1, self._batches[size].size // choice.data_parallel, degree, choice.partition
        )
        cluster = self._problem.cluster
        link: Link = cluster.inter_node if place.sends_over == INTER else cluster.intra_node
        return usual if other is None else transfer_ms(other.output_bytes, link)


def ideal_prefix(batch: MicroBatch) -> list[float]:
    """Prefix sums of the time of each operator on one device; where that was not measured, the least device time."""
    busy = np.stack([costs.forward_ms + costs.backward_ms for costs in batch.choices])
    devices = np.array([costs.choice.devices for costs in batch.choices])
    ideal = (busy * devices[:, None]).min(axis=0)
    for number, costs in enumerate(batch.choices):
        if costs.choice.devices == 1:
            ideal = np.where(np.isfinite(busy[number]), busy[number], ideal)
            break
    return prefix(np.where(np.isfinite(ideal), ideal, 0.0))


def prefix(values: Floats) -> list[float]:
    """Return prefix sums as a list: single entries of lists are read faster than those of arrays."""
    sums: list[float] = np.concatenate([np.zeros(1), np.cumsum(values)]).tolist()
    return sums


def _joined(parts: list[Floats]) -> Floats:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
