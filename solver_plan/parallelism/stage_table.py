"""Time and memory of every possible stage of one choice, before recomputation, and a lower bound with it.

A *span* is a pair (first operator a, end e). Arrays have shape (spans,), in the order of a, then e.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from solver_plan.parallelism.choices import Bools, ChoiceCosts, Floats
from solver_plan.parallelism.recomputation.stages import Key, StageRecomputation

Integers = NDArray[np.int64]

PEAK_GROUPS = 8
"""Ranges of the peak that the lower bound tells apart."""
PRICE_COUNT = 16
"""Prices of a byte that the lower bound tries."""
CHUNK = 20_000
"""Spans handled at once, to bound memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Stages of one choice that are fast enough without recomputation."""

    first: Integers
    end: Integers
    busy_ms: Floats
    """Forward and backward of the operators; no transfers, no recomputation."""
    input_and_held_bytes: Floats
    """Kept for each micro-batch in flight without recomputation."""
    fixed_bytes: Floats
    """Weights with their state, and what the allocator reserves."""
    forward_ms: Floats
    """The part of `busy_ms` in forwards."""
    once_ms: Floats
    """What the stage takes once an iteration; `full` only."""

    def select(self, index: Integers) -> "Spans":
        """Return some of the spans."""
        return Spans(*(getattr(self, field.name)[index] for field in fields(self)))


class SpanBound(Protocol):
    """A lower bound on what stages take beyond their operators' time."""

    def milliseconds(self, behind: int, at: Integers | None = None) -> Floats:
        """Return the bound for spans (all, or those at indices `at`) with `behind` stages behind them."""

    def most_saved_bytes(self, behind: int, index: Integers) -> Floats:
        """Return an upper bound on what recomputation takes off the memory of spans."""


def spans(costs: ChoiceCosts, state_bytes_per_weight_byte: float, longest_ms: float, cuts: Bools) -> Spans:
    """Return the spans whose operators take at most `longest_ms` without recomputation.

    `cuts`, shape (operators + 1,), marks where a stage may begin and end.
    """
    first, end, forward, backward = span_ranges(costs, longest_ms, cuts)
    weights = prefix_difference(costs.weight_bytes, first, end)
    reserved = maximum_but_last(costs.forward_reserved_bytes, first, end) + maximum_but_last(
        costs.backward_reserved_bytes, first, end
    )
    return Spans(
        first=first,
        end=end,
        busy_ms=forward + backward,
        input_and_held_bytes=costs.input_bytes[first] + prefix_difference(costs.held_bytes, first, end),
        fixed_bytes=weights * state_bytes_per_weight_byte + np.maximum(reserved, weights),
        forward_ms=forward,
        once_ms=np.zeros(len(first)),
    )


def span_ranges(costs: ChoiceCosts, longest_ms: float, cuts: Bools) -> tuple[Integers, Integers, Floats, Floats]:
    """Return first and end of the spans that were profiled and take at most `longest_ms`, forward and backward."""
    busy = costs.forward_ms + costs.backward_ms
    finite = np.where(np.isfinite(busy), busy, 0.0)
    total = np.concatenate([np.zeros(1), np.cumsum(finite)])
    missing = np.concatenate([np.zeros(1), np.cumsum(~np.isfinite(busy))])
    at = np.flatnonzero(cuts)
    begins = at[at < len(busy)]
    # ends are cuts behind the begin, up to the furthest that is still fast enough
    low = np.searchsorted(at, begins, side="right")
    high = np.searchsorted(at, np.searchsorted(total, total[begins] + longest_ms, side="right"))
    counts = np.maximum(high - low, 0)
    first = np.repeat(begins, counts)
    end = at[np.arange(len(first)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(low, counts)]
    profiled = missing[end] == missing[first]
    first, end = first[profiled], end[profiled]
    forward = prefix_difference(np.where(np.isfinite(costs.forward_ms), costs.forward_ms, 0.0), first, end)
    return first, end, forward, total[end] - total[first] - forward


def prefix_difference(values: Floats, first: Integers, end: Integers) -> Floats:
    """Return the sums of values[first : end]."""
    total = np.concatenate([np.zeros(1), np.cumsum(values)])
    return np.asarray(total[end] - total[first])


def maximum_but_last(values: Floats, first: Integers, end: Integers) -> Floats:
    """Return the maximum of values[first : end - 1], 0 if there is none, by a sparse table."""
    table = [values]
    while 2 ** len(table) <= len(values):
        previous, half = table[-1], 2 ** (len(table) - 1)
        table.append(np.maximum(previous[:-half], previous[half:]))
    length = end - 1 - first
    level = np.where(length > 0, np.floor(np.log2(np.maximum(length, 1))), 0).astype(np.int64)
    result = np.zeros(len(first))
    for power, row in enumerate(table):
        at = np.flatnonzero((level == power) & (length > 0))
        result[at] = np.maximum(row[first[at]], row[end[at] - 1 - 2**power])
    return result


def largest(values: Floats, first: Integers, end: Integers) -> Floats:
    """Return the maximum of values[first : end]."""
    return maximum_but_last(values, first, end + 1)


class RecomputationTables:
    """Price tables of the parts of all stages of one choice."""

    def __init__(self, recomputation: StageRecomputation) -> None:
        self.recomputation = recomputation

    @cached_property
    def groups(self) -> tuple[Integers, Floats, Integers]:
        """(index of the highest peak of each group, the peak below each group, indices of the prices)."""
        peaks, prices = self.recomputation.peaks, self.recomputation.prices
        highest = np.unique(np.linspace(0, len(peaks) - 1, PEAK_GROUPS).round().astype(np.int64))
        below = np.concatenate([np.zeros(1), peaks[highest[:-1]]])
        at = np.unique(np.linspace(0, len(prices) - 1, PRICE_COUNT).round().astype(np.int64))
        return highest, below, at

    def distinct(self, parts: Sequence[tuple[int, int]], *, inner: bool, ends_stage: bool) -> tuple[Floats, Integers]:
        """Return the price tables of the distinct ones among parts of stages, and the row of each part."""
        highest, _, at = self.groups
        rows: list[Floats] = []
        known: dict[Key, int] = {}
        row_of = np.empty(len(parts), dtype=np.int64)
        for index, part in enumerate(parts):
            key = self.recomputation.key(part, inner, ends_stage)
            if key not in known:
                known[key] = len(rows)
                rows.append(self.recomputation.price_table(part, inner, ends_stage)[highest][:, at])
            row_of[index] = known[key]
        return np.stack(rows) if rows else np.empty((0, len(highest), len(at))), row_of

    @cached_property
    def saved_tables(self) -> tuple[Floats, Floats, Floats]:
        """Most bytes saved at each peak: (operators, peaks) for heads and tails, (blocks + 1, peaks) summed."""
        shape = self.recomputation.shape
        count = len(shape.classes)
        heads = np.stack(
            [self.recomputation.most_saved((a, shape.blocks[shape.block_of[a]][1]), False, False) for a in range(count)]
        )
        tails = np.stack(
            [
                self.recomputation.most_saved((shape.blocks[shape.block_of[e - 1]][0], e), True, True)
                for e in range(1, count + 1)
            ]
        )
        whole = np.stack([self.recomputation.most_saved(block, True, False) for block in shape.blocks])
        return heads, tails, np.concatenate([np.zeros((1, whole.shape[1])), np.cumsum(whole, axis=0)])

    @cached_property
    def heads(self) -> tuple[Floats, Integers]:
        """Price tables of what a stage has of its first block, by first operator."""
        shape = self.recomputation.shape
        parts = [(a, shape.blocks[shape.block_of[a]][1]) for a in range(len(shape.classes))]
        return self.distinct(parts, inner=False, ends_stage=False)

    @cached_property
    def tails(self) -> tuple[Floats, Integers]:
        """Price tables of what a stage has of its last block, by last operator."""
        shape = self.recomputation.shape
        parts = [(shape.blocks[shape.block_of[last]][0], last + 1) for last in range(len(shape.classes))]
        return self.distinct(parts, inner=True, ends_stage=True)

    @cached_property
    def summed(self) -> Floats:
        """Price tables summed over the first 0, 1, 2, … blocks."""
        rows, row_of = self.distinct(self.recomputation.shape.blocks, inner=True, ends_stage=False)
        return np.concatenate([np.zeros((1, *rows.shape[1:])), np.cumsum(rows[row_of], axis=0)])


class RecomputationBound:
    """Lower bound on the recomputation of every span, for any number of stages behind.

    For groups of peaks (P_{i-1}, P_i] the relaxation of `StageRecomputation` at peaks up to P_i, with a target that
    counts a peak of P_{i-1}: valid, and cheap for all spans at once.
    """

    def __init__(self, table: Spans, tables: RecomputationTables, limit_bytes: int) -> None:
        self.spans = table
        self._tables = tables
        self._recomputation = tables.recomputation
        self._limit = limit_bytes

    @cached_property
    def _inner_tables(self) -> tuple[Floats, Integers]:
        """Price tables of the distinct spans within one block, and the row of each span."""
        block_of = self._recomputation.shape.block_of
        within = np.flatnonzero(block_of[self.spans.first] == block_of[self.spans.end - 1])
        pieces = list(zip(self.spans.first[within].tolist(), self.spans.end[within].tolist(), strict=True))
        rows, row_of_piece = self._tables.distinct(pieces, inner=False, ends_stage=True)
        row_of = np.full(len(self.spans.first), -1, dtype=np.int64)
        row_of[within] = row_of_piece
        return rows, row_of

    def most_saved_bytes(self, behind: int, index: Integers) -> Floats:
        """Return an upper bound on what recomputation takes off the memory of spans with so many stages behind."""
        shape, peaks = self._recomputation.shape, self._recomputation.peaks
        if not shape.allowed:
            return np.zeros(len(index))
        heads, tails, summed = self._tables.saved_tables
        below = np.concatenate([np.zeros(1), peaks[:-1]])
        result = np.empty(len(index))
        for begin in range(0, len(index), CHUNK):
            part = index[begin : begin + CHUNK]
            first, end = self.spans.first[part], self.spans.end[part]
            head_block, tail_block = shape.block_of[first], shape.block_of[end - 1]
            apart = head_block < tail_block
            saved = heads[first] + tails[end - 1] + summed[tail_block] - summed[np.minimum(head_block + 1, tail_block)]
            # within one block the head alone saves at least as much as the span, unless the span's end hides a peak
            hides = shape.shares_buffer[end - 1] | shape.shares_buffer[np.maximum(end - 2, 0)]
            within = np.where(hides[:, None], tails[end - 1], np.minimum(heads[first], tails[end - 1]))
            saved[~apart] = within[~apart]
            result[begin : begin + CHUNK] = ((behind + 1) * saved - below[None, :]).max(axis=1)
        return np.maximum(result, 0.0)

    def milliseconds(self, behind: int, at: Integers | None = None) -> Floats:
        """Return the bound for spans (all, or those at indices `at`) with `behind` stages behind them."""
        index = np.arange(len(self.spans.first)) if at is None else at
        need = self.spans.fixed_bytes[index] + (behind + 1) * self.spans.input_and_held_bytes[index] - self._limit
        result = np.zeros(len(index))
        short = np.flatnonzero(need > 0)
        if not self._recomputation.shape.allowed:
            result[short] = np.inf
            return result
        for begin in range(0, len(short), CHUNK):
            part = short[begin : begin + CHUNK]
            result[part] = self._bound(index[part], need[part], behind)
        return result

    def _bound(self, index: Integers, need: Floats, behind: int) -> Floats:
        shape = self._recomputation.shape
        first, end = self.spans.first[index], self.spans.end[index]
        head_block, tail_block = shape.block_of[first], shape.block_of[end - 1]
        result = np.zeros(len(index))
        apart = np.flatnonzero(head_block < tail_block)
        (heads, head_of), (tails, tail_of), summed = self._tables.heads, self._tables.tails, self._tables.summed
        value = heads[head_of[first[apart]]] + tails[tail_of[end[apart] - 1]]
        value += summed[tail_block[apart]] - summed[head_block[apart] + 1]
        result[apart] = self._relaxed(value, need[apart], behind)
        within = np.flatnonzero(head_block == tail_block)
        rows, row_of = self._inner_tables
        result[within] = self._relaxed(rows[row_of[index[within]]], need[within], behind)
        return result

    def _relaxed(self, value: Floats, need: Floats, behind: int) -> Floats:
        """Return min over groups of max over prices of value + price * target; (spans, groups, prices) to (spans,)."""
        _, below, at = self._tables.groups
        prices = self._recomputation.prices[at]
        target = (need[:, None] + below[None, :]) / (behind + 1)
        return np.asarray((value + target[:, :, None] * prices[None, None, :]).max(axis=2).min(axis=1))
