"""Whole-number time and memory for CP-SAT: a tick so fine that all times are whole, or else fine enough to lose little.

Durations are rounded down: the model then allows at least every plan of the problem, so its bound is valid, and the
plan is timed again exactly from the order that the model found.
"""

from collections.abc import Iterable
from math import gcd

from solver_plan.wavefront.instance import Instance

FINENESS = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000)
"""Ticks per ms that are tried, coarse to fine; thirds because a forward is a third of a layer's time."""
LONGEST_TICKS = 20_000_000
"""Time horizon that CP-SAT still handles well."""
COARSE: tuple[int, ...] = tuple(digit * 10**power for power in range(5) for digit in (1, 2, 5))
"""Ticks per ms that are tried where no bound depends on them."""
COARSE_ERROR = 0.002
"""Of the horizon, at most, by which the layers of a component then look shorter or longer."""
LARGEST_UNIT_COUNT = 10**9
"""Memory is counted in units of bytes so that a device has at most this many."""


def ticks_per_ms(times_ms: Iterable[float], horizon_ms: float) -> int:
    """Return the coarsest fineness at which every time is whole; else the finest with a horizon CP-SAT can handle."""
    times = sorted(set(times_ms))
    usable = [each for each in FINENESS if horizon_ms * each <= LONGEST_TICKS] or [1]
    for fineness in usable:
        if all(abs(t * fineness - round(t * fineness)) <= 1e-7 * max(1.0, t * fineness) for t in times):
            return fineness
    return usable[-1]


def coarse_ticks_per_ms(instance: Instance, horizon_ms: float) -> int:
    """Return the coarsest fineness at which rounding changes components by little: for programs that only search."""

    def errs_little(fineness: int) -> bool:
        for layers, choices in zip(instance.layers, instance.choices, strict=True):
            for choice in choices:
                phases = (choice.forward_ms, choice.backward_ms) if instance.two_phases else (choice.layer_ms,)
                error = sum(abs(ms - round(ms * fineness) / fineness) for ms in phases)
                if error * layers > COARSE_ERROR * horizon_ms:
                    return False
        return True

    usable = [each for each in COARSE if horizon_ms * each <= LONGEST_TICKS] or [1]
    return next((each for each in usable if errs_little(each)), usable[-1])


def floor_ticks(time_ms: float, fineness: int) -> int:
    """Return a time in whole ticks, rounded down; a time that is whole but for floating-point error stays whole."""
    exact = time_ms * fineness
    nearest = round(exact)
    return nearest if abs(exact - nearest) <= 1e-7 * max(1.0, exact) else int(exact)


def memory_unit(instance: Instance) -> int:
    """Return the bytes of a unit: all sizes are whole where that is possible, else rounded down."""
    limit = instance.memory_limit or 1
    common = 0
    for each in instance.choices:
        for choice in each:
            common = gcd(common, choice.state_bytes, int(choice.activation_bytes))
    return max(1, common if limit // max(1, common) <= LARGEST_UNIT_COUNT else limit // LARGEST_UNIT_COUNT)
