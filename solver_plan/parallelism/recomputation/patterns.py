"""Recomputation patterns of a piece: consecutive operators of one block.

A pattern marks operators as recomputed. Within a piece, a run of one recomputed operator costs time and saves nothing,
so only patterns whose runs have at least two operators are listed (and the empty one).
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Patterns:
    """Patterns of a piece, by increasing peak; arrays have shape (patterns,)."""

    bits: Bools
    """(patterns, operators)."""
    time_ms: Floats
    saved_bytes: Floats
    peak_bytes: Floats


@lru_cache(maxsize=64)
def masks(operators: int, loose_start: bool = False) -> Bools:
    """Return (patterns, operators): every mark of operators whose runs have length two or more.

    With `loose_start` the run that touches the start may have length one: it goes on from the piece before.
    """
    # (row, length of the open run): extended one operator at a time
    states: list[tuple[list[bool], int]] = [([], 1_000 if loose_start else 0)]
    for _ in range(operators):
        extended: list[tuple[list[bool], int]] = []
        for row, run in states:
            extended.append(([*row, True], run + 1))
            if run != 1:
                extended.append(([*row, False], 0))
        states = extended
    rows = [row for row, run in states if run != 1]
    return np.array(rows, dtype=np.bool_).reshape(len(rows), operators)


def piece_patterns(
    forward_ms: Floats,
    held_bytes: Floats,
    shares_buffer: Bools,
    *,
    ends_stage: bool,
    joined: bool,
    whole: bool,
    linked_bytes: float,
) -> Patterns:
    """Return the patterns of a piece.

    Parameters
    ----------
    forward_ms, held_bytes, shares_buffer
        Of the operators of the piece, shape (operators,).
    ends_stage
        The piece ends its stage: Aceso's model never counts a segment that runs on past a shared buffer there.
    joined
        Count the peak as if the next piece's first operator were recomputed too (pessimistic), or as if it were not
        (optimistic).
    whole
        Only all of the piece or nothing.
    linked_bytes
        What the operator before the piece saves if it and the first one are recomputed, counted as saved whenever the
        first one is (optimistic); 0 where a block starts or the stage begins.
    """
    count = len(forward_ms)
    bits = np.array([[False] * count, [True] * count]) if whole else masks(count, linked_bytes > 0)
    both = bits[:, :-1] & bits[:, 1:]
    time = bits @ forward_ms
    saved = both @ held_bytes[:-1] + bits[:, 0] * linked_bytes
    segment = np.zeros(len(bits))
    peak = np.zeros(len(bits))
    for j in range(count - 1):
        np.maximum(peak, np.where(both[:, j], 0.0, segment), out=peak)
        segment = np.where(both[:, j], segment + held_bytes[j], 0.0)
    if ends_stage:
        closes = count < 2 or not shares_buffer[count - 2]
        np.maximum(peak, segment if closes else 0.0, out=peak)
    elif joined:
        np.maximum(peak, np.where(bits[:, -1], segment + held_bytes[-1], segment), out=peak)
    else:
        # past a shared buffer the segment stays open, and if the stage ends before it closes it never counts
        np.maximum(peak, np.where(bits[:, -1] & shares_buffer[-1], 0.0, segment), out=peak)
    order = np.argsort(peak, kind="stable")
    return Patterns(bits[order], time[order], saved[order], peak[order])
