"""Which rows go from which rank to which where two layouts meet.

A micro-batch of R rows lies on a side of d replicas and t tensor ranks: replica j holds rows [j R / d, (j + 1) R / d),
the same on each of its tensor ranks. Each receiving rank takes every row it needs from one tensor rank of the replica
that holds it: from rank k mod t of the sender for the receiver's tensor rank k, so that senders share the work.
Gradients go back by the same rule with the sides exchanged.
"""

from dataclasses import dataclass

from solver_plan.documents import Index, Range, document


@document
class Transfer:
    """Rows of one micro-batch that one rank gives to another (or keeps)."""

    source: Index
    destination: Index
    source_rows: Range
    """Among the rows of the source."""
    destination_rows: Range
    """Among the rows of the destination."""


@dataclass(frozen=True)
class Side:
    """Ranks over which a micro-batch lies; replica j, tensor rank k is ``devices[j * tensor_parallel + k]``."""

    devices: tuple[int, ...]
    data_parallel: int
    tensor_parallel: int

    def rank(self, replica: int, tensor_rank: int) -> int:
        """Return the global rank at a place."""
        return self.devices[replica * self.tensor_parallel + tensor_rank]

    def place(self, rank: int) -> tuple[int, int]:
        """Return (replica, tensor rank) of a global rank."""
        return divmod(self.devices.index(rank), self.tensor_parallel)


def transfers(sender: Side, receiver: Side, rows: int) -> tuple[Transfer, ...]:
    """Return every transfer of a micro-batch of `rows` rows, replica by replica of the receiver.

    Both data-parallel degrees divide `rows`.
    """
    sent, received = rows // sender.data_parallel, rows // receiver.data_parallel
    assert sent * sender.data_parallel == rows == received * receiver.data_parallel, (sender, receiver, rows)
    found: list[Transfer] = []
    for replica in range(receiver.data_parallel):
        begin, end = replica * received, (replica + 1) * received
        for source in range(begin // sent, (end - 1) // sent + 1):
            first, last = max(begin, source * sent), min(end, (source + 1) * sent)
            for tensor_rank in range(receiver.tensor_parallel):
                found.append(
                    Transfer(
                        source=sender.rank(source, tensor_rank % sender.tensor_parallel),
                        destination=receiver.rank(replica, tensor_rank),
                        source_rows=(first - source * sent, last - source * sent),
                        destination_rows=(first - begin, last - begin),
                    )
                )
    return tuple(found)
