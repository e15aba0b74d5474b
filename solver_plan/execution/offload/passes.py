"""One update of a part of a layer's state, from its gradient to its weights on the device: done, undone, done again.

    going ──► done ──► settled          the step was decided as speculated, or before the update started
      │         │
      └────┬────┘
      restoring ──► held ──► going      speculation was wrong, or somebody needs the state of before: the state that was
               └──► settled             kept is put back, then the update waits for the decision, or is dropped

Methods that change the phase are called with the lanes' lock held.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from solver_plan.execution.offload.adamw import Hyperparameters
from solver_plan.execution.offload.device import Mark
from solver_plan.execution.offload.lanes import Operation
from solver_plan.execution.offload.state import LayerState

Phase = Literal["going", "done", "restoring", "held", "settled"]


@dataclass(frozen=True)
class LayerGradients:
    """The gradients of a layer in one step."""

    of_slots: tuple[torch.Tensor | None, ...]
    """None: no gradient came, the parameter stays as it is."""
    ready: Mark
    steps: tuple[float, ...]
    """Number of each parameter's update, this one included."""


NO_GRADIENTS = LayerGradients((), None, ())


@dataclass(eq=False)
class TrainingStep:
    """What is decided once for all layers in a step."""

    number: int
    values: tuple[Hyperparameters, ...]
    """Of each parameter group."""
    unscale: tuple[torch.Tensor, ...]
    """What gradients are multiplied by in any case."""
    speculating: bool
    factors: tuple[torch.Tensor, ...] | None = None
    """What gradients are multiplied by, one after the other; None: not decided yet."""
    dropped: bool = False
    """Decided: nothing is updated."""
    closed: bool = False
    """All gradients have come."""
    passes: set["Pass"] = field(default_factory=set)
    """Updates under way."""
    resident: list[tuple[LayerState, LayerGradients]] = field(default_factory=list)
    """Layers updated on the device when the step is decided."""

    @property
    def decided(self) -> bool:
        """Whether updates need not speculate any more."""
        return self.dropped or self.factors is not None


class Pass(ABC):
    """An update of one part of a layer."""

    def __init__(self, step: TrainingStep, layer: LayerState, gradients: LayerGradients) -> None:
        self.step = step
        self.layer = layer
        self.gradients = gradients
        self.undo: torch.Tensor | None = None
        """State from before the update, where it speculated."""
        self.phase: Phase = "going"
        self.last: Operation | None = None
        """Ends the pass."""
        step.passes.add(self)
        layer.open.add(self)

    @property
    def at_rest(self) -> bool:
        """Whether this part is as before the step, and stays so until the step is decided."""
        return self.phase == "held" or (self.phase == "going" and self.undo is None and not self.step.decided)

    @abstractmethod
    def start(self, after: Sequence[Operation] = ()) -> None:
        """Submit the operations of the update, which end with `ended`."""

    @abstractmethod
    def put_back(self, after: Sequence[Operation]) -> None:
        """Submit the operations that put the kept state back, which end with `restored`."""

    @abstractmethod
    def release(self) -> None:
        """Give back the room of the kept state."""

    def ended(self) -> None:
        """Note that the weights are on the device."""
        if self.phase == "going":
            if self.step.decided:
                self.settle()
            else:
                self.phase = "done"

    def decide(self) -> None:
        """Go on as the step has been decided; what speculated wrongly was withdrawn before."""
        if self.phase == "done" or (self.phase == "held" and self.step.dropped):
            self.settle()
        elif self.phase == "held":
            self._go_on()

    def withdraw(self) -> None:
        """Undo the update if it speculated."""
        if self.undo is not None and self.phase in ("going", "done"):
            assert self.last is not None
            self.phase = "restoring"
            self.put_back((self.last,))

    def restored(self) -> None:
        """Note that state and weights are those of before."""
        self.release()
        if self.step.dropped:
            self.settle()
        elif self.step.decided:
            self._go_on()
        else:
            self.phase = "held"

    def settle(self) -> None:
        """Note that this part of the layer is whole again."""
        self.phase = "settled"
        self.release()
        self.layer.open.discard(self)
        self.step.passes.discard(self)
        self.gradients = NO_GRADIENTS  # their memory is free at once: nothing waits for a collection of garbage

    def _go_on(self) -> None:
        self.phase = "going"
        self.start()
