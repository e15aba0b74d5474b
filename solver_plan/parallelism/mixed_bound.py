"""The least time of one stage with a layout for each operator: dynamic programming over memory in branch and bound.

Sums     V_j(state, m): least time of the operators up to j with memory m so far, in steps of 1 / STEPS of the room,
         rounded down, so that V is a lower bound; what an operator holds counts with its successor's state    → _row
Boxes    what the allocator reserves is a maximum F over forwards plus one, B, over backwards. In a box [F0, F1] x
         [B0, B1] states that reserve more than F1 or B1 are forbidden, and F0 + B0 of the memory is gone. The row that
         is best in a box splits it at what the row really reserves                                    → least, _split
States   that no path as fast as the best known row passes, at any of some prices of a byte, are left out      → _useful

The peak that recomputation brings back is neglected in the bound; rows that do not fit for that, or for the rounding,
are looked for again with as much less room.
"""

import heapq

import numpy as np

from solver_plan.parallelism.choices import Bools, Floats, Integers
from solver_plan.parallelism.mixed_search import IMPOSSIBLE_MS, StageSearch

STEPS = 6000
"""Steps of memory."""
MOST_BOXES = 12
REPAIRS = 3
"""Times that a row is looked for with less room."""
TOLERANCE = 1e-4
"""Relative: boxes that promise no more are not split."""
SHIFT_COST_S = 5e-9
"""Deterministic seconds of one step of memory in one transition."""

Box = tuple[float, float, float, float]
"""Least and most that is reserved: (forward least, backward least, forward most, backward most)."""


class StageBound:
    """Branch and bound for one stage, from the rows of a `StageSearch`."""

    def __init__(self, search: StageSearch) -> None:
        self._search = search

    def least(self, row: Integers) -> tuple[float, Integers]:
        """Return a lower bound on the time of every row that fits, in ms, and the best row found, from one that fits.

        The bound is at most the time of the row.
        """
        search = self._search
        best, best_ms = row, float(search.time_ms(row[None])[0])
        proven_ms = np.inf
        boxes: list[tuple[float, int, Box]] = [(0.0, 0, (*search.least_reserved_bytes(), np.inf, np.inf))]
        for number in range(1, MOST_BOXES):
            if not boxes or boxes[0][0] >= best_ms * (1 - TOLERANCE):
                break
            least_ms, _, (forward_low, backward_low, forward_high, backward_high) = heapq.heappop(boxes)
            allowed = search.reserving_at_most(forward_high, backward_high)
            room = search.limit_bytes - forward_low - backward_low
            found_ms, found = self._row(room, allowed, best_ms)
            least_ms = max(least_ms, min(found_ms, best_ms))
            if found is None:
                proven_ms = min(proven_ms, least_ms)
                continue
            repaired = self._repaired(found, room, allowed, best_ms)
            if repaired is not None:
                best, best_ms = repaired, float(search.time_ms(repaired[None])[0])
            parts = _split((forward_low, backward_low, forward_high, backward_high), search.reserved_bytes(found))
            if not parts:
                proven_ms = min(proven_ms, least_ms)
            for part, box in enumerate(parts):
                heapq.heappush(boxes, (least_ms, 2 * number + part, box))
        proven_ms = min(proven_ms, best_ms, *(box[0] for box in boxes))
        return proven_ms, best

    def _repaired(self, row: Integers, room: float, allowed: Bools, best_ms: float) -> Integers | None:
        """Return a row that really fits and takes less than `best_ms`; None: none was found.

        Looks, by bisection, for the most room at which the best row fits with its peak and without rounding, among rows
        that reserve no more than the given one.
        """
        search = self._search
        missing = float(search.memory_bytes(row[None])[0]) - search.limit_bytes
        if missing <= 0:
            return search.improved(row)
        allowed = allowed & search.reserving_at_most(*search.reserved_bytes(row))
        repaired: Integers | None = None
        low, high, room = 0.0, room, room - missing
        for _ in range(REPAIRS):
            _, found = self._row(room, allowed, best_ms)
            if found is None:
                low, room = room, (room + high) / 2
                continue
            missing = float(search.memory_bytes(found[None])[0]) - search.limit_bytes
            if missing > 0:
                high, room = room, max((low + room) / 2, room - missing)
            else:
                repaired = search.improved(found)
                best_ms = float(search.time_ms(repaired[None])[0])
                low, room = room, (room + high) / 2
        return repaired

    def _row(self, room: float, allowed: Bools, most_ms: float) -> tuple[float, Integers | None]:
        """Return the least time with so much room for what is summed, rounded down, and its row.

        Infinite and None where there is none that takes less than `most_ms`.
        """
        search, step = self._search, room / STEPS
        if room <= 0:
            return np.inf, None
        useful = self._useful(room, allowed, most_ms)
        states = [np.flatnonzero(useful[:, j]) for j in range(search.count)]
        if not all(len(found) for found in states):
            return np.inf, None
        begins, held, adds = search.sizes()
        values: list[Floats] = []
        value = np.full((len(states[0]), STEPS + 1), np.inf)
        for a, state in enumerate(states[0]):
            at = int(begins[state] / step)
            if at <= STEPS:
                value[a, at] = search.unit_ms[state, 0]
        values.append(value)
        for j in range(1, search.count):
            before, now = states[j - 1], states[j]
            search.work(SHIFT_COST_S * len(before) * len(now) * STEPS)
            after = np.full((len(now), STEPS + 1), np.inf)
            grows = (
                (adds[now, j][None] + (held[before, j - 1][:, None] + search.pair_bytes[j - 1][np.ix_(before, now)]))
                / step
                + 1e-9
            ).astype(np.int64)
            costs = search.pair_ms[j - 1][np.ix_(before, now)] + search.unit_ms[now, j]
            for b in range(len(now)):
                for a in range(len(before)):
                    shift = int(grows[a, b])
                    if shift <= STEPS and costs[a, b] < IMPOSSIBLE_MS:
                        np.minimum(after[b, shift:], value[a, : STEPS + 1 - shift] + costs[a, b], out=after[b, shift:])
            value = after
            values.append(value)
        ends = (held[states[-1], search.count - 1] / step).astype(np.int64)
        least, last = np.inf, (0, 0)
        for a, end in enumerate(ends):
            if end <= STEPS:
                place = int(value[a, : STEPS + 1 - end].argmin())
                if value[a, place] < least:
                    least, last = float(value[a, place]), (a, place)
        if least >= most_ms:
            return np.inf, None
        return least, self._traced(values, states, last, step)

    def _traced(self, values: list[Floats], states: list[Integers], last: tuple[int, int], step: float) -> Integers:
        """Return the row behind a value."""
        search = self._search
        _, held, adds = search.sizes()
        row = np.empty(search.count, dtype=np.int64)
        b, place = last
        for j in range(search.count - 1, 0, -1):
            now, before = states[j][b], states[j - 1]
            row[j] = now
            grows = ((adds[now, j] + (held[before, j - 1] + search.pair_bytes[j - 1][before, now])) / step).astype(
                np.int64
            )
            costs = search.pair_ms[j - 1][before, now] + search.unit_ms[now, j]
            come = place - grows
            value = np.where(come >= 0, values[j - 1][np.arange(len(before)), np.maximum(come, 0)] + costs, np.inf)
            b = int(value.argmin())
            place = int(come[b])
        row[0] = states[0][b]
        return row

    def _useful(self, room: float, allowed: Bools, most_ms: float) -> Bools:
        """Return, shape (states, n), which states may be part of a row that takes less than `most_ms`."""
        search = self._search
        prices = search.prices
        unit = np.where(allowed, search.unit_ms, IMPOSSIBLE_MS)[:, :, None] + search.unit_bytes[:, :, None] * prices
        front, back = np.empty_like(unit), np.empty_like(unit)
        front[:, 0] = unit[:, 0]
        back[:, -1] = unit[:, -1]
        for j in range(1, search.count):
            change = search.pair_ms[j - 1][:, :, None] + search.pair_bytes[j - 1][:, :, None] * prices
            front[:, j] = (front[:, j - 1][:, None] + change).min(axis=0) + unit[:, j]
        for j in range(search.count - 1, 0, -1):
            change = search.pair_ms[j - 1][:, :, None] + search.pair_bytes[j - 1][:, :, None] * prices
            back[:, j - 1] = (back[:, j][None] + change).min(axis=1) + unit[:, j - 1]
        through = (front + back - unit - room * prices).max(axis=2)
        return np.asarray(through < most_ms)


def _split(box: Box, reserved: tuple[float, float]) -> list[Box]:
    """Return the parts of a box where rows reserve less than one row of it, and at least as much; none: it is tight."""
    forward_least, backward_least, forward_most, backward_most = box
    forward, backward = reserved
    if forward <= forward_least and backward <= backward_least:
        return []
    if forward - forward_least > backward - backward_least:
        less = np.nextafter(forward, 0.0)
        return [
            (forward_least, backward_least, less, backward_most),
            (forward, backward_least, forward_most, backward_most),
        ]
    less = np.nextafter(backward, 0.0)
    return [(forward_least, backward_least, forward_most, less), (forward_least, backward, forward_most, backward_most)]
