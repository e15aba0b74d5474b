"""The graph of all pipelines at one micro-batch size, pruned by bounds.

Nodes     (s, x, u): a cut before operator x with s stages and u devices behind it
Arcs      (s, x, u) ← stage [a, x) with choice c on g devices ← (s + 1, a, u + g)
Pipelines paths from (p, 0, all devices) to (0, operators, 0)
Objective (N - 1) * max + sum of the arcs' times on the path

Every arc carries a lower bound on its stage's time; an arc is dropped when no path through it can beat the cutoff:

    (N - 1) * max(behind_max, time, front_max) + behind_sum + time + front_sum > cutoff

with potentials of both sides: first the exact ones behind it and work bounds in front (`_sweep_back`), then the exact
ones in front (`_sweep_forward`). The sum and the maximum are minimised separately, so potentials are lower bounds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from solver_plan.parallelism.choices import Bools, ChoiceCosts, Floats, MicroBatch
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
    choice: Integers
    """Index into the micro-batch's choices."""
    first: Integers
    end: Integers
    transfer_ms: Floats
    busy_ms: Floats
    recompute_ms: Floats
    """Lower bound, or exact."""

    @property
    def time_ms(self) -> Floats:
        """Lower bound of the stage's time, or the exact one."""
        return self.transfer_ms + self.busy_ms + self.recompute_ms

    def __len__(self) -> int:
        return len(self.behind)

    def select(self, keep: Bools | Integers) -> "Arcs":
        """Return some of the arcs."""
        return Arcs(
            self.behind[keep],
            self.devices_behind[keep],
            self.choice[keep],
            self.first[keep],
            self.end[keep],
            self.transfer_ms[keep],
            self.busy_ms[keep],
            self.recompute_ms[keep],
        )

    def with_recompute(self, recompute_ms: Floats) -> "Arcs":
        """Return the arcs with other recomputation times."""
        return Arcs(
            self.behind,
            self.devices_behind,
            self.choice,
            self.first,
            self.end,
            self.transfer_ms,
            self.busy_ms,
            recompute_ms,
        )


@dataclass(frozen=True, slots=True, eq=False)
class ChoiceTable:
    """The stages of one choice and what their bounds need."""

    costs: ChoiceCosts
    spans: Spans
    """Ordered by end, then first."""
    bound: SpanBound
    end_offset: Integers
    """(operators + 2,): the spans that end at x are [end_offset[x], end_offset[x + 1])."""


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
        self._devices = problem.cluster.devices
        self._per_node = problem.cluster.devices_per_node
        self._most_stages = min(
            problem.space.max_stages or self._devices, self._devices // min(c.choice.devices for c in batch.choices)
        )
        self._scale: float = batch.count - 1
        self._sum_weight = 1.0
        self._front_device_ms, self._front_ms = self._work_bounds()
        longest = cutoff_ms / batch.count
        self._tables = [self._table(number, costs, longest, cuts) for number, costs in enumerate(batch.choices)]

    def _table(self, number: int, costs: ChoiceCosts, longest: float, cuts: Bools) -> ChoiceTable:
        by_first = spans(costs, self.problem.state_bytes_per_weight_byte, longest, cuts)
        order = np.lexsort((by_first.first, by_first.end))
        ordered = Spans(
            by_first.first[order],
            by_first.end[order],
            by_first.busy_ms[order],
            by_first.input_and_held_bytes[order],
            by_first.fixed_bytes[order],
        )
        offset = np.searchsorted(ordered.end, np.arange(self.positions + 2))
        return ChoiceTable(costs, ordered, self._bound(number, ordered), offset)

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
    def _cut_at_0(self) -> bool:
        """Whether other stages may lie before one that begins at position 0."""
        return False

    def arcs(self) -> Arcs:
        """Return the arcs that survive the cutoff."""
        behind_max, behind_sum, found = self._sweep_back()
        return self.prune(found, self._cutoff, (behind_max, behind_sum))

    def _placements(self, devices: int) -> Iterator[int]:
        """Yield the numbers of devices behind a stage of so many that let it lie as the space demands."""
        for behind in range(self._devices - devices + 1):
            crosses = behind // self._per_node != (behind + devices - 1) // self._per_node
            if not crosses or self._any_order or self.problem.space.cross_node_stages:
                yield behind

    def _edge(self, devices_behind: int) -> int:
        return INTER if devices_behind % self._per_node == 0 else INTRA

    def _sweep_back(self) -> tuple[list[Floats], list[Floats], Arcs]:
        """Return the least maximum and sum behind each node, shape (operators + 1, devices + 1) per s, and the arcs."""
        shape = (self.positions + 1, self._devices + 1)
        start_max, start_sum = np.full(shape, np.inf), np.full(shape, np.inf)
        start_max[self.positions, 0] = start_sum[self.positions, 0] = 0.0
        if not self.problem.space.use_all_devices:
            start_max[self.positions, :] = start_sum[self.positions, :] = 0.0
        maxima, sums = [start_max], [start_sum]
        parts: list[tuple[int, int, int, Integers, Floats, Floats]] = []
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
    ) -> Iterator[tuple[int, int, int, Integers, Floats, Floats]]:
        """Put every stage of one choice before the nodes with s stages behind; yield those below the cutoff."""
        devices = table.costs.choice.devices
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
            transfer, time, value = self._through(s, u, table, maximum, total, spans_of, extra[spans_of])
            keep = np.flatnonzero(np.isfinite(value) & (value <= self._cutoff))
            if not len(keep):
                continue
            kept = spans_of[keep]
            first, end = table.spans.first[kept], table.spans.end[kept]
            np.minimum.at(next_max[:, u + devices], first, np.maximum(time[keep], maximum[end, u]))
            np.minimum.at(next_sum[:, u + devices], first, time[keep] + total[end, u])
            yield s, number, u, kept, transfer[keep], extra[kept]

    def _within_cutoff(self, s: int, u: int, table: ChoiceTable, maximum: Floats, total: Floats) -> Integers:
        """Return the spans that may come before the nodes with s stages and u devices behind if nothing is extra."""
        ends = np.flatnonzero(np.isfinite(maximum[:, u]))
        spans_of = np.arange(table.end_offset[ends[0]], table.end_offset[ends[-1] + 1])
        _, _, value = self._through(s, u, table, maximum, total, spans_of, np.zeros(len(spans_of)))
        return np.asarray(spans_of[np.isfinite(value) & (value <= self._cutoff)])

    def _through(
        self, s: int, u: int, table: ChoiceTable, maximum: Floats, total: Floats, spans_of: Integers, extra: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """Return transfers and times of spans, and a bound on the pipelines through each (infinite: there is none)."""
        devices = table.costs.choice.devices
        first, end = table.spans.first[spans_of], table.spans.end[spans_of]
        transfer = self._transfer(table.costs, s, u, devices, first, end)
        time = self._constant_part(table)[spans_of] + extra + transfer
        left = self._devices - u - devices
        complete = left == 0 or not self.problem.space.use_all_devices
        reachable = np.where(first == 0, complete or (left > 0 and self._cut_at_0), left > 0)
        front = self._front_device_ms[first] / max(left, 1)
        value = self._value(
            np.maximum(np.maximum(time, maximum[end, u]), front), time + total[end, u] + self._front_ms[first]
        )
        return transfer, time, np.where(reachable, value, np.inf)

    def _constant_part(self, table: "ChoiceTable") -> Floats:
        return table.spans.busy_ms

    def _variable_part(self, table: "ChoiceTable", behind: int, candidates: Integers) -> Floats:
        return table.bound.milliseconds(behind, candidates)

    def _transfer(self, costs: ChoiceCosts, s: int, u: int, devices: int, first: Integers, end: Integers) -> Floats:
        if self._any_order:
            return np.asarray(costs.send_ms.min(axis=0)[end - 1] + costs.receive_ms.min(axis=0)[first])
        send = costs.send_ms[INTER if s == 0 else self._edge(u)][end - 1]
        before = self._edge(u + devices)
        receive = np.where(first == 0, costs.receive_ms[INTRA][first], costs.receive_ms[before][first])
        return np.asarray(send + receive)

    def _collect(self, parts: list[tuple[int, int, int, Integers, Floats, Floats]]) -> Arcs:
        if not parts:
            none = np.empty(0, dtype=np.int64)
            return Arcs(none, none, none, none, none, np.empty(0), np.empty(0), np.empty(0))
        sizes = [len(part[3]) for part in parts]
        table_of = [self._tables[part[1]].spans for part in parts]
        return Arcs(
            np.repeat([part[0] for part in parts], sizes),
            np.repeat([part[2] for part in parts], sizes),
            np.repeat([part[1] for part in parts], sizes),
            np.concatenate([table.first[part[3]] for table, part in zip(table_of, parts, strict=True)]),
            np.concatenate([table.end[part[3]] for table, part in zip(table_of, parts, strict=True)]),
            np.concatenate([part[4] for part in parts]),
            np.concatenate([self._constant_part(self._tables[part[1]])[part[3]] for part in parts]),
            np.concatenate([part[5] for part in parts]),
        )

    # -- pruning a list of arcs ---------------------------------------------------------------------------------

    def potentials_behind(self, arcs: Arcs) -> tuple[list[Floats], list[Floats]]:
        """Return the least maximum and sum behind each node over the arcs."""
        shape = (self.positions + 1, self._devices + 1)
        most = int(arcs.behind.max(initial=-1)) + 1
        maxima = [np.full(shape, np.inf) for _ in range(most + 1)]
        sums = [np.full(shape, np.inf) for _ in range(most + 1)]
        maxima[0][self.positions, 0] = sums[0][self.positions, 0] = 0.0
        free = not self.problem.space.use_all_devices
        if free:
            maxima[0][self.positions, :] = sums[0][self.positions, :] = 0.0
        time, counts = arcs.time_ms, self.device_counts[arcs.choice]
        for s in range(most):
            at = np.flatnonzero(arcs.behind == s)
            e, u, a = arcs.end[at], arcs.devices_behind[at], arcs.first[at]
            np.minimum.at(maxima[s + 1], (a, u + counts[at]), np.maximum(time[at], maxima[s][e, u]))
            np.minimum.at(sums[s + 1], (a, u + counts[at]), time[at] + sums[s][e, u])
            if free:
                np.minimum.accumulate(maxima[s + 1], axis=1, out=maxima[s + 1])
                np.minimum.accumulate(sums[s + 1], axis=1, out=sums[s + 1])
        return maxima, sums

    def potentials_front(self, arcs: Arcs) -> tuple[list[Floats], list[Floats]]:
        """Return the least maximum and sum in front of each node over the arcs."""
        shape = (self.positions + 1, self._devices + 1)
        most = int(arcs.behind.max(initial=-1)) + 1
        maxima = [np.full(shape, np.inf) for _ in range(most + 1)]
        sums = [np.full(shape, np.inf) for _ in range(most + 1)]
        time, counts = arcs.time_ms, self.device_counts[arcs.choice]
        free = not self.problem.space.use_all_devices
        for s in range(most, 0, -1):
            maxima[s][0, self._devices] = sums[s][0, self._devices] = 0.0
            if free:
                maxima[s][:] = np.minimum.accumulate(maxima[s][:, ::-1], axis=1)[:, ::-1]
                sums[s][:] = np.minimum.accumulate(sums[s][:, ::-1], axis=1)[:, ::-1]
            at = np.flatnonzero(arcs.behind == s - 1)
            e, u, a = arcs.end[at], arcs.devices_behind[at], arcs.first[at]
            front_max, front_sum = maxima[s][a, u + counts[at]], sums[s][a, u + counts[at]]
            np.minimum.at(maxima[s - 1], (e, u), np.maximum(time[at], front_max))
            np.minimum.at(sums[s - 1], (e, u), time[at] + front_sum)
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
        time, counts = arcs.time_ms, self.device_counts[arcs.choice]
        s, e, u, a = arcs.behind, arcs.end, arcs.devices_behind, arcs.first
        behind_max_of, behind_sum_of = np.stack(behind_max), np.stack(behind_sum)
        front_max_of, front_sum_of = np.stack(front_max), np.stack(front_sum)
        slowest = np.maximum(time, behind_max_of[s, e, u])
        np.maximum(slowest, front_max_of[s + 1, a, u + counts], out=slowest)
        total = time + behind_sum_of[s, e, u] + front_sum_of[s + 1, a, u + counts]
        return self._value(slowest, total)

    @cached_property
    def device_counts(self) -> Integers:
        """Devices of a stage of each choice, shape (choices,)."""
        return np.array([costs.choice.devices for costs in self.batch.choices])

    def objective(self, time_ms: Floats) -> float:
        """Return the objective of a pipeline from the times of its stages, shape (stages,)."""
        return float(self._scale * time_ms.max() + self._sum_weight * time_ms.sum())

    def _value(self, slowest: Floats, total: Floats) -> Floats:
        """Return the objective from the slowest stage and the sum of the stages, infinite where either is."""
        value = np.where(np.isfinite(slowest), 0.0, np.inf)
        if self._scale:
            value = value + self._scale * slowest
        if self._sum_weight:
            value = value + self._sum_weight * total
        return np.asarray(value)

    def at_first_node(self, behind: Floats) -> float:
        """Return the potential of whole pipelines, from the potentials behind the nodes of one s."""
        first = behind[0]
        return float(first[self._devices] if self.problem.space.use_all_devices else first.min())

    # -- exact recomputation ------------------------------------------------------------------------------------

    def need_bytes(self, arcs: Arcs, index: int) -> float:
        """Return by how much a stage exceeds the memory without recomputation."""
        table = self._tables[int(arcs.choice[index])]
        end = int(arcs.end[index])
        begin, stop = table.end_offset[end], table.end_offset[end + 1]
        at = begin + int(np.searchsorted(table.spans.first[begin:stop], arcs.first[index]))
        held = (int(arcs.behind[index]) + 1) * table.spans.input_and_held_bytes[at]
        return float(table.spans.fixed_bytes[at] + held - self.problem.cluster.usable_bytes_per_device)
