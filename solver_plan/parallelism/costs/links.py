"""Time of moving bytes over a link."""

import math

from solver_plan.parallelism.problem import LatencyLink, Link

MEGABYTE = 2**20


def transfer_ms(size_bytes: int, link: Link) -> float:
    """Return the time to move some bytes; nothing takes no time.

    A table is read as Aceso's cost model does (`aceso_cost_model.py`): entry j = trunc(log2 of the size in MB), minus 1
    if j >= 1, at most the last; below 1 MB j may be negative and then counts from the end of the table.
    """
    if size_bytes == 0:
        return 0.0
    if isinstance(link, LatencyLink):
        return link.latency_ms + size_bytes / link.bytes_per_s * 1e3
    entry = math.trunc(math.log2(size_bytes / MEGABYTE))
    if entry >= 1:
        entry -= 1
    entry = max(min(entry, len(link.table) - 1), -len(link.table))
    return size_bytes / link.table[entry][1] * 1e3
