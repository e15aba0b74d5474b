"""Optimizer state of a layer: master weights and both moments, flat, in 32 bit, on the host or on the device."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from solver_plan.execution.offload.adamw import Hyperparameters, scale, update
from solver_plan.execution.offload.device import ComputeDevice
from solver_plan.execution.offload.layers import BoundLayer, Slot

if TYPE_CHECKING:
    from solver_plan.execution.offload.passes import LayerGradients, Pass

FLOAT_BYTES = 4
KEPT = 3
"""Numbers kept for each parameter: master weight and two moments."""


class LayerState:
    """State of one layer.

    On the device, parameters of 32 bit are their own master weights.
    """

    def __init__(self, layer: BoundLayer, device: ComputeDevice) -> None:
        self.layer = layer
        self.on_device = layer.place == "gpu"
        self.open: set[Pass] = set()
        """Updates under way: the layer is whole when there is none."""
        self.own_masters = not self.on_device or any(slot.weights.dtype != torch.float32 for slot in layer.slots)
        rows = KEPT if self.own_masters else KEPT - 1
        size = rows * layer.elements * FLOAT_BYTES
        if layer.place == "gpu_streamed":
            block = device.host_memory(size)
        else:
            block = torch.empty(size, dtype=torch.uint8, device=device.device if self.on_device else "cpu")
        self.state = block.view(torch.float32).view(rows, layer.elements)
        """(3, elements): master weights, first and second moments; (2, elements) without own masters."""
        self.state.zero_()
        for slot in layer.slots:
            if (master := self.master(slot)) is not slot.weights:
                master.copy_(slot.weights)

    @property
    def at_rest(self) -> bool:
        """Whether weights and state are whole, and stay so until the next step is decided."""
        return all(each.at_rest for each in self.open)

    def master(self, slot: Slot) -> torch.Tensor:
        """Return a parameter's master weights, flat."""
        if self.on_device and slot.weights.dtype == torch.float32:
            return slot.weights
        return self.state[0, slot.start : slot.start + slot.count]

    def moments(self, slot: Slot) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a parameter's first and second moments, flat."""
        first, second = self.state[-2:, slot.start : slot.start + slot.count]
        return first, second

    def take_changed_weights(self) -> bool:
        """Take over weights that somebody else has written since the last look; return whether there were any."""
        found = False
        for slot in self.layer.slots:
            version = slot.parameter._version  # noqa: SLF001  (counts changes that are not ours)
            if version != slot.version:
                slot.version = version
                master = self.master(slot)
                if not torch.equal(master.to(slot.weights.dtype), slot.weights.to(master.device)):
                    master.copy_(slot.weights)
                    found = True
        return found


def update_on_device(
    layer: LayerState,
    state: torch.Tensor,
    gradients: "LayerGradients",
    values: Sequence[Hyperparameters],
    factors: Sequence[torch.Tensor],
) -> None:
    """Update a layer on the device, on the current stream.

    Parameters
    ----------
    layer
        Whose weights are updated.
    state
        (3 or 2, elements) as in `LayerState`, on the device; the layer's own, or a copy.
    gradients
        Of the step.
    values
        Of each parameter group.
    factors
        What gradients are multiplied by.
    """
    for group in sorted({slot.group for slot in layer.layer.slots}):
        chosen = [
            (slot, gradient.reshape(-1), count)
            for slot, gradient, count in zip(layer.layer.slots, gradients.of_slots, gradients.steps, strict=True)
            if slot.group == group and gradient is not None
        ]
        if not chosen:
            continue
        masters = [
            slot.weights
            if layer.on_device and slot.weights.dtype == torch.float32
            else state[0, slot.start : slot.start + slot.count]
            for slot, *_ in chosen
        ]
        # gradients are multiplied in place only where they are copies: they may be needed again
        precise = [gradient.float() for _, gradient, _ in chosen]
        if factors:
            precise = [
                copy.clone() if copy.data_ptr() == given.data_ptr() else copy
                for copy, (_, given, _) in zip(precise, chosen, strict=True)
            ]
            scale(precise, factors)
        update(
            masters,
            precise,
            [state[-2, slot.start : slot.start + slot.count] for slot, *_ in chosen],
            [state[-1, slot.start : slot.start + slot.count] for slot, *_ in chosen],
            [count for *_, count in chosen],
            values[group],
        )
        for (slot, *_), master in zip(chosen, masters, strict=True):
            if master is not slot.weights:
                slot.weights.copy_(master)
