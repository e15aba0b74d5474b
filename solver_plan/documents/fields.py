"""Types of the fields of documents, each with its rule, and the decorator that makes a document class."""

from typing import Annotated, TypeVar, dataclass_transform

from annotated_types import Ge, Le
from pydantic import AfterValidator, ConfigDict, Field, StringConstraints
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic_core import PydanticCustomError

T = TypeVar("T")

LARGEST_NUMBER = 1e18
"""Beyond this no time, size or rate makes sense, and sums of squares still fit a float."""
LEAST_RATE = 1e-6
"""Below this per second nothing is moved or computed in a life; the largest size over it is still a finite time."""
MOST_DEVICES = 1_000_000
"""Of a cluster: several times the largest one that trains, and few enough to be counted one by one."""


def _not_empty(bounds: tuple[int, int]) -> tuple[int, int]:
    if not bounds[0] < bounds[1]:
        raise ValueError("a range [first, end) needs first < end")
    return bounds


Milliseconds = Annotated[float, Ge(0), Le(LARGEST_NUMBER)]
PerSecond = Annotated[float, Ge(LEAST_RATE), Le(LARGEST_NUMBER)]
"""A rate per second, not so small that times computed from it are infinite."""
Bytes = Annotated[int, Ge(0), Le(10**18)]
Count = Annotated[int, Ge(1), Le(10**9)]
Devices = Annotated[int, Ge(1), Le(MOST_DEVICES)]
Index = Annotated[int, Ge(0), Le(10**9)]
Fraction = Annotated[float, Ge(0), Le(1)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
Range = Annotated[tuple[Index, Index], AfterValidator(_not_empty)]
"""Half-open index range ``[first, end)``, not empty."""


_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
def document(cls: type[T]) -> type[T]:
    """Make a frozen, keyword-only dataclass whose every field is validated when it is built.

    Unknown fields, values of another JSON type and numbers that are not finite are refused.
    """
    return pydantic_dataclass(cls, frozen=True, kw_only=True, config=_STRICT)  # type: ignore[return-value]


def fail(place: str, found: object, rule: str) -> PydanticCustomError:
    """Return the error to raise from a validator: a rule that spans several fields is broken at `place`.

    The reader turns it into one line that names the file, the place, the value and the rule.
    """
    return PydanticCustomError("rule", "{rule}", {"place": place, "found": found, "rule": rule})


def refuse_too_many_devices(nodes: int, devices_per_node: int) -> None:
    """Raise the error of a validator if a cluster has more devices than `MOST_DEVICES`."""
    if nodes * devices_per_node > MOST_DEVICES:
        rule = f"nodes times devices_per_node is at most {MOST_DEVICES}: {nodes} x {devices_per_node} are too many"
        raise fail("nodes", nodes, rule)
