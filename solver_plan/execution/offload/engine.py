"""Carries the updates of a plan out: lanes, rings, room for undoing, and the state of every layer."""

import os
import weakref
from collections.abc import Sequence
from functools import partial

import torch

from solver_plan.errors import InputError
from solver_plan.execution.offload.arena import ALIGNMENT, Arena, aligned
from solver_plan.execution.offload.device import ComputeDevice
from solver_plan.execution.offload.host_updates import Host, HostPass
from solver_plan.execution.offload.lanes import Lane, Lanes
from solver_plan.execution.offload.layers import LANES, BoundLayer
from solver_plan.execution.offload.passes import LayerGradients, TrainingStep
from solver_plan.execution.offload.rooms import planned_rooms
from solver_plan.execution.offload.state import FLOAT_BYTES, KEPT, LayerState, update_on_device
from solver_plan.execution.offload.streamed_updates import Staging, StreamedPass
from solver_plan.offload.plan import OffloadPlan, OperationName
from solver_plan.offload.problem import OffloadProblem


def default_workers() -> int:
    """Return the number of threads that update on the CPU where none is given: all cores but one."""
    return max(1, (os.cpu_count() or 2) - 1)


class Engine:
    """The updates of all layers beside the training loop.

    Parameters
    ----------
    problem, plan
        What was planned.
    layers
        From `bind`.
    device
        Where the model is.
    workers
        Threads that update on the CPU.
    speculate
        Whether updates may start before it is known how gradients are clipped.
    undo_bytes
        Room for the state before such updates; None: what the plan's timeline needs.
    """

    def __init__(
        self,
        problem: OffloadProblem,
        plan: OffloadPlan,
        layers: Sequence[BoundLayer],
        device: ComputeDevice,
        *,
        workers: int,
        speculate: bool,
        undo_bytes: int | None,
    ) -> None:
        if workers < 1:
            raise InputError(f"workers: found {workers}; at least 1")
        if undo_bytes is not None and undo_bytes < 0:
            raise InputError(f"undo_bytes: found {undo_bytes}; at least 0")
        self.device = device
        self.layers = [LayerState(layer, device) for layer in layers]
        rooms = planned_rooms(problem, plan, speculate=speculate)
        on_host = [layer for layer in layers if layer.place != "gpu"]
        # each parameter, and each chunk of one, starts at a multiple of the alignment
        pieces = sum(len(layer.slots) + problem.chunks_per_layer for layer in on_host)
        if undo_bytes is None:
            undo_bytes = rooms.undo * KEPT * FLOAT_BYTES
            undo_bytes += pieces * (ALIGNMENT + KEPT * FLOAT_BYTES * LANES) if undo_bytes else 0
        elif not speculate:
            undo_bytes = 0
        chunks = [chunk for layer in on_host for chunk in layer.chunks]
        largest = max((chunk.size_bytes for chunk in chunks), default=0)
        width = max((slot.weights.element_size() for layer in on_host for slot in layer.slots), default=0)
        most = aligned(sum(aligned(chunk.size_bytes) for chunk in chunks))
        start_of = {(item.operation, item.layer, item.chunk): item.start_ms for item in plan.timeline}

        def planned_start(operation: OperationName, layer: str, chunk: int) -> float:
            return start_of[operation, layer, chunk]

        def ring(parameters: int) -> Arena:
            wanted = aligned(parameters * width + pieces * ALIGNMENT)
            return Arena(device.host_memory(min(most, max(wanted, 2 * aligned(largest)))))

        staging = problem.staging_bytes if any(layer.place == "gpu_streamed" for layer in layers) else 0
        streamed = [layer for layer in layers if layer.place == "gpu_streamed"]
        padding = sum(aligned(KEPT * FLOAT_BYTES * LANES * len(layer.slots)) for layer in streamed)
        self.host = Host(
            lanes=Lanes(_threads(workers, bool(streamed)), device.enter_lane),
            device=device,
            gradients=ring(rooms.gradients),
            weights=ring(rooms.weights),
            undo=Arena(_plain(undo_bytes)),
            staging=Arena(device.device_memory(staging + padding)),
            planned_start=planned_start,
        )
        self.lanes = self.host.lanes
        self.lanes.describe_damage = partial(_damage, self.layers)
        weakref.finalize(self, self.lanes.stop)
        self._staging = {state: Staging(self.host, state) for state in self.layers if _streamed(state)}
        self.prefetch(0)

    @property
    def host_bytes(self) -> int:
        """Host memory that was taken: state, rings, and room for undoing."""
        on_host = sum(layer.state.numel() * FLOAT_BYTES for layer in self.layers if not layer.on_device)
        return on_host + sum(arena.size_bytes for arena in (self.host.gradients, self.host.weights, self.host.undo))

    def start(self, step: TrainingStep, layer: LayerState, gradients: LayerGradients) -> None:
        """Start the update of a layer whose gradients of the step are complete."""
        if layer.on_device:
            if step.decided:
                self.update_resident(step, layer, gradients)
            else:
                step.resident.append((layer, gradients))
            return
        with self.lanes.lock:
            if _streamed(layer):
                StreamedPass(self.host, step, layer, gradients, self._staging[layer], self._prefetch_next).start()
                return
            for chunk in layer.layer.chunks:
                if any(gradients.of_slots[piece.slot] is not None for piece in chunk.pieces):
                    HostPass(self.host, step, layer, gradients, chunk).start()

    def update_resident(self, step: TrainingStep, layer: LayerState, gradients: LayerGradients) -> None:
        """Update a layer whose state is on the device, on the current stream."""
        assert step.factors is not None
        update_on_device(layer, layer.state, gradients, step.values, step.factors)

    def withdraw(self, step: TrainingStep) -> bool:
        """Undo what has speculated in a step, let nothing more speculate, and return whether there was anything."""
        with self.lanes.lock:
            step.speculating = False
            speculated = [each for each in step.passes if each.undo is not None]
            for each in speculated:
                each.withdraw()
            self.lanes.changed()
        return bool(speculated)

    def decided(self, step: TrainingStep) -> None:
        """Go on with a step whose factors are known, or that is dropped."""
        with self.lanes.lock:
            step.closed = True
            passes = tuple(step.passes)
            for each in passes:
                each.decide()
            busy = {each.layer for each in passes}
            for layer, staging in self._staging.items():
                if layer not in busy:  # its room may be needed by those that are updated
                    staging.release()
            self._prefetch_next(step)
            self.lanes.changed()
        if not step.dropped:
            for layer, gradients in step.resident:
                self.update_resident(step, layer, gradients)
        step.resident.clear()

    def prefetch(self, step: int) -> None:
        """Ask for the state of all streamed layers for a step."""
        with self.lanes.lock:
            for staging in self._staging.values():
                staging.request(step)

    def _prefetch_next(self, step: TrainingStep) -> None:
        """Ask for the state of all streamed layers for the next step, when this one is whole. With the lock held."""
        if step.closed and not any(layer.open for layer in self._staging):
            self.prefetch(step.number + 1)

    def drop_prefetched(self) -> None:
        """Forget the copies of streamed state on the device: what is on the host has changed."""
        for layer in self._staging:
            self.drop_prefetched_of(layer)

    def drop_prefetched_of(self, layer: LayerState) -> None:
        """Forget the copy of a layer's state on the device, if it is streamed."""
        staging = self._staging.get(layer)
        if staging is not None:
            with self.lanes.lock:
                staging.release()
                self.lanes.changed()
            self.lanes.wait(lambda: staging.copy_in is None)


def _damage(layers: Sequence[LayerState]) -> str:
    """Say which layers are not whole."""
    names = [repr(layer.layer.name) for layer in layers if layer.open]
    return f"not whole: {', '.join(names)}" if names else "all layers are whole"


def _streamed(layer: LayerState) -> bool:
    return layer.layer.place == "gpu_streamed"


def _threads(workers: int, streamed: bool) -> dict[Lane, int]:
    threads: dict[Lane, int] = {"cpu": workers, "d2h": 1, "h2d": 1}
    if streamed:
        threads["gpu"] = 1
    return threads


def _plain(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu")
