"""Units for sizes that go from a toy's hundred bytes to a cluster's terabytes."""

from typing import NamedTuple


class SizeUnit(NamedTuple):
    """A unit of size: 1 kB is 1000 bytes."""

    name: str
    size_bytes: int

    def of(self, size_bytes: float) -> float:
        """Return a size in this unit."""
        return size_bytes / self.size_bytes


SIZE_UNITS = (SizeUnit("GB", 10**9), SizeUnit("MB", 10**6), SizeUnit("kB", 10**3))


def size_unit(largest_bytes: float) -> SizeUnit:
    """Return the unit that shows the largest of some sizes with two digits or more: GB from 0.1 GB on."""
    return next((unit for unit in SIZE_UNITS if unit.of(largest_bytes) >= 0.1), SizeUnit("bytes", 1))


def size_text(size_bytes: float, digits: int = 2) -> str:
    """Return a size with its unit, such as ``1.42 MB``; bytes without decimals."""
    unit = size_unit(size_bytes)
    return f"{unit.of(size_bytes):.{digits if unit.size_bytes > 1 else 0}f} {unit.name}"
