"""Least recomputation of a stage, for one choice of layout.

A stage with operators [a, e) is cut into pieces at block starts. For a limit P on the peak and s = (need + P) / (b + 1)
bytes to save per micro-batch in flight, b stages behind,

    r(a, e, need, b) = min over P of min { sum of time : sum of saved >= s, every peak <= P }

Lower bound (Lagrange): for every price q >= 0 of a byte, the inner minimum is at least
    q s + sum over pieces of min over patterns with peak <= P of (time - q saved).                    → price_table
Exactly: Pareto sums over the pieces, P by P in the order of their lower bounds.                      → cheapest

The peak of a piece depends on its neighbour (a segment may run on into the first operator of the next block):
`joined=False` takes the lower value, so that r is a lower bound and almost always attained; `joined=True` the upper.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from solver_plan.parallelism.choices import ChoiceCosts
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.parallelism.recomputation.fronts import (
    BYTE_ROUNDING,
    Front,
    Integers,
    hull,
    pareto,
    steepest_step_ms,
    sum_of,
)
from solver_plan.parallelism.recomputation.patterns import Bools, Floats, Patterns, piece_patterns

MOST_PRICES = 48
"""Prices of a byte at which pieces are tabulated."""

_NO_POINTS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class ChainShape:
    """What all choices share: blocks, and which operators are equal."""

    blocks: tuple[tuple[int, int], ...]
    block_of: Integers
    """(operators,): number of the block."""
    classes: Integers
    """(operators,): equal numbers for operators with the same profile and activation factor."""
    shares_buffer: Bools
    whole_blocks: bool
    """Only whole blocks may be recomputed."""
    allowed: bool
    """Recomputation is allowed at all."""


def chain_shape(problem: ParallelismProblem, blocks: Sequence[tuple[int, int]]) -> ChainShape:
    """Return the shape of a problem's chain."""
    numbers: dict[tuple[str, float], int] = {}
    classes = [
        numbers.setdefault((operator.profile, operator.activation_factor), len(numbers))
        for operator in problem.operators
    ]
    block_of = np.zeros(len(problem.operators), dtype=np.int64)
    for number, (first, end) in enumerate(blocks):
        block_of[first:end] = number
    return ChainShape(
        blocks=tuple(blocks),
        block_of=block_of,
        classes=np.array(classes, dtype=np.int64),
        shares_buffer=np.array([operator.activation_factor != 1 for operator in problem.operators]),
        whole_blocks=problem.space.recompute == "block",
        allowed=problem.space.recompute != "none",
    )


@dataclass(frozen=True, slots=True)
class Recomputation:
    """Least recomputation found: its time, and the marks of the operators of the stage."""

    time_ms: float
    marks: tuple[bool, ...]


class StageRecomputation:
    """Recomputation of the stages of one choice at one micro-batch size. Tables are made on demand and kept."""

    def __init__(self, shape: ChainShape, costs: ChoiceCosts, *, joined: bool = False) -> None:
        self.shape = shape
        self.costs = costs
        self._joined = joined
        self._patterns: dict[tuple[bytes, bool], Patterns] = {}
        self._fronts: dict[tuple[bytes, bool, float], Front] = {}
        self._sums: dict[tuple[bytes, int, float], Front] = {}
        self._tables: dict[tuple[bytes, bool], Floats] = {}
        self._saved: dict[tuple[bytes, bool], Floats] = {}

    # -- pieces -------------------------------------------------------------------------------------------------

    def pieces(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return the stage's operators, cut at block starts."""
        blocks = self.shape.blocks
        numbers = range(int(self.shape.block_of[first]), int(self.shape.block_of[end - 1]) + 1)
        return [(max(first, blocks[number][0]), min(end, blocks[number][1])) for number in numbers]

    def patterns(self, piece: tuple[int, int], ends_stage: bool) -> Patterns:
        """Return the patterns of a piece; pieces of equal operators share them."""
        key = self._key(piece, ends_stage)
        if key not in self._patterns:
            x, y = piece
            self._patterns[key] = piece_patterns(
                self.costs.forward_ms[x:y],
                self.costs.held_bytes[x:y],
                self.shape.shares_buffer[x:y],
                ends_stage=ends_stage,
                joined=self._joined,
                whole=self.shape.whole_blocks,
            )
        return self._patterns[key]

    def _key(self, piece: tuple[int, int], ends_stage: bool) -> tuple[bytes, bool]:
        # only a shared buffer right before the end makes a difference
        differs = ends_stage and (
            self._joined or (piece[1] - piece[0] >= 2 and bool(self.shape.shares_buffer[piece[1] - 2]))
        )
        return self.shape.classes[piece[0] : piece[1]].tobytes(), differs

    # -- lower bound --------------------------------------------------------------------------------------------

    @cached_property
    def peaks(self) -> Floats:
        """Every peak that a whole block can have, increasing, from 0."""
        found = [self.patterns(block, ends_stage).peak_bytes for block, ends_stage in self._typical_blocks]
        return np.unique(np.concatenate([np.zeros(1), *found]))

    @cached_property
    def prices(self) -> Floats:
        """Prices of a byte (ms) at which pieces are tabulated, increasing from 0: slopes of the blocks' hulls."""
        slopes = [np.zeros(1)]
        for block, ends_stage in self._typical_blocks:
            for limit in self.peaks[:: max(1, len(self.peaks) // 12)]:
                front = self.front(block, ends_stage, float(limit))
                corners = hull(front)
                slopes.append(np.diff(front.time_ms[corners]) / np.diff(front.saved_bytes[corners]))
        distinct = np.unique(np.concatenate(slopes).round(18))
        if len(distinct) > MOST_PRICES:
            distinct = distinct[np.linspace(0, len(distinct) - 1, MOST_PRICES).round().astype(int)]
        return distinct

    @cached_property
    def _typical_blocks(self) -> list[tuple[tuple[int, int], bool]]:
        seen: dict[tuple[bytes, bool], tuple[tuple[int, int], bool]] = {}
        last = len(self.shape.blocks) - 1
        for number, block in enumerate(self.shape.blocks):
            seen.setdefault(self._key(block, number == last), (block, number == last))
        return list(seen.values())

    def price_table(self, piece: tuple[int, int], ends_stage: bool) -> Floats:
        """Return (peaks, prices): least time - price * saved over the patterns with at most each peak."""
        key = self._key(piece, ends_stage)
        if key not in self._tables:
            patterns = self.patterns(piece, ends_stage)
            value = patterns.time_ms[:, None] - patterns.saved_bytes[:, None] * self.prices[None, :]
            best = np.minimum.accumulate(value, axis=0)
            at = np.searchsorted(patterns.peak_bytes, self.peaks, side="right") - 1
            self._tables[key] = best[at]
        return self._tables[key]

    def most_saved(self, piece: tuple[int, int], ends_stage: bool) -> Floats:
        """Return, shape (peaks,), the most bytes that patterns with at most each peak save."""
        key = self._key(piece, ends_stage)
        if key not in self._saved:
            patterns = self.patterns(piece, ends_stage)
            best = np.maximum.accumulate(patterns.saved_bytes)
            self._saved[key] = best[np.searchsorted(patterns.peak_bytes, self.peaks, side="right") - 1]
        return self._saved[key]

    # -- exact --------------------------------------------------------------------------------------------------

    def front(self, piece: tuple[int, int], ends_stage: bool, limit: float) -> Front:
        """Return the front of a piece over the patterns with a peak of at most `limit`; `left` is the pattern."""
        key = (*self._key(piece, ends_stage), limit)
        if key not in self._fronts:
            patterns = self.patterns(piece, ends_stage)
            count = int(np.searchsorted(patterns.peak_bytes, limit, side="right"))
            index = np.arange(count)
            self._fronts[key] = pareto(patterns.time_ms[:count], patterns.saved_bytes[:count], index, index)
        return self._fronts[key]

    def _sum(self, piece: tuple[int, int], count: int, limit: float) -> Front:
        """Return the front of `count` equal pieces in the middle of a stage."""
        key = (self._key(piece, False)[0], count, limit)
        if key not in self._sums:
            one = self.front(piece, False, limit)
            if count == 1:
                self._sums[key] = one
            else:
                self._sums[key] = sum_of(self._sum(piece, count - 1, limit), one, steepest_step_ms(one))
        return self._sums[key]

    def cheapest(self, first: int, end: int, need_bytes: float, behind: int) -> Recomputation | None:
        """Return the least recomputation after which a stage fits.

        Parameters
        ----------
        first, end
            Operators of the stage.
        need_bytes
            How much the stage exceeds the memory without recomputation; at most 0: it fits.
        behind
            Stages behind it; saved bytes count once for each micro-batch in flight.

        Returns
        -------
        Recomputation or None
            None if no recomputation makes it fit.
        """
        if need_bytes <= 0:
            return Recomputation(0.0, (False,) * (end - first))
        if not self.shape.allowed:
            return None
        pieces = self.pieces(first, end)
        limits = np.unique(np.concatenate([self.patterns(piece, piece[1] == end).peak_bytes for piece in set(pieces)]))
        targets = (need_bytes + limits) / (behind + 1)
        bounds = self._bounds(pieces, end, limits, targets)
        best_ms = np.inf
        chosen: tuple[int, ...] | None = None
        for index in np.argsort(bounds, kind="stable"):
            if bounds[index] >= best_ms * (1 - 1e-12):
                break
            found = self._solve(pieces, end, float(limits[index]), float(targets[index]))
            if found is not None and found[0] < best_ms:
                best_ms = found[0]
                chosen = found[1]
        if chosen is None:
            return None
        marks: list[bool] = []
        for piece, number in zip(pieces, chosen, strict=True):
            marks.extend(bool(mark) for mark in self.patterns(piece, piece[1] == end).bits[number])
        return Recomputation(float(best_ms), tuple(marks))

    def _bounds(self, pieces: list[tuple[int, int]], end: int, limits: Floats, targets: Floats) -> Floats:
        """Return the lower bound of the recomputation time for each limit on the peak."""
        at = np.searchsorted(self.peaks, limits, side="right") - 1
        total = np.zeros((len(limits), len(self.prices)))
        for piece in pieces:
            total += self._table_at(piece, piece[1] == end, limits, at)
        return np.asarray((total + targets[:, None] * self.prices[None, :]).max(axis=1))

    def _table_at(self, piece: tuple[int, int], ends_stage: bool, limits: Floats, at: Integers) -> Floats:
        patterns = self.patterns(piece, ends_stage)
        if patterns.peak_bytes[-1] <= self.peaks[-1] and np.isin(patterns.peak_bytes, self.peaks).all():
            return self.price_table(piece, ends_stage)[at]
        value = patterns.time_ms[:, None] - patterns.saved_bytes[:, None] * self.prices[None, :]
        best = np.minimum.accumulate(value, axis=0)
        return np.asarray(best[np.searchsorted(patterns.peak_bytes, limits, side="right") - 1])

    def _solve(
        self, pieces: list[tuple[int, int]], end: int, limit: float, target: float
    ) -> tuple[float, tuple[int, ...]] | None:
        """Return (time, pattern of each piece) of the least time that saves `target` with peaks of at most `limit`."""
        head = self.front(pieces[0], pieces[0][1] == end, limit)
        if len(pieces) == 1:
            time, point = head.cheapest(np.array([target]))
            return None if point[0] < 0 else (float(time[0]), (int(head.left[point[0]]),))
        tail = self.front(pieces[-1], True, limit)
        runs = self._runs(pieces[1:-1])
        ends_saved = (head.saved_bytes[:, None] + tail.saved_bytes[None, :]).ravel()
        ends_time = (head.time_ms[:, None] + tail.time_ms[None, :]).ravel()
        if not runs:
            fits = ends_saved >= target - BYTE_ROUNDING
            if not fits.any():
                return None
            best = int(np.argmin(np.where(fits, ends_time, np.inf)))
            h, t = divmod(best, len(tail.time_ms))
            return float(ends_time[best]), (int(head.left[h]), int(tail.left[t]))
        middle, partial = self._middle(runs, limit)
        time, point = middle.cheapest(target - ends_saved)
        total = ends_time + time
        best = int(np.argmin(total))
        if not np.isfinite(total[best]):
            return None
        h, t = divmod(best, len(tail.time_ms))
        chosen = self._unfold(runs, partial, int(point[best]), limit)
        return float(total[best]), (int(head.left[h]), *chosen, int(tail.left[t]))

    def _runs(self, pieces: list[tuple[int, int]]) -> list[tuple[tuple[int, int], int]]:
        """Return equal neighbours as (piece, count)."""
        runs: list[tuple[tuple[int, int], int]] = []
        for piece in pieces:
            if runs and self._key(runs[-1][0], False) == self._key(piece, False):
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((piece, 1))
        return runs

    def _middle(self, runs: list[tuple[tuple[int, int], int]], limit: float) -> tuple[Front, list[Front]]:
        """Return the front of all runs, and the fronts of the first one, two, … of them."""
        partial = [self._sum(*runs[0], limit)]
        for piece, count in runs[1:]:
            more = self._sum(piece, count, limit)
            slack = max(steepest_step_ms(self.front(run[0], False, limit)) for run in runs)
            partial.append(sum_of(partial[-1], more, slack))
        return partial[-1], partial

    def _unfold(
        self, runs: list[tuple[tuple[int, int], int]], partial: list[Front], point: int, limit: float
    ) -> list[int]:
        """Return the pattern of each piece of the runs behind a point of their front."""
        chosen: list[int] = []
        for index in range(len(runs) - 1, -1, -1):
            piece, count = runs[index]
            if index > 0:
                inner = int(partial[index].right[point])
                point = int(partial[index].left[point])
            else:
                inner = point
            for number in range(count, 1, -1):
                front = self._sum(piece, number, limit)
                chosen.append(int(self.front(piece, False, limit).left[front.right[inner]]))
                inner = int(front.left[inner])
            chosen.append(int(self.front(piece, False, limit).left[inner]))
        return chosen[::-1]
