"""Room in one block of memory, given out and taken back in pieces, each where it first fits."""

import bisect

import torch

ALIGNMENT = 64
"""Bytes: a cache line, so that every piece is aligned for every data type."""


def aligned(size: int) -> int:
    """Return a size rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Arena:
    """Pieces of one block of memory. Not thread-safe: its users hold a lock.

    Parameters
    ----------
    block
        Memory, one byte an element.
    """

    def __init__(self, block: torch.Tensor) -> None:
        self.block = block
        self.size_bytes = block.numel()
        self._free: list[tuple[int, int]] = [(0, self.size_bytes)] if self.size_bytes else []
        """[start, end) of each gap, in order."""
        self.most_bytes = 0
        """Most that was given out at once."""
        self._given_bytes = 0

    def take(self, size: int) -> torch.Tensor | None:
        """Return a piece of so many bytes; None where there is no room now. A piece of 0 bytes needs no room."""
        size = aligned(size)
        if size == 0:
            return self.block[:0]
        for index, (start, end) in enumerate(self._free):
            if end - start >= size:
                if end - start == size:
                    del self._free[index]
                else:
                    self._free[index] = (start + size, end)
                self._given_bytes += size
                self.most_bytes = max(self.most_bytes, self._given_bytes)
                return self.block[start : start + size]
        return None

    def give_back(self, piece: torch.Tensor) -> None:
        """Take back a piece that `take` returned."""
        size = piece.numel()
        if size == 0:
            return
        start = int(piece.storage_offset() - self.block.storage_offset())
        index = bisect.bisect(self._free, (start, start))
        self._given_bytes -= size
        self._free.insert(index, (start, start + size))
        for left in (index, index - 1):  # join with the gap behind, then with the gap before
            if 0 <= left < len(self._free) - 1 and self._free[left][1] == self._free[left + 1][0]:
                self._free[left : left + 2] = [(self._free[left][0], self._free[left + 1][1])]
