"""Whole-number time for CP-SAT: a tick so fine that all times are whole, or else fine enough to lose little.

Durations are rounded down: the model then allows at least every plan of the problem, so its bound is valid, and the
plan is timed again exactly from the order that the model found.
"""

from collections.abc import Iterable

FINENESS = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000)
"""Ticks per ms that are tried, coarse to fine; thirds because a forward is a third of a layer's time."""
LONGEST_TICKS = 20_000_000
"""Time horizon that CP-SAT still handles well."""


def ticks_per_ms(times_ms: Iterable[float], horizon_ms: float) -> int:
    """Return the coarsest fineness at which every time is whole; else the finest with a horizon CP-SAT can handle."""
    times = sorted(set(times_ms))
    usable = [each for each in FINENESS if horizon_ms * each <= LONGEST_TICKS] or [1]
    for fineness in usable:
        if all(abs(t * fineness - round(t * fineness)) <= 1e-7 * max(1.0, t * fineness) for t in times):
            return fineness
    return usable[-1]


def floor_ticks(time_ms: float, fineness: int) -> int:
    """Return a time in whole ticks, rounded down; a time that is whole but for floating-point error stays whole."""
    exact = time_ms * fineness
    nearest = round(exact)
    return nearest if abs(exact - nearest) <= 1e-7 * max(1.0, exact) else int(exact)
