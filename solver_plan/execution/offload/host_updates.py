"""Updates on the CPU: a chunk's gradient comes to the host, its state is updated there, its weights go back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from solver_plan.execution.offload.adamw import Hyperparameters, scale, update
from solver_plan.execution.offload.arena import Arena
from solver_plan.execution.offload.device import ComputeDevice
from solver_plan.execution.offload.lanes import Admission, Lane, Lanes, Operation
from solver_plan.execution.offload.layers import Chunk, Piece, Slot
from solver_plan.execution.offload.passes import LayerGradients, Pass, TrainingStep
from solver_plan.execution.offload.state import FLOAT_BYTES, KEPT, LayerState
from solver_plan.offload.plan import OperationName

BLOCK = 1 << 18
"""Elements that are kept, cast, updated and cast back while they are in the cache."""

PlannedStart = Callable[[OperationName, str, int], float]
"""Planned start in milliseconds of an operation of a layer and chunk."""


@dataclass(frozen=True)
class Host:
    """What updates outside the training loop share."""

    lanes: Lanes
    device: ComputeDevice
    gradients: Arena
    weights: Arena
    undo: Arena
    staging: Arena
    planned_start: PlannedStart


class HostPass(Pass):
    """An update of one chunk on the CPU."""

    def __init__(
        self, host: Host, step: TrainingStep, layer: LayerState, gradients: LayerGradients, chunk: Chunk
    ) -> None:
        super().__init__(step, layer, gradients)
        self.host = host
        self.chunk = chunk
        slots = layer.layer.slots
        self.first = slots[chunk.pieces[0].slot].start + chunk.pieces[0].first
        self.end = slots[chunk.pieces[-1].slot].start + chunk.pieces[-1].end
        self._gradient_room: torch.Tensor | None = None
        self._weight_room: torch.Tensor | None = None
        self._factors: tuple[torch.Tensor, ...] = ()
        self._idle = False
        """The step was dropped before the update started."""

    def start(self, after: Sequence[Operation] = ()) -> None:
        """Submit copy, update and copy back."""
        copy = self._operation("d2h", "gradient_copy", self._copy, finished=None)
        copy.admit, copy.needs = self._admit_copy, "gradients"
        update_ = self._operation("cpu", "update", self._update, finished=self._updated)
        update_.admit, update_.needs = self._admit_update, "weights"
        back = self._operation("h2d", "weight_copy", self._copy_back, finished=self._copied_back)
        self.last = back
        self.host.lanes.submit(copy, after)
        self.host.lanes.submit(update_, (copy,))
        self.host.lanes.submit(back, (update_,))

    def put_back(self, after: Sequence[Operation]) -> None:
        """Submit putting back the state, and copying its weights."""
        put = self._operation("cpu", "update", self._put_back, finished=None, label="undo")
        put.admit, put.needs = self._take_weight_room, "weights"
        back = self._operation("h2d", "weight_copy", self._copy_back, finished=self._put_back_done, label="undo copy")
        self.host.lanes.submit(put, after)
        self.host.lanes.submit(back, (put,))

    def release(self) -> None:
        """Give back the room of the kept state."""
        if self.undo is not None:
            self.host.undo.give_back(self.undo)
            self.undo = None

    def _operation(
        self,
        lane: Lane,
        operation: OperationName,
        run: Callable[[], None],
        *,
        finished: Callable[[], None] | None,
        label: str | None = None,
    ) -> Operation:
        name = self.layer.layer.name
        return Operation(
            lane=lane,
            rank=(self.step.number, self.host.planned_start(operation, name, self.chunk.number)),
            label=f"{label or operation} of {name!r} chunk {self.chunk.number}",
            run=run,
            finished=finished,
        )

    def _admit_copy(self) -> Admission:
        if self.step.dropped:
            return "start"
        self._gradient_room = self.host.gradients.take(self.chunk.size_bytes)
        return "wait_in_order" if self._gradient_room is None else "start"

    def _copy(self) -> None:
        room = self._gradient_room
        if room is None:
            return
        with self.host.device.after(self.gradients.ready):
            for piece, slot, gradient, _ in self._parts():
                view = _view(room, piece, slot)
                view.copy_(gradient.reshape(-1)[piece.first : piece.end], non_blocking=True)

    def _admit_update(self) -> Admission:
        if self.step.dropped:
            self._idle = True
            return "start"
        if self.step.factors is not None:
            self._factors = self.step.factors
            return self._take_weight_room()
        if not self.step.speculating:
            return "wait"
        self._factors = self.step.unscale
        kept = self.host.undo.take((self.end - self.first) * KEPT * FLOAT_BYTES)
        if kept is None:
            return "wait"
        admission = self._take_weight_room()
        if admission == "start":
            self.undo = kept
        else:
            self.host.undo.give_back(kept)
        return admission

    def _take_weight_room(self) -> Admission:
        self._weight_room = self.host.weights.take(self.chunk.size_bytes)
        return "wait_in_order" if self._weight_room is None else "start"

    def _update(self) -> None:
        if self._idle:
            return
        assert self._gradient_room is not None
        assert self._weight_room is not None
        kept = None if self.undo is None else self._kept(self.undo)
        for piece, slot, _, count in self._parts():
            at, size = slot.start + piece.first, piece.end - piece.first
            update_in_blocks(
                self.layer.state[:, at : at + size],
                _view(self._gradient_room, piece, slot),
                _view(self._weight_room, piece, slot),
                None if kept is None else kept[:, at - self.first : at - self.first + size],
                count,
                self.step.values[slot.group],
                self._factors,
            )

    def _updated(self) -> None:
        if self._gradient_room is not None:
            self.host.gradients.give_back(self._gradient_room)
            self._gradient_room = None

    def _copy_back(self) -> None:
        room = self._weight_room
        if room is None:
            return
        with self.host.device.after(None):
            for piece, slot, _, _ in self._parts():
                slot.weights[piece.first : piece.end].copy_(_view(room, piece, slot), non_blocking=True)

    def _copied_back(self) -> None:
        self._give_back_weight_room()
        self.ended()

    def _put_back(self) -> None:
        assert self.undo is not None
        assert self._weight_room is not None
        kept = self._kept(self.undo)
        for piece, slot, _, _ in self._parts():
            at = slot.start + piece.first
            state = self.layer.state[:, at : at + piece.end - piece.first]
            state.copy_(kept[:, at - self.first : at - self.first + piece.end - piece.first])
            _view(self._weight_room, piece, slot).copy_(state[0])

    def _put_back_done(self) -> None:
        self._give_back_weight_room()
        self.restored()

    def _give_back_weight_room(self) -> None:
        if self._weight_room is not None:
            self.host.weights.give_back(self._weight_room)
            self._weight_room = None

    def _kept(self, room: torch.Tensor) -> torch.Tensor:
        """Return the room of the kept state as (3, elements of the chunk)."""
        elements = self.end - self.first
        return room[: elements * KEPT * FLOAT_BYTES].view(torch.float32).view(KEPT, elements)

    def _parts(self) -> list[tuple[Piece, Slot, torch.Tensor, float]]:
        """Return the pieces that have a gradient, with it and the number of the update."""
        found = []
        for piece in self.chunk.pieces:
            gradient = self.gradients.of_slots[piece.slot]
            if gradient is not None:
                found.append((piece, self.layer.layer.slots[piece.slot], gradient, self.gradients.steps[piece.slot]))
        return found


def update_in_blocks(
    state: torch.Tensor,
    gradients: torch.Tensor,
    weights: torch.Tensor,
    kept: torch.Tensor | None,
    count: float,
    values: Hyperparameters,
    factors: Sequence[torch.Tensor],
    *,
    block: int = BLOCK,
) -> None:
    """Update consecutive parameters, block by block.

    Parameters
    ----------
    state
        (3, elements), updated in place.
    gradients
        (elements), in the parameter's data type; overwritten.
    weights
        (elements), in the parameter's data type; the new ones are written here.
    kept
        (3, elements): the state of before is written here; None: it is not kept.
    count
        Number of the update, this one included.
    values
        Of the parameter group.
    factors
        What gradients are multiplied by, one after the other.
    block
        Elements at once.
    """
    elements = gradients.numel()
    scratch = None
    if gradients.dtype != torch.float32:
        scratch = torch.empty(min(block, elements), dtype=torch.float32, device=state.device)
    for begin in range(0, elements, block):
        end = min(begin + block, elements)
        part, gradient = state[:, begin:end], gradients[begin:end]
        if kept is not None:
            kept[:, begin:end].copy_(part)
        if scratch is not None:
            gradient = scratch[: end - begin].copy_(gradient)
        scale((gradient,), factors)
        update((part[0],), (gradient,), (part[1],), (part[2],), (count,), values)
        weights[begin:end].copy_(part[0])


def _view(room: torch.Tensor, piece: Piece, slot: Slot) -> torch.Tensor:
    """Return a piece's part of a ring, in the parameter's data type."""
    size = (piece.end - piece.first) * slot.weights.element_size()
    return room[piece.offset : piece.offset + size].view(slot.weights.dtype)
