"""Least recomputation of a short stage, operator by operator: exact where pieces (`stages`) are bounds.

What reaches across a block start (a segment that runs on into the next block, or past a shared buffer) depends on
operators of both blocks. Here a partial answer is a label

    (time, saved, largest closed segment, open segment) of the operators so far, and whether the last one is recomputed

extended by one operator at a time as `costs.recompute` walks. A label is dropped if another one with the same last mark
is at most as slow, saves as much and has no larger segments, or if it can save too little with all that follows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MOST_LABELS = 500
"""Labels at one operator; a stage that needs more is left to the bounds."""
BYTE_ROUNDING = 1e-3


@dataclass(frozen=True, slots=True)
class _Label:
    time_ms: float
    saved: float
    peak: float
    segment: float
    marks: tuple[bool, ...]

    def dominates(self, other: "_Label") -> bool:
        return (
            self.time_ms <= other.time_ms
            and self.saved >= other.saved
            and self.peak <= other.peak
            and self.segment <= other.segment
        )


class TooManyLabelsError(Exception):
    """The stage is too long for this method."""


def least_recomputation(
    forward_ms: Sequence[float],
    held_bytes: Sequence[float],
    block_start: Sequence[bool],
    shares_buffer: Sequence[bool],
    *,
    need_bytes: float,
    in_flight: int,
    whole_blocks: bool = False,
) -> tuple[float, tuple[bool, ...]] | None:
    """Return (time, marks) of the least recomputation that lowers the memory of a stage by `need_bytes`.

    Parameters
    ----------
    forward_ms, held_bytes, block_start, shares_buffer
        Of the operators of the stage.
    need_bytes
        in_flight * saved - peak must reach it.
    in_flight
        Micro-batches whose activations the stage holds.
    whole_blocks
        All operators of a block, as far as they are in the stage, or none.

    Returns
    -------
    tuple or None
        None if no recomputation does it.

    Raises
    ------
    TooManyLabelsError
        If there are more than `MOST_LABELS` labels.
    """
    last = len(held_bytes) - 1
    still = [0.0] * (last + 2)  # most that operators from j on can save
    for j in range(last - 1, -1, -1):
        still[j] = still[j + 1] + (0.0 if block_start[j + 1] else held_bytes[j])
    labels = [_Label(0.0, 0.0, 0.0, 0.0, (False,)), _Label(forward_ms[0], 0.0, 0.0, 0.0, (True,))]
    for j in range(last):
        extended: list[_Label] = []
        for label in labels:
            for mark in (False, True):
                if whole_blocks and not block_start[j + 1] and mark != label.marks[-1]:
                    continue
                saved, peak, segment = label.saved, label.peak, label.segment
                if mark and label.marks[-1]:
                    segment += held_bytes[j]
                    if not block_start[j + 1]:
                        saved += held_bytes[j]
                    closes = (block_start[j + 1] or j + 1 == last) and not shares_buffer[j]
                else:
                    closes = True
                if closes:
                    peak, segment = max(peak, segment), 0.0
                if in_flight * (saved + still[j + 1]) - peak >= need_bytes - BYTE_ROUNDING * in_flight:
                    time = label.time_ms + (forward_ms[j + 1] if mark else 0.0)
                    extended.append(_Label(time, saved, peak, segment, (*label.marks, mark)))
        labels = _undominated([one for one in extended if not one.marks[-1]]) + _undominated(
            [one for one in extended if one.marks[-1]]
        )
        if len(labels) > MOST_LABELS:
            raise TooManyLabelsError
    fitting = [
        label for label in labels if in_flight * label.saved - label.peak >= need_bytes - BYTE_ROUNDING * in_flight
    ]
    if not fitting:
        return None
    best = min(fitting, key=lambda label: label.time_ms)
    return best.time_ms, best.marks


def _undominated(labels: list[_Label]) -> list[_Label]:
    kept: list[_Label] = []
    for label in sorted(labels, key=lambda one: (one.time_ms, -one.saved, one.peak, one.segment)):
        if not any(other.dominates(label) for other in kept):
            kept.append(label)
            if len(kept) > MOST_LABELS:
                raise TooManyLabelsError
    return kept
