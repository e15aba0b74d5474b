"""Pareto fronts of (time, bytes saved), and their sums over the pieces of a stage."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

BYTE_ROUNDING = 1e-3
"""Sizes are whole bytes or halves of them: what differs by less is rounding of floating-point sums."""


@dataclass(frozen=True, eq=False)
class Front:
    """Points by increasing time and increasing bytes saved; `left` and `right` name what each point was made of.

    For the front of a piece `left` is the number of the pattern; for a sum of two fronts both are indices into them.
    """

    time_ms: Floats
    saved_bytes: Floats
    left: Integers
    right: Integers

    def cheapest(self, saved_bytes: Floats) -> tuple[Floats, Integers]:
        """Return the least time that saves at least so much, and its point; infinity and -1 where none does."""
        at = np.searchsorted(self.saved_bytes, saved_bytes - BYTE_ROUNDING)
        found = at < len(self.time_ms)
        index = np.where(found, at, -1)
        return np.where(found, self.time_ms[np.minimum(at, len(self.time_ms) - 1)], np.inf), index

    @cached_property
    def steepest_step_ms(self) -> float:
        """Largest difference of time between neighbours on the convex hull."""
        return float(np.diff(self.time_ms[hull(self)]).max(initial=0.0))


def pareto(time_ms: Floats, saved_bytes: Floats, left: Integers, right: Integers) -> Front:
    """Return the points that no other dominates (at most as slow, saves as much)."""
    order = np.lexsort((-saved_bytes, time_ms))
    saved = saved_bytes[order]
    best = np.maximum.accumulate(saved)
    keep = np.empty(len(order), dtype=np.bool_)
    keep[0] = True
    keep[1:] = saved[1:] > best[:-1]
    order = order[keep]
    return Front(time_ms[order], saved_bytes[order], left[order], right[order])


def hull(front: Front) -> Integers:
    """Return the indices of the points on the lower convex hull of time over bytes saved."""
    kept: list[int] = []
    time, saved = front.time_ms, front.saved_bytes
    for index in range(len(time)):
        while len(kept) >= 2:
            a, b = kept[-2], kept[-1]
            if (time[b] - time[a]) * (saved[index] - saved[a]) < (time[index] - time[a]) * (saved[b] - saved[a]):
                break
            kept.pop()
        kept.append(index)
    return np.array(kept)


def sum_of(first: Front, second: Front, slack_ms: float) -> Front:
    """Return the front of all sums of a point of each.

    Points that lie more than `slack_ms` above the convex hull of the sum are dropped: a stage whose best answer is
    within `slack_ms` of its linear relaxation never uses them.
    """
    time = (first.time_ms[:, None] + second.time_ms[None, :]).ravel()
    saved = (first.saved_bytes[:, None] + second.saved_bytes[None, :]).ravel()
    count = len(second.time_ms)
    index = np.arange(len(time))
    front = pareto(time, saved, index // count, index % count)
    if len(front.time_ms) <= 200:
        return front
    corners = hull(front)
    relaxed = np.interp(front.saved_bytes, front.saved_bytes[corners], front.time_ms[corners])
    keep = front.time_ms <= relaxed + slack_ms
    return Front(front.time_ms[keep], front.saved_bytes[keep], front.left[keep], front.right[keep])
