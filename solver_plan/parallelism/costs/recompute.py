"""What a set of recomputed operators saves and what it brings back at a time, as in Aceso's cost model.

For a stage with operators a..e-1, h(j) = held activations of j, and rc(j) = 1 if j is recomputed:

    saved = sum of h(j) over j with rc(j) = rc(j+1) = 1, j+1 in the stage and no block start
    peak  = largest segment that one backward brings back: walking j = a..e-2, if rc(j) = rc(j+1) = 1 add h(j) to the
            open segment and close it if j+1 is a block start or the last operator (not if j holds a share of its
            activations other than 1: then it stays open); otherwise close it

A recomputed operator whose successor is not recomputed costs time and saves nothing.
"""

from collections.abc import Sequence


def saved_and_peak(
    recomputed: Sequence[bool], held: Sequence[float], block_start: Sequence[bool], shares_buffer: Sequence[bool]
) -> tuple[float, float]:
    """Return (saved, peak), in the unit of `held`, of one stage; all four sequences run over its operators."""
    saved = 0.0
    peak = 0.0
    segment = 0.0
    last = len(held) - 1
    for j in range(last):
        if recomputed[j] and recomputed[j + 1]:
            segment += held[j]
            if not block_start[j + 1]:
                saved += held[j]
            if (block_start[j + 1] or j + 1 == last) and not shares_buffer[j]:
                peak = max(peak, segment)
                segment = 0.0
        else:
            peak = max(peak, segment)
            segment = 0.0
    return saved, peak
