"""One stage whose operators may each have a layout of their own: as fast as it gets within the memory, a heuristic.

A stage of n operators is a row of n states; a state is a layout and whether the operator is recomputed. Time, and
memory but for two terms, are sums over operators and neighbours; everything here works on many rows at once.

    time     sum of unit_ms(state_j) + sum of pair_ms(state_j, state_j+1)                               → time_ms
    memory   sum of unit_bytes(state_j) + sum of pair_bytes(state_j, state_j+1) + peak + max(reserved, weights)
                                                                                                    → memory_bytes
    paths    shortest paths at many prices of a byte, under several caps on what the allocator reserves    → _paths
    changes  the best rows are changed, a run of operators at a time, while that is faster and fits     → _improved
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from solver_plan.parallelism.choices import Bools, Choice, Floats, Integers
from solver_plan.parallelism.recomputation.shape import ChainShape

PATH_PRICES = 24
"""Prices tried at first."""
MARGIN = 1.5
"""Factor by which prices go beyond those of the operators: layouts give way too."""
REFINEMENTS = 8
"""Prices tried between the dearest whose path does not fit and the next one, whose path does."""
CAPS = (0.0, 0.35, 1.0)
"""Between the least that the stage must reserve (0) and what the fastest layouts reserve (1)."""
LONGEST_RUN = 24
"""Operators that are changed at once."""
MOST_CHANGES = 200
STARTS = 4
"""Rows of paths that are improved."""
CHUNK = 256
"""Rows whose memory is counted at once."""
IMPOSSIBLE_MS = 1e9
"""Stands for infinity where differences are taken."""
TRANSITION_COST_S = 3e-9
"""Deterministic seconds of one transition of a shortest path."""
OPERATOR_COST_S = 3e-5
"""Deterministic seconds of each operator of a path, and of a round of changes."""
ROW_COST_S = 1e-8
"""Deterministic seconds of one operator of a row whose memory is counted, and of one change."""


@dataclass(frozen=True, eq=False)
class Options:
    """The layouts of a number of devices; arrays have shape (layouts, operators)."""

    choices: tuple[Choice, ...]
    forward_ms: Floats
    busy_ms: Floats
    input_bytes: Floats
    weight_bytes: Floats
    held_bytes: Floats
    forward_reserved_bytes: Floats
    backward_reserved_bytes: Floats
    resharding_ms: Floats
    """(operators, layouts, layouts): from the layout of the operator before to that of the operator."""
    receive_ms: Floats
    """(2, layouts, operators): transfer of an operator's input over the intra- and the inter-node link."""
    send_ms: Floats
    """(2, layouts, operators): transfer of its output over both links."""

    @cached_property
    def least_receive_ms(self) -> Floats:
        """What receiving the input takes at least more than with the best layout, over either link.

        Nothing of the kind holds for sending: what is sent is read at the degree of the stage's first operator.
        """
        more: Floats = self.receive_ms - self.receive_ms.min(axis=1, keepdims=True)
        return np.asarray(more.min(axis=0))


def prices_of_a_byte(forward_ms: Floats, saved_bytes: Floats, count: int) -> Floats:
    """Return 0 and `count` prices, in ms, that span those at which recomputing an operator pays.

    Parameters
    ----------
    forward_ms
        What recomputing takes, shape (layouts, operators).
    saved_bytes
        What it saves, all micro-batches in flight together, of the same shape.
    count
        Number of prices beside 0.
    """
    known = np.isfinite(forward_ms) & (saved_bytes > 0) & (forward_ms > 0)
    if not known.any():
        return np.zeros(1)
    worth = forward_ms[known] / saved_bytes[known]
    return np.concatenate([np.zeros(1), np.geomspace(worth.min() / MARGIN, worth.max() * MARGIN, count)])


@dataclass(frozen=True, slots=True)
class MixedStage:
    """A stage that fits: a layout for each operator and the recomputed operators."""

    time_ms: float
    """Of the transfers only what they take more than with the best layout."""
    layouts: tuple[int, ...]
    marks: tuple[bool, ...]


class StageSearch:
    """The search for one stage [first, end) with `behind` stages behind it.

    `links` are those before and behind it, 0 within a node and 1 between nodes; None: any, so that transfers count with
    the least that they take more than with the best layout.
    """

    def __init__(
        self,
        options: Options,
        shape: ChainShape,
        limit_bytes: int,
        state_bytes_per_weight_byte: float,
        work: Callable[[float], None],
        place: tuple[int, int, int],
        links: tuple[int, int] | None,
    ) -> None:
        first, end, behind = place
        self.work = work
        self.limit_bytes = limit_bytes
        self.count = end - first
        self._at = np.arange(end - first)
        self._layouts = len(options.choices)
        self._states = self._layouts * (2 if shape.allowed else 1)
        self._block_start, self._shares_buffer = shape.block_start[first:end], shape.shares_buffer[first:end]
        layout = np.arange(self._states) % self._layouts
        marked = np.arange(self._states) >= self._layouts

        def of_states(values: Floats) -> Floats:
            return values[layout, first:end]

        self._weight_bytes, self._held_bytes = of_states(options.weight_bytes), of_states(options.held_bytes)
        self._forward_reserved_bytes = of_states(options.forward_reserved_bytes)
        self._backward_reserved_bytes = of_states(options.backward_reserved_bytes)
        self.unit_ms = of_states(options.busy_ms)
        self.unit_ms[self._layouts :] += options.forward_ms[:, first:end][: self._states - self._layouts]
        if links is None:
            self.unit_ms[:, 0] += options.least_receive_ms[layout, first]
        else:
            receive_ms, send_ms = options.receive_ms[links[0], :, first], options.send_ms[links[1], :, end - 1]
            self.unit_ms[:, 0] += (receive_ms - receive_ms.min())[layout]
            self.unit_ms[:, -1] += (send_ms - send_ms.min())[layout]
        np.minimum(self.unit_ms, IMPOSSIBLE_MS, out=self.unit_ms)
        self.unit_bytes = state_bytes_per_weight_byte * self._weight_bytes + (behind + 1) * self._held_bytes
        forward_ms = options.forward_ms[:, first:end]
        self.prices = prices_of_a_byte(forward_ms, (behind + 1) * self._held_bytes[: self._layouts], PATH_PRICES)
        self._input_bytes = (behind + 1) * options.input_bytes[layout, first]
        self.unit_bytes[:, 0] += self._input_bytes
        self._in_flight = behind + 1
        self._state_bytes = state_bytes_per_weight_byte
        # (n - 1, states, states): from operator j to j + 1
        resharding = options.resharding_ms[first + 1 : end]
        self.pair_ms = np.minimum(resharding[:, layout[:, None], layout], IMPOSSIBLE_MS)
        in_block = ~self._block_start[1:, None, None]
        if shape.whole_blocks:
            self.pair_ms[(marked[:, None] != marked)[None] & in_block] = IMPOSSIBLE_MS
        saves = (marked[:, None] & marked)[None] & in_block
        self.pair_bytes = np.where(saves, -(behind + 1) * self._held_bytes.T[:-1, :, None], 0.0)

    def best_row(self) -> Integers | None:
        """Return a row that fits, as fast as paths and changes of runs make it; None if no path fits."""
        rows = self._paths_that_fit()
        if not len(rows):
            return None
        order = np.argsort(self.time_ms(rows), kind="stable")[:STARTS]
        improved = np.stack([self.improved(rows[index]) for index in order])
        time_ms = self.time_ms(improved)
        return np.asarray(improved[time_ms.argmin()]) if time_ms.min() < IMPOSSIBLE_MS else None

    def stage(self, row: Integers) -> MixedStage:
        """Return a row as a stage."""
        layouts, marks = row % self._layouts, row >= self._layouts
        return MixedStage(float(self.time_ms(row[None])[0]), tuple(layouts.tolist()), tuple(marks.tolist()))

    # -- exact --------------------------------------------------------------------------------------------------

    def _summed(self, unit: Floats, pair: Floats, rows: Integers) -> Floats:
        total = unit[rows, self._at].sum(axis=1) + pair[self._at[:-1], rows[:, :-1], rows[:, 1:]].sum(axis=1)
        return np.asarray(total)

    def time_ms(self, rows: Integers) -> Floats:
        """Return the time of rows, of transfers what they take more than with the best layout, (rows, n) to (rows,)."""
        return self._summed(self.unit_ms, self.pair_ms, rows)

    def memory_bytes(self, rows: Integers) -> Floats:
        """Return the memory of rows on each device as the cost model counts it, shape (rows, n) to (rows,)."""
        return self._but_peak_bytes(rows) + self._peak_bytes(rows)

    def _but_peak_bytes(self, rows: Integers) -> Floats:
        self.work(ROW_COST_S * rows.size)
        at = self._at[:-1]
        forward = self._forward_reserved_bytes[rows[:, :-1], at].max(axis=1, initial=0.0)
        backward = self._backward_reserved_bytes[rows[:, :-1], at].max(axis=1, initial=0.0)
        weights = self._weight_bytes[rows, self._at].sum(axis=1)
        summed = self._summed(self.unit_bytes, self.pair_bytes, rows)
        return np.asarray(summed + np.maximum(forward + backward, weights))

    def _peak_bytes(self, rows: Integers) -> Floats:
        """Return what the largest recomputed segment brings back at a time; see `costs/recompute`."""
        marks, held = rows >= self._layouts, self._held_bytes[rows, self._at]
        both = marks[:, :-1] & marks[:, 1:]
        peak, segment = np.zeros(len(rows)), np.zeros(len(rows))
        for j in range(self.count - 1):
            pair = both[:, j]
            closes = (self._block_start[j + 1] or j + 2 == self.count) and not self._shares_buffer[j]
            grown = np.where(pair, segment + held[:, j], segment)
            np.maximum(peak, grown if closes else np.where(pair, 0.0, grown), out=peak)
            segment = np.zeros(len(rows)) if closes else np.where(pair, grown, 0.0)
        return peak

    def sizes(self) -> tuple[Floats, Floats, Floats]:
        """Return the memory of states as it adds up from operator to operator, none of it negative.

        What the first operator (states,) brings, what operators hold, and what the others bring, both (states, n).
        """
        weights, held = self._state_bytes * self._weight_bytes, self._in_flight * self._held_bytes
        return weights[:, 0] + self._input_bytes, held, weights

    def reserved_bytes(self, row: Integers) -> tuple[float, float]:
        """Return the most that forwards and backwards of a row reserve; the last operator's does not count."""
        at, states = self._at[:-1], row[:-1]
        return (
            float(self._forward_reserved_bytes[states, at].max(initial=0.0)),
            float(self._backward_reserved_bytes[states, at].max(initial=0.0)),
        )

    def least_reserved_bytes(self) -> tuple[float, float]:
        """Return the least that forwards and backwards of any row reserve."""
        return (
            float(self._forward_reserved_bytes[:, :-1].min(axis=0).max(initial=0.0)),
            float(self._backward_reserved_bytes[:, :-1].min(axis=0).max(initial=0.0)),
        )

    def reserving_at_most(self, forward_bytes: float, backward_bytes: float) -> Bools:
        """Return, shape (states, n), which states reserve no more."""
        allowed = (self._forward_reserved_bytes <= forward_bytes) & (self._backward_reserved_bytes <= backward_bytes)
        allowed[:, -1] = True  # what the last operator reserves does not count
        return np.asarray(allowed)

    # -- paths --------------------------------------------------------------------------------------------------

    def _paths_that_fit(self) -> Integers:
        """Return the rows of paths that fit, under every cap, at prices that are refined where they begin to fit."""
        found = []
        for allowed in self._caps():
            rows = self._paths(self.prices, allowed)
            fits = self.memory_bytes(rows) <= self.limit_bytes
            found.append(rows[fits])
            if fits.any() and not fits[0]:
                cheapest = int(np.flatnonzero(fits)[0])
                low, high = self.prices[cheapest - 1 : cheapest + 1]
                rows = self._paths(np.geomspace(max(low, high / 100), high, REFINEMENTS + 2)[1:-1], allowed)
                found.append(rows[self.memory_bytes(rows) <= self.limit_bytes])
        return np.unique(np.concatenate(found), axis=0)

    def _caps(self) -> list[Bools]:
        """Return, shape (states, n) each, which states are allowed under caps on what is reserved."""
        found: dict[bytes, Bools] = {}
        for forward_cap in self._levels(self._forward_reserved_bytes):
            for backward_cap in self._levels(self._backward_reserved_bytes):
                allowed = self.reserving_at_most(forward_cap, backward_cap)
                if allowed.any(axis=0).all():
                    found.setdefault(allowed.tobytes(), allowed)
        return list(found.values())

    def _levels(self, reserved: Floats) -> list[float]:
        at = self._at[: max(1, self.count - 1)]
        fastest = self.unit_ms.argmin(axis=0)[at]
        least = float(reserved[:, at].min(axis=0).max())
        free = float(reserved[fastest, at].max())
        return sorted({least + cap * max(0.0, free - least) for cap in CAPS})

    def _paths(self, prices: Floats, allowed: Bools) -> Integers:
        """Return the shortest path at each price of a byte, shape (prices, n)."""
        self.work(self.count * (TRANSITION_COST_S * len(prices) * self._states**2 + OPERATOR_COST_S))
        unit = np.where(allowed, self.unit_ms, IMPOSSIBLE_MS)[:, :, None] + self.unit_bytes[:, :, None] * prices
        back = np.zeros((self.count, self._states, len(prices)), dtype=np.int64)
        value = unit[:, 0]
        for j in range(1, self.count):
            change = self.pair_ms[j - 1][:, :, None] + self.pair_bytes[j - 1][:, :, None] * prices
            through = value[:, None] + change
            back[j] = through.argmin(axis=0)
            value = through.min(axis=0) + unit[:, j]
        state = value.argmin(axis=0)
        rows = np.empty((len(prices), self.count), dtype=np.int64)
        for j in range(self.count - 1, -1, -1):
            rows[:, j] = state
            state = back[j, state, np.arange(len(prices))]
        return rows

    # -- changes ------------------------------------------------------------------------------------------------

    def improved(self, row: Integers) -> Integers:
        """Change runs of operators, the one that makes the row fastest first, while the row is faster and fits."""
        for _ in range(MOST_CHANGES):
            changed = self._best_change(row)
            if changed is None:
                break
            row = changed
        return row

    def _best_change(self, row: Integers) -> Integers | None:
        """Return the fastest row that fits of those with one run changed; None: none is faster than this one.

        A run takes a state, or a layout while it keeps its marks, or marks all that was not marked and the reverse.
        """
        n, layouts = self.count, self._layouts
        first, length = (grid.ravel() for grid in np.meshgrid(self._at, np.arange(1, LONGEST_RUN + 1)))
        first, end = first[first + length <= n], (first + length)[first + length <= n]
        templates = [np.full(n, state) for state in range(self._states)]
        if self._states > layouts:
            templates.append((row + layouts) % self._states)
            templates += [layout + np.where(row < layouts, 0, layouts) for layout in range(layouts)]
        whole = np.stack(templates)
        self.work(OPERATOR_COST_S * n + ROW_COST_S * len(whole) * len(first))
        change_ms = self._change(self.unit_ms, self.pair_ms, row, whole, first, end)
        change_bytes = self._change(self.unit_bytes, self.pair_bytes, row, whole, first, end)
        room = (
            self.limit_bytes
            - sum(self.least_reserved_bytes())
            - self._summed(self.unit_bytes, self.pair_bytes, row[None])[0]
        )
        template, run = np.nonzero((change_ms < -1e-9) & (change_bytes <= room))
        order = np.argsort(change_ms[template, run], kind="stable")
        for begin in range(0, len(order), CHUNK):
            chosen = order[begin : begin + CHUNK]
            inside = (self._at >= first[run[chosen], None]) & (self._at < end[run[chosen], None])
            rows = np.where(inside, whole[template[chosen]], row)
            rows = rows[self._but_peak_bytes(rows) <= self.limit_bytes]
            fits = np.flatnonzero(self.memory_bytes(rows) <= self.limit_bytes)
            if len(fits):
                return np.asarray(rows[fits[0]])
        return None

    def _change(
        self, unit: Floats, pair: Floats, row: Integers, whole: Integers, first: Integers, end: Integers
    ) -> Floats:
        """Return what a sum changes by if runs [first, end) of a row become those of whole rows, (whole rows, runs)."""
        at = self._at[:-1]
        units = _prefix_sums(unit[whole, self._at] - unit[row, self._at])
        old_pairs = pair[at, row[:-1], row[1:]]
        pairs = _prefix_sums(pair[at, whole[:, :-1], whole[:, 1:]] - old_pairs)
        begins = np.pad(pair[at, row[:-1], whole[:, 1:]] - old_pairs, ((0, 0), (1, 0)))
        ends = np.pad(pair[at, whole[:, :-1], row[1:]] - old_pairs, ((0, 0), (0, 1)))
        total = units[:, end] - units[:, first] + pairs[:, end - 1] - pairs[:, first]
        return np.asarray(total + begins[:, first] + ends[:, end - 1])


def _prefix_sums(values: Floats) -> Floats:
    """Return the sums of the first 0, 1, 2, … of each row."""
    return np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)
