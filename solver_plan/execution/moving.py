"""Sends and receives of rows, begun here and waited for when they are needed."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from solver_plan.execution.torch_pipelining import settled
from solver_plan.execution.transfers import Transfer

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Move:
    """Rows on their way."""

    results: Tensors
    sent: Tensors
    """Kept until they have left."""
    receives: tuple[dist.Work, ...]
    sends: tuple[dist.Work, ...]

    def arrived(self) -> Tensors:
        """Wait for what is received, and return it; once."""
        for work in self.receives:
            work.wait()
        return self.results

    def left(self) -> None:
        """Wait for what is sent; once."""
        for work in self.sends:
            work.wait()


def begin_move(transfers: Sequence[Transfer], rank: int, values: Tensors, results: Tensors) -> Move:
    """Begin to send rows of `values` and to receive into `results`; who only sends or receives leaves the other empty.

    Tensors without elements move nowhere. All ranks begin their moves in the same order.
    """
    sent = tuple(settled(value).contiguous() for value in values)
    operations: list[dist.P2POp] = []
    for index in range(max(len(sent), len(results))):
        for transfer in transfers:
            source, destination = slice(*transfer.source_rows), slice(*transfer.destination_rows)
            if transfer.source == rank == transfer.destination:
                results[index][destination] = sent[index][source]
            elif transfer.source == rank and sent[index].numel():
                operations.append(dist.P2POp(dist.isend, sent[index][source], transfer.destination))
            elif transfer.destination == rank and results[index].numel():
                operations.append(dist.P2POp(dist.irecv, results[index][destination], transfer.source))
    works = tuple(dist.batch_isend_irecv(operations)) if operations else ()
    if len(works) < len(operations):
        # one work for all of them
        return Move(results, sent, works, ())
    receives = tuple(work for work, each in zip(works, operations, strict=True) if each.op is dist.irecv)
    return Move(results, sent, receives, tuple(work for work in works if work not in receives))
