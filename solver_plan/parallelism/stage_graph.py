"""The graph of all pipelines at one micro-batch size, pruned by bounds.

Nodes     (s, x, u): a cut before operator x with s stages and u devices behind it
Arcs      (s, x, u) ← stage [a, x) with choice c on g devices ← (s + 1, a, u + g)
Pipelines paths from (p, 0, all devices) to (0, operators, 0)
Objective (N - 1) * max + sum of the arcs' times on the path

Every arc carries a lower bound on its stage's time; an arc is dropped when no path through it can beat the cutoff:

    (N - 1) * max(behind_max, time, front_max) + behind_sum + time + front_sum > cutoff          under `aceso`

with potentials of both sides: first the exact ones behind it and work bounds in front (`_sweep_back`), then the exact
ones in front (`through`). The sum and the maximum are minimised separately, so potentials are lower bounds. Under
`full` a bound on 1F1B takes the maximum's place (`pipeline_value`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from solver_plan.parallelism.choices import Bools, ChoiceCosts, Floats, MicroBatch
from solver_plan.parallelism.full_spans import full_spans
from solver_plan.parallelism.pipeline_value import OneForwardOneBackward, PipelineValue, SlowestAndSum, StageTimes
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.parallelism.recomputation.shape import ChainShape
from solver_plan.parallelism.stage_table import SpanBound, Spans, spans

Integers = NDArray[np.int64]
INTRA, INTER = 0, 1
SPAN_COST_S = 5e-7
"""Deterministic seconds that the bound of one stage, with a number of stages behind it, counts."""


@dataclass(frozen=True, slots=True, eq=False)
class Arcs:
    """Stages that may be part of a pipeline below the cutoff; arrays have shape (arcs,)."""

    behind: Integers
    """Stages behind."""
    devices_behind: Integers
    """In the graph's units."""
    choice: Integers
    """Index into the micro-batch's choices."""
    first: Integers
    end: Integers
    transfer_ms: Floats
    busy_ms: Floats
    recompute_ms: Floats
    """Lower bound, or exact."""
    forward_ms: Floats
    """Of `transfer_ms` and `busy_ms`, the part in forwards."""
    once_ms: Floats
    """What the stage takes once an iteration; `full` only."""
    arrive_ms: Floats
    """Transfer of the input where it overlaps computation, and is no part of `transfer_ms`; `full` only."""
    leave_ms: Floats
    """The same of the output's gradient."""

    def times(self, at: Bools | Integers | list[int] | slice = slice(None)) -> StageTimes:
        """Return what the value of a pipeline depends on, of all arcs or some."""
        return StageTimes(
            self.time_ms[at], self.forward_ms[at], self.once_ms[at], self.arrive_ms[at], self.leave_ms[at]
        )

    @property
    def time_ms(self) -> Floats:
        """Lower bound of the stage's time, or the exact one."""
        return self.transfer_ms + self.busy_ms + self.recompute_ms

    def __len__(self) -> int:
        return len(self.behind)

    def select(self, keep: Bools | Integers) -> "Arcs":
        """Return some of the arcs."""
        return Arcs(*(getattr(self, field.name)[keep] for field in fields(self)))

    def with_recompute(self, recompute_ms: Floats) -> "Arcs":
        """Return the arcs with other recomputation times."""
        return replace(self, recompute_ms=recompute_ms)


@dataclass(frozen=True, slots=True, eq=False)
class ChoiceTable:
    """The stages of one choice and what their bounds need."""

    costs: ChoiceCosts
    spans: Spans
    """Ordered by end, then first."""
    bound: SpanBound
    end_offset: Integers
    """(operators + 2,): the spans that end at x are [end_offset[x], end_offset[x + 1])."""


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Stages of one choice in front of one number of stages and devices."""

    behind: int
    choice: int
    devices_behind: int
    spans: Integers
    """Indices into the choice's spans."""
    recompute_ms: Floats
    stage: StageTimes


class StageGraph:
    """All pipelines of one micro-batch size below a cutoff."""

    def __init__(
        self,
        problem: ParallelismProblem,
        shape: ChainShape,
        batch: MicroBatch,
        bound: Callable[[int, Spans], SpanBound],
        cutoff_ms: float,
        cuts: Bools,
        work: Callable[[float], None] = lambda deterministic_seconds: None,
        *,
        any_order: bool = False,
    ) -> None:
        """Build the tables of all stages.

        `any_order` is a relaxation for devices out of rank order: devices are only counted, and every edge has the
        faster link.

        `bound` gives, for a choice and its stages, the lower bound on what they take beyond their operators' time;
        `work` is told the deterministic seconds that were spent, and may raise to end a long computation.
        """
        self._work = work
        self._bound = bound
        self._any_order = any_order
        self.problem = problem
        self.batch = batch
        self._cutoff = cutoff_ms
        self._shape = shape
        self.unit = self.unit_of(problem, batch)
        self.devices = problem.cluster.devices // self.unit
        """In units: every stage has whole ones."""
        self._per_node = problem.cluster.devices_per_node
        self._most_stages = min(problem.space.max_stages or self.devices, self.devices // int(self.device_counts.min()))
        self._full = problem.cost_model == "full"
        self._hidden_transfers = self._full and problem.overlap.transfers
        self._pipeline: PipelineValue = (
            OneForwardOneBackward(batch.count) if self._full else SlowestAndSum(batch.count - 1)
        )
        self._front_device_ms, self._front_ms = self._work_bounds()
        longest = cutoff_ms / batch.count
        self._tables = [self._table(number, costs, longest, cuts) for number, costs in enumerate(batch.choices)]

    @staticmethod
    def unit_of(problem: ParallelismProblem, batch: MicroBatch) -> int:
        """Return of how many devices all stages have multiples; 1 where devices may be idle, which may lie anywhere."""
        unit = math.gcd(*(costs.choice.devices for costs in batch.choices))
        return unit if problem.space.use_all_devices and problem.cluster.devices % unit == 0 else 1

    def _table(self, number: int, costs: ChoiceCosts, longest: float, cuts: Bools) -> ChoiceTable:
        by_first = self._spans(costs, longest, cuts)
        ordered = by_first.select(np.lexsort((by_first.first, by_first.end)))
        offset = np.searchsorted(ordered.end, np.arange(self.positions + 2))
        return ChoiceTable(costs, ordered, self._bound(number, ordered), offset)

    def _spans(self, costs: ChoiceCosts, longest: float, cuts: Bools) -> Spans:
        if self._full:
            return full_spans(self.problem, costs, longest, cuts, widened=self._widened)
        return spans(costs, self.problem.state_bytes_per_weight_byte, longest, cuts)

    def held_behind(self, behind: int) -> int:
        """Return the number of stages behind that the memory of a stage counts: no more than micro-batches less one.

        Aceso's model counts all of them, however few micro-batches there are.
        """
        return min(behind, self.batch.count - 1) if self._full else behind

    def _work_bounds(self) -> tuple[Floats, Floats]:
        """Return the least device time and the least time of the operators in front of each cut."""
        busy = np.stack([costs.forward_ms + costs.backward_ms for costs in self.batch.choices])
        device_ms = (busy * self.device_counts[:, None]).min(axis=0)
        total_ms = np.concatenate([np.zeros(1), np.cumsum(busy.min(axis=0))])
        return np.concatenate([np.zeros(1), np.cumsum(device_ms)]), total_ms

    @property
    def positions(self) -> int:
        """Number of places, beside the end, where a stage may be cut."""
        return len(self._shape.classes)

    @property
    def _widened(self) -> bool:
        """Whether spans stand for all stages that hold them."""
        return False

    @property
    def _cut_at_0(self) -> bool:
        """Whether other stages may lie before one that begins at position 0."""
        return False

    def arcs(self) -> Arcs:
        """Return the arcs that survive the cutoff."""
        behind_max, behind_sum, found = self._sweep_back()
        return self.prune(found, self._cutoff, (behind_max, behind_sum))

    def _placements(self, devices: int) -> Iterator[int]:
        """Yield the numbers of devices behind a stage of so many that let it lie as the space demands."""
        for behind in range(self.devices - devices + 1):
            begin, end = behind * self.unit, (behind + devices) * self.unit
            crosses = begin // self._per_node != (end - 1) // self._per_node
            whole = not self._full or (begin % self._per_node == 0 and end % self._per_node == 0)
            if not crosses or self._any_order or (self.problem.space.cross_node_stages and whole):
                yield behind

    def _edge(self, devices_behind: int) -> int:
        return INTER if devices_behind * self.unit % self._per_node == 0 else INTRA

    def _sweep_back(self) -> tuple[list[Floats], list[Floats], Arcs]:
        """Return the least maximum and sum behind each node, shape (operators + 1, devices + 1) per s, and the arcs."""
        shape = (self.positions + 1, self.devices + 1)
        start_max, start_sum = np.full(shape, np.inf), np.full(shape, np.inf)
        start_max[self.positions, 0] = start_sum[self.positions, 0] = 0.0
        if not self.problem.space.use_all_devices:
            start_max[self.positions, :] = start_sum[self.positions, :] = 0.0
        maxima, sums = [start_max], [start_sum]
        parts: list[_Part] = []
        for s in range(self._most_stages):
            next_max, next_sum = np.full(shape, np.inf), np.full(shape, np.inf)
            if not np.isfinite(maxima[s]).any():
                break
            for number, table in enumerate(self._tables):
                parts.extend(self._extend(s, number, table, maxima[s], sums[s], next_max, next_sum))
            if not self.problem.space.use_all_devices:
                np.minimum.accumulate(next_max, axis=1, out=next_max)
                np.minimum.accumulate(next_sum, axis=1, out=next_sum)
            maxima.append(next_max)
            sums.append(next_sum)
        return maxima, sums, self._collect(parts)

    def _extend(
        self,
        s: int,
        number: int,
        table: ChoiceTable,
        maximum: Floats,
        total: Floats,
        next_max: Floats,
        next_sum: Floats,
    ) -> Iterator[_Part]:
        """Put every stage of one choice before the nodes with s stages behind; yield those below the cutoff."""
        devices = int(self.device_counts[number])
        placements = [u for u in self._placements(devices) if np.isfinite(maximum[:, u]).any()]
        if not placements:
            return
        found = [self._within_cutoff(s, u, table, maximum, total) for u in placements]
        wanted = np.unique(np.concatenate(found))
        if not len(wanted):
            return
        self._work(SPAN_COST_S * (len(wanted) + len(table.spans.end) * len(placements) / 16))
        extra = np.full(len(table.spans.end), np.inf)
        extra[wanted] = self._variable_part(table, s, wanted)
        for u, spans_of in zip(placements, found, strict=True):
            stage, value = self._through(s, u, table, maximum, total, spans_of, extra[spans_of])
            keep = np.flatnonzero(np.isfinite(value) & (value <= self._cutoff))
            if not len(keep):
                continue
            kept, stage = spans_of[keep], stage.select(keep)
            first, end = table.spans.first[kept], table.spans.end[kept]
            behind = self._pipeline.behind(stage, s, maximum[end, u], total[end, u])
            np.minimum.at(next_max[:, u + devices], first, behind)
            np.minimum.at(next_sum[:, u + devices], first, stage.through_ms + total[end, u])
            yield _Part(s, number, u, kept, extra[kept], stage)

    def _within_cutoff(self, s: int, u: int, table: ChoiceTable, maximum: Floats, total: Floats) -> Integers:
        """Return the spans that may come before the nodes with s stages and u devices behind if nothing is extra."""
        ends = np.flatnonzero(np.isfinite(maximum[:, u]))
        spans_of = np.arange(table.end_offset[ends[0]], table.end_offset[ends[-1] + 1])
        _, value = self._through(s, u, table, maximum, total, spans_of, np.zeros(len(spans_of)))
        return np.asarray(spans_of[np.isfinite(value) & (value <= self._cutoff)])

    def _through(
        self, s: int, u: int, table: ChoiceTable, maximum: Floats, total: Floats, spans_of: Integers, extra: Floats
    ) -> tuple[StageTimes, Floats]:
        """Return the times of spans, and a bound on the pipelines through each (infinite: there is none)."""
        devices = table.costs.choice.devices // self.unit
        first, end = table.spans.first[spans_of], table.spans.end[spans_of]
        receive, send = self._transfers(table.costs, s, u, devices, first, end)
        time = self._constant_part(table)[spans_of] + extra
        forward, once = table.spans.forward_ms[spans_of], table.spans.once_ms[spans_of]
        if self._hidden_transfers:
            stage = StageTimes(time, forward, once, receive, send)
        else:
            nothing = np.zeros(len(first))
            stage = StageTimes(time + receive + send, forward + receive, once, nothing, nothing)
        left = self.devices - u - devices
        complete = left == 0 or not self.problem.space.use_all_devices
        reachable = np.where(first == 0, complete or (left > 0 and self._cut_at_0), left > 0)
        value = self._pipeline.through(
            stage,
            s,
            maximum[end, u],
            total[end, u],
            self._pipeline.least_front(self._front_device_ms[first] / max(left, 1)),
            self._front_ms[first],
        )
        return stage, np.where(reachable, value, np.inf)

    def _constant_part(self, table: "ChoiceTable") -> Floats:
        return table.spans.busy_ms

    def _variable_part(self, table: "ChoiceTable", behind: int, candidates: Integers) -> Floats:
        return table.bound.milliseconds(self.held_behind(behind), candidates)

    def _transfers(
        self, costs: ChoiceCosts, s: int, u: int, devices: int, first: Integers, end: Integers
    ) -> tuple[Floats, Floats]:
        """Return the times of receiving the input and of sending the output, or receiving its gradient."""
        if self._any_order:
            receive, send = costs.receive_ms.min(axis=0)[first], costs.send_ms.min(axis=0)[end - 1]
        else:
            send = costs.send_ms[INTER if s == 0 else self._edge(u)][end - 1]
            before = self._edge(u + devices)
            receive = np.where(first == 0, costs.receive_ms[INTRA][first], costs.receive_ms[before][first])
        if self._full:  # nothing comes from before the first stage, nothing goes behind the last
            receive = np.where(first == 0, 0.0, receive)
            send = np.where(end == self.positions, 0.0, send)
        return receive, send

    def _collect(self, parts: list[_Part]) -> Arcs:
        if not parts:
            none, nothing = np.empty(0, dtype=np.int64), np.empty(0)
            return Arcs(none, none, none, none, none, *[nothing] * 7)
        sizes = [len(part.spans) for part in parts]
        tables = [self._tables[part.choice] for part in parts]
        of = list(zip(tables, parts, strict=True))
        return Arcs(
            behind=np.repeat([part.behind for part in parts], sizes),
            devices_behind=np.repeat([part.devices_behind for part in parts], sizes),
            choice=np.repeat([part.choice for part in parts], sizes),
            first=np.concatenate([table.spans.first[part.spans] for table, part in of]),
            end=np.concatenate([table.spans.end[part.spans] for table, part in of]),
            transfer_ms=np.concatenate(
                [part.stage.time_ms - self._constant_part(table)[part.spans] - part.recompute_ms for table, part in of]
            ),
            busy_ms=np.concatenate([self._constant_part(table)[part.spans] for table, part in of]),
            recompute_ms=np.concatenate([part.recompute_ms for part in parts]),
            forward_ms=np.concatenate([part.stage.forward_ms for part in parts]),
            once_ms=np.concatenate([part.stage.once_ms for part in parts]),
            arrive_ms=np.concatenate([part.stage.arrive_ms for part in parts]),
            leave_ms=np.concatenate([part.stage.leave_ms for part in parts]),
        )

    # -- pruning a list of arcs ---------------------------------------------------------------------------------

    def potentials_behind(self, arcs: Arcs, pipeline: PipelineValue | None = None) -> tuple[list[Floats], list[Floats]]:
        """Return the least value and sum behind each node over the arcs."""
        pipeline = pipeline or self._pipeline
        shape = (self.positions + 1, self.devices + 1)
        most = int(arcs.behind.max(initial=-1)) + 1
        maxima = [np.full(shape, np.inf) for _ in range(most + 1)]
        sums = [np.full(shape, np.inf) for _ in range(most + 1)]
        maxima[0][self.positions, 0] = sums[0][self.positions, 0] = 0.0
        free = not self.problem.space.use_all_devices
        if free:
            maxima[0][self.positions, :] = sums[0][self.positions, :] = 0.0
        times, counts = arcs.times(), self.device_counts[arcs.choice]
        for s in range(most):
            at = np.flatnonzero(arcs.behind == s)
            e, u, a = arcs.end[at], arcs.devices_behind[at], arcs.first[at]
            stage = times.select(at)
            value = pipeline.behind(stage, s, maxima[s][e, u], sums[s][e, u])
            np.minimum.at(maxima[s + 1], (a, u + counts[at]), value)
            np.minimum.at(sums[s + 1], (a, u + counts[at]), stage.through_ms + sums[s][e, u])
            if free:
                np.minimum.accumulate(maxima[s + 1], axis=1, out=maxima[s + 1])
                np.minimum.accumulate(sums[s + 1], axis=1, out=sums[s + 1])
        return maxima, sums

    def potentials_front(self, arcs: Arcs) -> tuple[list[Floats], list[Floats]]:
        """Return the least value and sum in front of each node over the arcs."""
        shape = (self.positions + 1, self.devices + 1)
        most = int(arcs.behind.max(initial=-1)) + 1
        maxima = [np.full(shape, np.inf) for _ in range(most + 1)]
        sums = [np.full(shape, np.inf) for _ in range(most + 1)]
        times, counts = arcs.times(), self.device_counts[arcs.choice]
        free = not self.problem.space.use_all_devices
        for s in range(most, 0, -1):
            maxima[s][0, self.devices] = sums[s][0, self.devices] = 0.0
            if free:
                maxima[s][:] = np.minimum.accumulate(maxima[s][:, ::-1], axis=1)[:, ::-1]
                sums[s][:] = np.minimum.accumulate(sums[s][:, ::-1], axis=1)[:, ::-1]
            at = np.flatnonzero(arcs.behind == s - 1)
            e, u, a = arcs.end[at], arcs.devices_behind[at], arcs.first[at]
            front_max, front_sum = maxima[s][a, u + counts[at]], sums[s][a, u + counts[at]]
            stage = times.select(at)
            np.minimum.at(maxima[s - 1], (e, u), self._pipeline.front(stage, front_max, front_sum))
            np.minimum.at(sums[s - 1], (e, u), stage.through_ms + front_sum)
        return maxima, sums

    def prune(self, arcs: Arcs, cutoff_ms: float, behind: tuple[list[Floats], list[Floats]] | None = None) -> Arcs:
        """Return the arcs that a pipeline below the cutoff may use."""
        value = self.through(arcs, behind)
        return arcs.select(np.flatnonzero(value <= cutoff_ms))

    def through(self, arcs: Arcs, behind: tuple[list[Floats], list[Floats]] | None = None) -> Floats:
        """Return a lower bound on every pipeline through each arc."""
        if not len(arcs):
            return np.empty(0)
        behind_max, behind_sum = behind if behind is not None else self.potentials_behind(arcs)
        front_max, front_sum = self.potentials_front(arcs)
        counts = self.device_counts[arcs.choice]
        s, e, u, a = arcs.behind, arcs.end, arcs.devices_behind, arcs.first
        behind_max_of, behind_sum_of = np.stack(behind_max), np.stack(behind_sum)
        front_max_of, front_sum_of = np.stack(front_max), np.stack(front_sum)
        front = (s + 1, a, u + counts)
        return self._pipeline.through(
            arcs.times(),
            s,
            behind_max_of[s, e, u],
            behind_sum_of[s, e, u],
            front_max_of[front],
            front_sum_of[front],
        )

    @cached_property
    def device_counts(self) -> Integers:
        """Devices of a stage of each choice, in units, shape (choices,)."""
        return np.array([costs.choice.devices // self.unit for costs in self.batch.choices])

    def objective(self, arcs: Arcs, path: Sequence[int]) -> float:
        """Return the objective of a pipeline, under `full` a lower bound; the arcs of its stages, first stage first."""
        value = total = once = none = np.zeros(1)
        for index in reversed(path):
            stage = arcs.times([index])
            value = self._pipeline.behind(stage, arcs.behind[[index]], value, total)
            total, once = total + stage.through_ms, np.maximum(once, stage.once_ms)
        return float(self._pipeline.through(StageTimes(none, none, once, none, none), 0, value, total, none, none)[0])

    def at_first_node(self, behind: Floats) -> float:
        """Return the potential of whole pipelines, from the potentials behind the nodes of one s."""
        first = behind[0]
        return float(first[self.devices] if self.problem.space.use_all_devices else first.min())

    def keys(self, arcs: Arcs) -> list[tuple[int, int, int, int]]:
        """Return what the recomputation of each arc depends on: (choice, first, end, stages behind that count)."""
        behind = np.minimum(arcs.behind, self.held_behind(self._most_stages))
        return list(zip(arcs.choice.tolist(), arcs.first.tolist(), arcs.end.tolist(), behind.tolist(), strict=True))

    # -- exact recomputation ------------------------------------------------------------------------------------

    def need_bytes(self, arcs: Arcs, index: int) -> float:
        """Return by how much a stage exceeds the memory without recomputation."""
        table = self._tables[int(arcs.choice[index])]
        end = int(arcs.end[index])
        begin, stop = table.end_offset[end], table.end_offset[end + 1]
        at = begin + int(np.searchsorted(table.spans.first[begin:stop], arcs.first[index]))
        held = (self.held_behind(int(arcs.behind[index])) + 1) * table.spans.input_and_held_bytes[at]
        return float(table.spans.fixed_bytes[at] + held - self.problem.cluster.usable_bytes_per_device)
