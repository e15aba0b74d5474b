"""Aceso's greedy recomputation (`check_recompute` of its artifact), which never looks at the time it costs.

Operators of one profile form a group. While the stage does not fit, the group that holds the most bytes comes next, and
its operators are recomputed front to back, each together with the operator behind it (alone it would save nothing).

Steps     operator k is the r(k)-th to be marked: groups by held bytes, in each the operators from front to back
Marked    at step min(r(k), r(k - 1)); the pair (k, k + 1) saves from step s(k) = the later of both on
Answer    the first step at which  excess - (b + 1) * saved(step) + peak(step) <= 0,  b stages behind

Savings are a cumulative sum over the steps. The peak only grows with them, so that the step that suffices with the peak
of an earlier step is a lower bound, from which the next peak gives the next one: two or three rounds.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solver_plan.parallelism.blocks import block_ranges
from solver_plan.parallelism.choices import Bools, Floats
from solver_plan.parallelism.problem import ParallelismProblem

Integers = NDArray[np.int64]

NEVER_FIRST = ("embedding", "post-process", "relu")
"""Operators with such a name, and block starts, are recomputed only as successors of others (Aceso's list)."""


@dataclass(frozen=True, slots=True, eq=False)
class RecomputeRules:
    """What decides about recomputation, whatever the layout; arrays of shape (operators,)."""

    mode: str
    """`Space.recompute`."""
    group: Integers
    block: Integers
    block_start: Bools
    never_first: Bools
    shares_buffer: Bools


@dataclass(frozen=True, slots=True, eq=False)
class GreedyRecompute:
    """Recomputation of one stage."""

    marks: Bools
    """(operators of the stage,)"""
    saved_bytes: float
    peak_bytes: float


def recompute_rules(problem: ParallelismProblem) -> RecomputeRules:
    """Return the rules of a problem."""
    numbers: dict[str, int] = {}
    group = [numbers.setdefault(operator.profile, len(numbers)) for operator in problem.operators]
    block = np.zeros(len(group), dtype=np.int64)
    for number, (first, end) in enumerate(block_ranges(problem)):
        block[first:end] = number
    starts = np.array([operator.block_start for operator in problem.operators])
    named = np.array([any(part in operator.profile for part in NEVER_FIRST) for operator in problem.operators])
    return RecomputeRules(
        mode=problem.space.recompute,
        group=np.array(group, dtype=np.int64),
        block=block,
        block_start=starts,
        never_first=starts | named,
        shares_buffer=np.array([operator.activation_factor != 1 for operator in problem.operators]),
    )


def greedy_recompute(
    rules: RecomputeRules, first: int, held_bytes: Floats, in_flight: int, excess_bytes: float
) -> GreedyRecompute:
    """Return the recomputation that makes a stage fit, or all that the greedy order allows if none does.

    Parameters
    ----------
    rules
        Of the problem.
    first
        The stage's first operator.
    held_bytes
        Of each operator of the stage for one micro-batch.
    in_flight
        Micro-batches held at a time.
    excess_bytes
        By how much the stage is too large without recomputation.
    """
    count = len(held_bytes)
    if rules.mode == "none" or count < 2 or excess_bytes <= 0:
        return GreedyRecompute(np.zeros(count, dtype=np.bool_), 0.0, 0.0)
    part = slice(first, first + count)
    marked_at, steps = _marking_steps(rules, part, held_bytes)
    pair_at = np.maximum(marked_at[:-1], marked_at[1:])
    starts_next = rules.block_start[part][1:]
    shares = rules.shares_buffer[part][:-1]
    savings = np.where(starts_next, 0.0, held_bytes[:-1])
    saved = np.cumsum(np.bincount(pair_at, weights=savings, minlength=steps + 1)[:steps])
    step, peak = -1, 0.0
    while True:
        enough = int(np.searchsorted(saved, (excess_bytes + peak) / in_flight))
        step = min(max(step + 1, enough), steps - 1)
        peak = peak_bytes(pair_at <= step, held_bytes, starts_next, shares)
        if excess_bytes - in_flight * saved[step] + peak <= 0 or step == steps - 1:
            return GreedyRecompute(marked_at <= step, float(saved[step]), peak)


def _marking_steps(rules: RecomputeRules, part: slice, held_bytes: Floats) -> tuple[Integers, int]:
    """Return the step at which each operator is marked, and the number of steps; that number: never."""
    count = len(held_bytes)
    if rules.mode == "block":
        blocks = rules.block[part] - rules.block[part.start]
        return blocks, int(blocks[-1]) + 1
    group = rules.group[part]
    totals = np.bincount(group, weights=held_bytes)
    place = np.empty(len(totals), dtype=np.int64)
    place[np.argsort(-totals, kind="stable")] = np.arange(len(totals))
    order = np.argsort(place[group], kind="stable")
    order = order[(~rules.never_first[part] & (held_bytes > 0))[order] & (order < count - 1)]
    steps = max(1, len(order))
    own = np.full(count, steps, dtype=np.int64)
    own[order] = np.arange(len(order))
    own[1:] = np.minimum(own[1:], own[:-1].copy())
    return own, steps


def peak_bytes(both: Bools, held_bytes: Floats, starts_next: Bools, shares_buffer: Bools) -> float:
    """Return what the largest segment brings back: `costs.recompute.saved_and_peak` with arrays.

    All but `held_bytes`, shape (n,), have shape (n - 1,): `both`, operators j and j + 1 are recomputed;
    `starts_next`, j + 1 starts a block; `shares_buffer`, j holds a share of its activations other than 1.
    """
    closes = starts_next.copy()
    closes[-1] = True
    closes &= both & ~shares_buffer
    begins = np.empty(len(both), dtype=np.bool_)
    begins[0] = True
    begins[1:] = ~both[:-1] | closes[:-1]
    segments = np.add.reduceat(np.where(both, held_bytes[:-1], 0.0), np.flatnonzero(begins))
    if both[-1] and not closes[-1]:
        segments = segments[:-1]  # still open at the stage's end: Aceso's cost model does not count it
    return float(segments.max(initial=0.0))
