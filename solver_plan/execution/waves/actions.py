"""One action of a wavefront program, and its notation: a number and a kind, such as ``3F`` or ``5MOVE_B``."""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import StringConstraints


class WaveActionKind(StrEnum):
    """What is done; in brackets what the number counts."""

    FORWARD = "F"
    """Of a slice."""
    BACKWARD = "B"
    """Of a slice: gradients of inputs and weights."""
    LOSS = "LOSS"
    """Of a task, and the gradients of what it was computed from."""
    MOVE_FORWARD = "MOVE_F"
    """Activations over a link."""
    MOVE_BACKWARD = "MOVE_B"
    """Gradients over a link."""
    REDUCE = "REDUCE"
    """Sum the gradients of a reduction's layers over its ranks."""
    UPDATE = "UPDATE"
    """The optimizer step of every rank; number 0."""


WaveActionText = Annotated[
    str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,8})(" + "|".join(kind.value for kind in WaveActionKind) + ")$")
]
_NOTATION = re.compile(r"(\d+)(\w+)")


@dataclass(frozen=True, order=True)
class WaveAction:
    """One action of the ranks that take part in it."""

    kind: WaveActionKind
    number: int

    def __str__(self) -> str:
        return f"{self.number}{self.kind.value}"


def parse_wave_action(text: str) -> WaveAction:
    """Return the action that a text in the notation stands for."""
    match = _NOTATION.fullmatch(text)
    assert match is not None, text
    return WaveAction(WaveActionKind(match[2]), int(match[1]))
