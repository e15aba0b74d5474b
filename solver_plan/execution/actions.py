"""One action of a rank, and its notation: stage, kind, micro-batch, as ``2F5`` or ``1RECV_B0`` (that of PyTorch)."""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import StringConstraints


class ActionKind(StrEnum):
    """What a rank does."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of inputs and weights."""
    BACKWARD_INPUT = "I"
    """Gradients of the inputs alone."""
    BACKWARD_WEIGHT = "W"
    """Gradients of the weights alone, after I of the same micro-batch."""
    SEND_FORWARD = "SEND_F"
    RECEIVE_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECEIVE_BACKWARD = "RECV_B"
    UNSHARD = "UNSHARD"
    """Gather sharded weights."""
    RESHARD = "RESHARD"
    """Drop the weights that other ranks own."""
    REDUCE = "REDUCE_GRAD"
    """Sum the stage's gradients over its replicas."""
    REDUCE_SHARED = "REDUCE_SHARED"
    """Sum the gradients of weights that several stages hold."""
    UPDATE = "UPDATE"
    """The optimizer step."""


COMPUTATIONS = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT,
)
SENDS = (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD)
RECEIVES = (ActionKind.RECEIVE_FORWARD, ActionKind.RECEIVE_BACKWARD)
PER_MICRO_BATCH = COMPUTATIONS + SENDS + RECEIVES

_KINDS = "|".join(sorted((kind.value for kind in ActionKind), key=len, reverse=True))
_NOTATION = re.compile(rf"(\d+)({_KINDS})(\d*)")

ActionText = Annotated[str, StringConstraints(pattern=rf"^(0|[1-9][0-9]{{0,8}})({_KINDS})(0|[1-9][0-9]{{0,8}})?$")]


@dataclass(frozen=True, order=True)
class Action:
    """One action of the ranks of a stage."""

    stage: int
    kind: ActionKind
    micro_batch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{'' if self.micro_batch is None else self.micro_batch}"


def parse_action(text: str) -> Action:
    """Return the action that a text in the notation stands for."""
    match = _NOTATION.fullmatch(text)
    assert match is not None, text
    stage, kind, micro_batch = match.groups()
    return Action(int(stage), ActionKind(kind), int(micro_batch) if micro_batch else None)
