"""Pareto fronts of (time, bytes saved), and their sums over the pieces of a stage."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

BYTE_ROUNDING = 1e-3
"""Sizes are whole bytes or halves of them: what differs by less is rounding of floating-point sums."""
MOST_POINTS = 600
"""Points of a sum that are kept: those nearest to the convex hull."""


@dataclass(frozen=True, eq=False)
class Front:
    """Points by increasing time and increasing bytes saved; `left` and `right` name what each point was made of.

    For the front of a piece `left` is the number of the pattern; for a sum of two fronts both are indices into them.
    """

    time_ms: Floats
    saved_bytes: Floats
    left: Integers
    right: Integers
    slack_ms: float = np.inf
    """Points farther than this above the convex hull may be missing, here or in what it was made of."""

    def cheapest(self, saved_bytes: Floats) -> tuple[Floats, Integers]:
        """Return the least time that saves at least so much, and its point; infinity and -1 where none does."""
        at = np.searchsorted(self.saved_bytes, saved_bytes - BYTE_ROUNDING)
        found = at < len(self.time_ms)
        index = np.where(found, at, -1)
        return np.where(found, self.time_ms[np.minimum(at, len(self.time_ms) - 1)], np.inf), index

    @cached_property
    def hull(self) -> Integers:
        """Indices of the points on the lower convex hull of time over bytes saved."""
        kept: list[int] = []
        time, saved = self.time_ms.tolist(), self.saved_bytes.tolist()
        for index in range(len(time)):
            while len(kept) >= 2:
                a, b = kept[-2], kept[-1]
                if (time[b] - time[a]) * (saved[index] - saved[a]) < (time[index] - time[a]) * (saved[b] - saved[a]):
                    break
                kept.pop()
            kept.append(index)
        return np.array(kept)

    @cached_property
    def segments(self) -> tuple[Floats, Floats]:
        """(bytes, ms) of each segment of the hull, from the cheapest byte to the dearest."""
        return np.diff(self.saved_bytes[self.hull]), np.diff(self.time_ms[self.hull])


def pareto(time_ms: Floats, saved_bytes: Floats, left: Integers, right: Integers, slack_ms: float = np.inf) -> Front:
    """Return the points that no other dominates (at most as slow, saves as much)."""
    order = np.lexsort((-saved_bytes, time_ms))
    saved = saved_bytes[order]
    best = np.maximum.accumulate(saved)
    keep = np.empty(len(order), dtype=np.bool_)
    keep[0] = True
    keep[1:] = saved[1:] > best[:-1]
    order = order[keep]
    return Front(time_ms[order], saved_bytes[order], left[order], right[order], slack_ms)


def sum_of(first: Front, second: Front) -> Front:
    """Return the front of all sums of a point of each; of many points, those nearest to the convex hull."""
    time = (first.time_ms[:, None] + second.time_ms[None, :]).ravel()
    saved = (first.saved_bytes[:, None] + second.saved_bytes[None, :]).ravel()
    count = len(second.time_ms)
    index = np.arange(len(time))
    slack_ms = min(first.slack_ms, second.slack_ms)
    front = pareto(time, saved, index // count, index % count, slack_ms)
    if len(front.time_ms) <= MOST_POINTS:
        return front
    above = front.time_ms - np.interp(front.saved_bytes, front.saved_bytes[front.hull], front.time_ms[front.hull])
    slack_ms = min(slack_ms, float(np.partition(above, MOST_POINTS)[MOST_POINTS]))
    keep = above <= slack_ms
    return Front(front.time_ms[keep], front.saved_bytes[keep], front.left[keep], front.right[keep], slack_ms)


def relaxed_ms(fronts: list[tuple[Front, int]], saved_bytes: float) -> float:
    """Return the least time that saves so much if the points of fronts may be mixed: the linear relaxation.

    Parameters
    ----------
    fronts
        Fronts with how many times each may be used.
    saved_bytes
        What must be saved in all.

    Returns
    -------
    float
        Infinite if all of them together do not save enough.
    """
    if saved_bytes <= 0:
        return 0.0
    saved = np.concatenate([front.segments[0] * count for front, count in fronts])
    time = np.concatenate([front.segments[1] * count for front, count in fronts])
    order = np.argsort(time / saved, kind="stable")
    total_saved, total_time = np.cumsum(saved[order]), np.cumsum(time[order])
    at = int(np.searchsorted(total_saved, saved_bytes - BYTE_ROUNDING))
    if at == len(order):
        return np.inf
    excess = max(0.0, (total_saved[at] - saved_bytes) / saved[order[at]])
    return float(total_time[at] - excess * time[order[at]])
