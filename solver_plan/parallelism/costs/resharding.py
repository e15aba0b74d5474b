"""Changing the layout of a tensor between two operators of one stage, as in Aceso's cost model.

A tensor on t x d devices is held in R replicas, its three dims split into D = (a, b, c) parts. Neighbours whose
specifications differ pay for a collective in the forward and its adjoint in the backward; a split is free.
"""

from solver_plan.parallelism.problem import Resharding, TensorLayout

MEGABYTE = 2**20


def specification(layout: TensorLayout, tensor_parallel: int, data_parallel: int) -> tuple[int, tuple[int, int, int]]:
    """Return (replicas, splits of the three dims) of a layout; `any` has none and must not be asked for."""
    t, d = tensor_parallel, data_parallel
    if layout == "replicated":
        return t, (1, d, 1)
    if layout == "split_heads":
        return 1, (1, d, t)
    if layout == "split_scores":
        return 1, (d, t, 1)
    assert layout == "batch_first", layout
    return t, (d, 1, 1)


def resharding_ms(
    tables: Resharding | None,
    output: tuple[TensorLayout, int, int],
    received: tuple[TensorLayout, int, int],
    input_bytes: int,
) -> float | None:
    """Return the time, forward and backward, to turn an operator's output into the next one's input.

    Parameters
    ----------
    tables
        Measured collectives; None: resharding is not priced.
    output
        Layout, tensor and data parallel degree of what the first operator produces.
    received
        The same for what the second operator takes.
    input_bytes
        Size of the input of the second operator.

    Returns
    -------
    float or None
        None if no collective does it.
    """
    if output[0] == "any" or received[0] == "any":
        return 0.0
    replicas, splits = specification(*output)
    wanted_replicas, wanted = specification(*received)
    if (replicas, splits) == (wanted_replicas, wanted):
        return 0.0
    grows = [new > old for old, new in zip(splits, wanted, strict=True)]
    if replicas > wanted_replicas and any(grows):
        return _collective_ms(tables, "all_gather", replicas // wanted_replicas, input_bytes)
    for dim, (old, new) in enumerate(zip(splits, wanted, strict=True)):
        if old > new:
            if replicas < wanted_replicas:
                return _collective_ms(tables, "all_gather", old // new, input_bytes)
            if any(grow for other, grow in enumerate(grows) if other != dim):
                return 2 * _collective_ms(tables, "all_to_all", old // new, input_bytes)
            return None
    return None


def _collective_ms(tables: Resharding | None, collective: str, devices: int, size_bytes: int) -> float:
    if tables is None:
        return 0.0
    size_mb = round(size_bytes / MEGABYTE)
    for entry in tables.collectives:
        if entry.collective == collective and entry.devices == devices:
            times = dict(entry.table)
            return times.get(size_mb, times.get(size_mb - 1, tables.missing_ms))
    return tables.missing_ms
