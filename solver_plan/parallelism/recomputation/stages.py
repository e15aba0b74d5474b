"""Least recomputation of a stage, for one choice of layout.

A stage with operators [a, e) is cut into pieces (`shape`). For a limit P on the peak and s = (need + P) / (b + 1) bytes
to save per micro-batch in flight, b stages behind,

    r(a, e, need, b) = min over P of min { sum of time : sum of saved >= s, every peak <= P }

Lower bound (Lagrange): for every price q >= 0 of a byte, the inner minimum is at least
    q s + sum over pieces of min over patterns with peak <= P of (time - q saved).                    → price_table
Exactly: Pareto sums over the pieces, P by P in the order of their lower bounds.                      → cheapest

Two things reach across pieces. A segment may run on into the first operator of the next block and raise the peak; and
across a virtual cut a run saves what the operator before the cut holds. `LOWER` neglects the first and counts the
second whenever the operator behind the cut is recomputed: r is a lower bound. `UPPER` counts no saving across virtual
cuts, and its answer is verified and tightened until it really fits (`cheapest`). Without virtual cuts the two almost
always agree.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from solver_plan.parallelism.choices import ChoiceCosts
from solver_plan.parallelism.costs.recompute import saved_and_peak
from solver_plan.parallelism.recomputation.exact import TooManyLabelsError, least_recomputation
from solver_plan.parallelism.recomputation.fronts import (
    BYTE_ROUNDING,
    Front,
    Integers,
    pareto,
    relaxed_ms,
    sum_of,
)
from solver_plan.parallelism.recomputation.patterns import Floats, Patterns, piece_patterns
from solver_plan.parallelism.recomputation.shape import ChainShape

MOST_PRICES = 48
"""Prices of a byte at which pieces are tabulated."""
MOST_OPERATORS = 24
"""Operators of a stage whose recomputation is found operator by operator, where its pieces interact."""
MOST_TIGHTENINGS = 12
"""How often an upper answer that does not fit is solved again with what is missing added."""
MOST_BY_ONE = 32
"""Equal units summed one at a time: stages of neighbouring sizes share those sums."""
SOLVE_COST_S = 5e-4
"""Deterministic seconds of one inner minimum."""
SUM_COST_S = 2e-3
"""Deterministic seconds of one sum of fronts."""

Span = tuple[int, int]
Key = tuple[bytes, bytes, int, bool]


class Side(enum.Enum):
    """Which way the interaction of neighbouring pieces is rounded."""

    LOWER = "lower"
    UPPER = "upper"


@dataclass(frozen=True, slots=True)
class Recomputation:
    """Least recomputation found: its time, and the marks of the operators of the stage."""

    time_ms: float
    """For `LOWER`, a lower bound; in most cases that of the marks."""
    marks: tuple[bool, ...]


class StageRecomputation:
    """Recomputation of the stages of one choice at one micro-batch size. Tables are made on demand and kept."""

    def __init__(
        self,
        shape: ChainShape,
        costs: ChoiceCosts,
        side: Side = Side.LOWER,
        work: Callable[[float], None] = lambda deterministic_seconds: None,
    ) -> None:
        """`work` is told the deterministic seconds that were spent, and may raise to end a long computation."""
        self._work = work
        self.shape = shape
        self.costs = costs
        # stages with operators that were not profiled do not exist, but their neighbours in a block do
        self._forward_ms: Floats = np.where(np.isfinite(costs.forward_ms), costs.forward_ms, 0.0)
        self._side = side
        self._patterns: dict[Key, Patterns] = {}
        self._fronts: dict[tuple[Key, float], Front] = {}
        self._units: dict[tuple[Key, float], list[Front]] = {}
        self._sums: dict[tuple[Key, int, float], Front] = {}
        self._tables: dict[Key, Floats] = {}
        self._saved: dict[Key, Floats] = {}
        self._least_priced: dict[Key, Floats] = {}

    # -- parts of a stage ---------------------------------------------------------------------------------------

    def _cut(self, first: int, end: int, parts: tuple[Span, ...], number_of: Integers) -> list[Span]:
        numbers = range(int(number_of[first]), int(number_of[end - 1]) + 1)
        return [(max(first, parts[number][0]), min(end, parts[number][1])) for number in numbers]

    def units(self, first: int, end: int) -> list[Span]:
        """Return the stage's operators, cut where blocks begin."""
        return self._cut(first, end, self.shape.blocks, self.shape.block_of)

    def pieces(self, first: int, end: int) -> list[Span]:
        """Return operators cut where pieces begin."""
        return self._cut(first, end, self.shape.pieces, self.shape.piece_of)

    def key(self, span: Span, inner: bool, ends_stage: bool) -> Key:
        """Return what the tables of a span depend on; `inner`: the stage has operators before it."""
        first, end = span
        linked = inner and self._side is Side.LOWER and bool(self.shape.virtual[first])
        # only a shared buffer at the end of the stage, or right before it, makes a difference
        differs = ends_stage and bool(self.shape.shares_buffer[max(first, end - 2) : end].any())
        return (*self.shape.key(first, end), int(self.shape.classes[first - 1]) if linked else -1, differs)

    def patterns(self, piece: Span, inner: bool, ends_stage: bool) -> Patterns:
        """Return the patterns of a piece; pieces of equal operators share them."""
        key = self.key(piece, inner, ends_stage)
        if key not in self._patterns:
            x, y = piece
            linked = key[2] >= 0
            self._patterns[key] = piece_patterns(
                self._forward_ms[x:y],
                self.costs.held_bytes[x:y],
                self.shape.shares_buffer[x:y],
                ends_stage=ends_stage,
                joined=self._side is Side.UPPER and self.shape.whole_blocks,
                whole=self.shape.whole_blocks,
                linked_bytes=float(self.costs.held_bytes[x - 1]) if linked else 0.0,
            )
        return self._patterns[key]

    # -- lower bound --------------------------------------------------------------------------------------------

    @cached_property
    def _typical(self) -> list[tuple[Span, bool, bool]]:
        """Return one (piece, inner, ends the chain) for each kind of whole piece."""
        seen: dict[Key, tuple[Span, bool, bool]] = {}
        for piece in self.shape.pieces:
            place = (piece, piece[0] > 0, piece[1] == len(self.shape.classes))
            seen.setdefault(self.key(*place), place)
        return list(seen.values())

    @cached_property
    def peaks(self) -> Floats:
        """Every peak that a whole piece can have, increasing, from 0."""
        return np.unique(np.concatenate([np.zeros(1), *[self.patterns(*place).peak_bytes for place in self._typical]]))

    @cached_property
    def prices(self) -> Floats:
        """Prices of a byte (ms) at which pieces are tabulated, increasing from 0: slopes of their hulls."""
        slopes = [np.zeros(1)]
        for place in self._typical:
            for limit in self.peaks[:: max(1, len(self.peaks) // 12)]:
                front = self.piece_front(*place, float(limit))
                slopes.append(front.segments[1] / front.segments[0])
        distinct = np.unique(np.concatenate(slopes).round(18))
        if len(distinct) > MOST_PRICES:
            distinct = distinct[np.linspace(0, len(distinct) - 1, MOST_PRICES).round().astype(int)]
        return distinct

    def price_table(self, span: Span, inner: bool, ends_stage: bool) -> Floats:
        """Return (peaks, prices): least time - price * saved of part of a stage with peaks of at most each."""
        key = self.key(span, inner, ends_stage)
        if key not in self._tables:
            parts = self.pieces(*span)
            if len(parts) == 1:
                self._tables[key] = self._priced(span, inner, ends_stage, self.peaks)
            else:
                self._tables[key] = np.sum([self.price_table(*place) for place in _places(parts, inner, ends_stage)], 0)
        return self._tables[key]

    def _priced(self, piece: Span, inner: bool, ends_stage: bool, limits: Floats) -> Floats:
        """Return (limits, prices): least time - price * saved over the patterns of a piece within each limit."""
        patterns = self.patterns(piece, inner, ends_stage)
        key = self.key(piece, inner, ends_stage)
        if key not in self._least_priced:
            value = patterns.time_ms[:, None] - patterns.saved_bytes[:, None] * self.prices[None, :]
            self._least_priced[key] = np.minimum.accumulate(value, axis=0)
        return np.asarray(self._least_priced[key][np.searchsorted(patterns.peak_bytes, limits, side="right") - 1])

    def most_saved(self, span: Span, inner: bool, ends_stage: bool) -> Floats:
        """Return, shape (peaks,), the most bytes that part of a stage saves with peaks of at most each."""
        key = self.key(span, inner, ends_stage)
        if key not in self._saved:
            total = np.zeros(len(self.peaks))
            for place in _places(self.pieces(*span), inner, ends_stage):
                patterns = self.patterns(*place)
                best = np.maximum.accumulate(patterns.saved_bytes)
                total += best[np.searchsorted(patterns.peak_bytes, self.peaks, side="right") - 1]
            self._saved[key] = total
        return self._saved[key]

    # -- fronts -------------------------------------------------------------------------------------------------

    def piece_front(self, piece: Span, inner: bool, ends_stage: bool, limit: float) -> Front:
        """Return the front of a piece over the patterns with a peak of at most `limit`; `left` is the pattern."""
        patterns = self.patterns(piece, inner, ends_stage)
        count = int(np.searchsorted(patterns.peak_bytes, limit, side="right"))
        # limits that let the same patterns through share a front
        key = (self.key(piece, inner, ends_stage), float(count))
        if key not in self._fronts:
            index = np.arange(count)
            self._fronts[key] = pareto(patterns.time_ms[:count], patterns.saved_bytes[:count], index, index)
        return self._fronts[key]

    def _unit_fronts(self, unit: Span, inner: bool, ends_stage: bool, limit: float) -> list[Front]:
        """Return the fronts of the first, the first two, … pieces of a unit."""
        key = (self.key(unit, inner, ends_stage), limit)
        if key not in self._units:
            parts = [self.piece_front(*place, limit) for place in _places(self.pieces(*unit), inner, ends_stage)]
            fronts = parts[:1]
            for front in parts[1:]:
                fronts.append(sum_of(fronts[-1], front))
            self._units[key] = fronts
        return self._units[key]

    def _unit_front(self, unit: Span, inner: bool, ends_stage: bool, limit: float) -> Front:
        return self._sum(unit, 1, limit, inner, ends_stage)

    def _sum(self, unit: Span, count: int, limit: float, inner: bool = True, ends_stage: bool = False) -> Front:
        """Return the front of `count` equal units."""
        key = (self.key(unit, inner, ends_stage), count, limit)
        if key not in self._sums:
            self._work(SUM_COST_S)
            if count == 1:
                self._sums[key] = self._unit_fronts(unit, inner, ends_stage, limit)[-1]
            else:
                first, second = _parts(count)
                self._sums[key] = sum_of(self._sum(unit, first, limit), self._sum(unit, second, limit))
        return self._sums[key]

    # -- exact --------------------------------------------------------------------------------------------------

    def cheapest(self, first: int, end: int, need_bytes: float, behind: int) -> Recomputation | None:
        """Return the least recomputation after which a stage fits; for `LOWER`, a lower bound on it.

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
            None if no recomputation makes it fit (`UPPER`: none was found).
        """
        asked = need_bytes
        for _ in range(MOST_TIGHTENINGS):
            found = self._cheapest(first, end, asked, behind)
            if found is not None and self.fits(first, end, need_bytes, behind, found.marks):
                return found
            short = self.shape.allowed and end - first <= MOST_OPERATORS
            if short and (found is not None or self._side is Side.UPPER):
                try:
                    return self._operator_by_operator(first, end, need_bytes, behind)
                except TooManyLabelsError:
                    pass
            if found is None or self._side is Side.LOWER:
                return found
            asked += need_bytes - self._relief(first, end, found.marks, behind)
        return None

    def _operator_by_operator(self, first: int, end: int, need_bytes: float, behind: int) -> Recomputation | None:
        """Return the least recomputation of a short stage whose pieces interact."""
        found = least_recomputation(
            self._forward_ms[first:end].tolist(),
            self.costs.held_bytes[first:end].tolist(),
            self.shape.block_start[first:end].tolist(),
            self.shape.shares_buffer[first:end].tolist(),
            need_bytes=need_bytes,
            in_flight=behind + 1,
            whole_blocks=self.shape.whole_blocks,
        )
        return None if found is None else Recomputation(*found)

    def fits(self, first: int, end: int, need_bytes: float, behind: int, marks: tuple[bool, ...]) -> bool:
        """Return whether recomputing the marked operators really lowers the memory of a stage by so much."""
        missing = need_bytes - self._relief(first, end, marks, behind)
        return need_bytes <= 0 or missing <= BYTE_ROUNDING * (behind + 1)

    def _relief(self, first: int, end: int, marks: tuple[bool, ...], behind: int) -> float:
        """Return by how much recomputing the marked operators really lowers the memory of a stage."""
        saved, peak = saved_and_peak(
            marks,
            self.costs.held_bytes[first:end].tolist(),
            self.shape.block_start[first:end].tolist(),
            self.shape.shares_buffer[first:end].tolist(),
        )
        return float((behind + 1) * saved - peak)

    def _cheapest(self, first: int, end: int, need_bytes: float, behind: int) -> Recomputation | None:
        if need_bytes <= 0:
            return Recomputation(0.0, (False,) * (end - first))
        if not self.shape.allowed:
            return None
        places = _places(self.pieces(first, end), False, True)
        distinct = {self.key(*place): place for place in places}
        limits = np.unique(np.concatenate([self.patterns(*place).peak_bytes for place in distinct.values()]))
        targets = (need_bytes + limits) / (behind + 1)
        bounds = self._bounds(places, limits, targets)
        best = (np.inf, -1, -1, -1.0)
        least_ms = np.inf
        for index in np.argsort(bounds, kind="stable"):
            if bounds[index] >= least_ms * (1 - 1e-12):
                break
            limit, target = float(limits[index]), float(targets[index])
            relaxed = self._relaxed(places, limit, target)
            if relaxed >= least_ms * (1 - 1e-12):
                continue
            time_ms, at_ends, between, slack_ms = self._solve(first, end, limit, target)
            best = min(best, (time_ms, at_ends, between, limit))
            # fronts hold every answer within their slack of the relaxation
            least_ms = min(least_ms, time_ms, relaxed + slack_ms)
        if not np.isfinite(best[0]):
            return None
        chosen = self._unfold_stage(first, end, *best[1:])
        marks: list[bool] = []
        for place, number in zip(places, chosen, strict=True):
            marks.extend(bool(mark) for mark in self.patterns(*place).bits[number])
        return Recomputation(least_ms if self._side is Side.LOWER else best[0], tuple(marks))

    def _relaxed(self, places: list[tuple[Span, bool, bool]], limit: float, target: float) -> float:
        counts: dict[Key, tuple[Front, int]] = {}
        for place in places:
            key = self.key(*place)
            front, count = counts.get(key) or (self.piece_front(*place, limit), 0)
            counts[key] = (front, count + 1)
        return relaxed_ms(list(counts.values()), target)

    def _bounds(self, places: list[tuple[Span, bool, bool]], limits: Floats, targets: Floats) -> Floats:
        """Return the lower bound of the recomputation time for each limit on the peak."""
        total = np.zeros((len(limits), len(self.prices)))
        known: dict[Key, Floats] = {}
        for place in places:
            key = self.key(*place)
            if key not in known:
                known[key] = self._priced(*place, limits)
            total += known[key]
        return np.asarray((total + targets[:, None] * self.prices[None, :]).max(axis=1))

    def _solve(self, first: int, end: int, limit: float, target: float) -> tuple[float, int, int, float]:
        """Return the least time that saves `target` with peaks of at most `limit`, where it is found, and the slack.

        The place is an index into the sums of head and tail, and a point of the front of what is between them, both -1
        where there is nothing of the kind.
        """
        self._work(SOLVE_COST_S)
        units = self.units(first, end)
        head = self._unit_front(units[0], False, len(units) == 1, limit)
        if len(units) == 1:
            time, point = head.cheapest(np.array([target]))
            return float(time[0]), int(point[0]), -1, head.slack_ms
        tail = self._unit_front(units[-1], True, True, limit)
        ends_saved = (head.saved_bytes[:, None] + tail.saved_bytes[None, :]).ravel()
        ends_time = (head.time_ms[:, None] + tail.time_ms[None, :]).ravel()
        runs = self._runs(units[1:-1])
        if not runs:
            fitting = np.where(ends_saved >= target - BYTE_ROUNDING, ends_time, np.inf)
            best = int(np.argmin(fitting))
            return float(fitting[best]), best, -1, min(head.slack_ms, tail.slack_ms)
        middle = self._run_fronts(runs, limit)[-1]
        time, point = middle.cheapest(target - ends_saved)
        total = ends_time + time
        best = int(np.argmin(total))
        return float(total[best]), best, int(point[best]), min(head.slack_ms, middle.slack_ms, tail.slack_ms)

    def _unfold_stage(self, first: int, end: int, at_ends: int, between: int, limit: float) -> list[int]:
        """Return the pattern of each piece of a stage behind what `_solve` found."""
        units = self.units(first, end)
        if len(units) == 1:
            return self._unfold(units[0], False, True, at_ends, limit)
        h, t = divmod(at_ends, len(self._unit_front(units[-1], True, True, limit).time_ms))
        runs = self._runs(units[1:-1])
        inner = self._unfold_runs(runs, self._run_fronts(runs, limit), between, limit) if runs else []
        return [
            *self._unfold(units[0], False, False, h, limit),
            *inner,
            *self._unfold(units[-1], True, True, t, limit),
        ]

    def _runs(self, units: list[Span]) -> list[tuple[Span, int]]:
        """Return equal neighbours as (unit, count)."""
        runs: list[tuple[Span, int]] = []
        for unit in units:
            if runs and self.key(runs[-1][0], True, False) == self.key(unit, True, False):
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((unit, 1))
        return runs

    def _run_fronts(self, runs: list[tuple[Span, int]], limit: float) -> list[Front]:
        """Return the fronts of the first, the first two, … runs."""
        fronts = [self._sum(*runs[0], limit)]
        for unit, count in runs[1:]:
            fronts.append(sum_of(fronts[-1], self._sum(unit, count, limit)))
        return fronts

    def _unfold_runs(self, runs: list[tuple[Span, int]], fronts: list[Front], point: int, limit: float) -> list[int]:
        """Return the pattern of each piece of the runs behind a point of their front."""
        chosen: list[list[int]] = []
        for index in range(len(runs) - 1, -1, -1):
            unit, count = runs[index]
            inner = point
            if index > 0:
                inner = int(fronts[index].right[point])
                point = int(fronts[index].left[point])
            chosen.append(self._unfold_sum(unit, count, inner, limit))
        return [number for part in reversed(chosen) for number in part]

    def _unfold_sum(self, unit: Span, count: int, point: int, limit: float) -> list[int]:
        """Return the pattern of each piece of equal units behind a point of their front."""
        if count == 1:
            return self._unfold(unit, True, False, point, limit)
        first, second = _parts(count)
        front = self._sum(unit, count, limit)
        return [
            *self._unfold_sum(unit, first, int(front.left[point]), limit),
            *self._unfold_sum(unit, second, int(front.right[point]), limit),
        ]

    def _unfold(self, unit: Span, inner: bool, ends_stage: bool, point: int, limit: float) -> list[int]:
        """Return the pattern of each piece of a unit behind a point of its front."""
        places = _places(self.pieces(*unit), inner, ends_stage)
        fronts = self._unit_fronts(unit, inner, ends_stage, limit)
        chosen: list[int] = []
        for index in range(len(places) - 1, 0, -1):
            piece_point = int(fronts[index].right[point])
            chosen.append(int(self.piece_front(*places[index], limit).left[piece_point]))
            point = int(fronts[index].left[point])
        chosen.append(int(self.piece_front(*places[0], limit).left[point]))
        return chosen[::-1]


def _parts(count: int) -> tuple[int, int]:
    """Return how equal units are summed: one more at a time, but many in halves."""
    return (count - 1, 1) if count <= MOST_BY_ONE else (count // 2, count - count // 2)


def _places(pieces: list[Span], inner: bool, ends_stage: bool) -> list[tuple[Span, bool, bool]]:
    """Return (piece, has operators of the stage before it, ends the stage) for consecutive pieces."""
    last = len(pieces) - 1
    return [(piece, inner or index > 0, ends_stage and index == last) for index, piece in enumerate(pieces)]
