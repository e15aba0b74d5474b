"""Updates on the device with state that comes from the host for the update and goes back after it.

A layer's copy in is requested when the step before is whole for all streamed layers, so that no state of the next step
takes the room that one of this step still needs.
"""

from collections.abc import Callable, Sequence

import torch

from solver_plan.execution.offload.host_updates import Host
from solver_plan.execution.offload.lanes import Admission, Lane, Operation
from solver_plan.execution.offload.passes import LayerGradients, Pass, TrainingStep
from solver_plan.execution.offload.state import FLOAT_BYTES, KEPT, LayerState, update_on_device
from solver_plan.offload.plan import OperationName


class Staging:
    """A streamed layer's state on its way to the device, or there."""

    def __init__(self, host: Host, layer: LayerState) -> None:
        self.host = host
        self.layer = layer
        self.size_bytes = layer.layer.elements * KEPT * FLOAT_BYTES
        self.copy_in: Operation | None = None
        """Brings it, or has brought it; None: it is not asked for."""
        self._room: torch.Tensor | None = None
        self._unwanted = False

    @property
    def on_device(self) -> torch.Tensor:
        """The state on the device, (3, elements)."""
        assert self._room is not None
        return self._room[: self.size_bytes].view(torch.float32).view(KEPT, -1)

    def request(self, step: int) -> Operation:
        """Have the state brought for a step, if it is not asked for yet. With the lock held."""
        if self.copy_in is None:
            name = self.layer.layer.name
            self.copy_in = Operation(
                lane="h2d",
                rank=(step, self.host.planned_start("state_copy_in", name, 0)),
                label=f"state_copy_in of {name!r}",
                run=self._bring,
                admit=self._admit,
                needs="staging",
                finished=self._brought,
            )
            self._unwanted = False
            self.host.lanes.submit(self.copy_in)
        return self.copy_in

    def release(self) -> None:
        """Give back the room on the device; what is on its way gives it back when it comes. With the lock held."""
        if self.copy_in is not None and not self.copy_in.done:
            self._unwanted = True
        elif self._room is not None:
            self.host.staging.give_back(self._room)
            self._room = None
            self.copy_in = None

    def _admit(self) -> Admission:
        if self._unwanted:
            return "start"
        self._room = self.host.staging.take(self.size_bytes)
        return "wait_in_order" if self._room is None else "start"

    def _bring(self) -> None:
        if self._room is not None:
            with self.host.device.after(None):
                self.on_device.copy_(self.layer.state, non_blocking=True)

    def _brought(self) -> None:
        if self._unwanted:
            if self._room is not None:
                self.host.staging.give_back(self._room)
            self._room = None
            self.copy_in = None


class StreamedPass(Pass):
    """An update of a whole layer on the device with streamed state."""

    def __init__(
        self,
        host: Host,
        step: TrainingStep,
        layer: LayerState,
        gradients: LayerGradients,
        staging: Staging,
        when_settled: Callable[[TrainingStep], None],
    ) -> None:
        super().__init__(step, layer, gradients)
        self.host = host
        self.when_settled = when_settled
        self.staging = staging
        self._factors: tuple[torch.Tensor, ...] = ()
        self._idle = False

    def start(self, after: Sequence[Operation] = ()) -> None:
        """Submit update and copy out, behind the copy in."""
        update = self._operation("gpu", "update", self._update)
        update.admit = self._admit_update
        out = self._operation("d2h", "state_copy_out", self._copy_out, finished=self._copied_out)
        self.last = out
        with self.host.lanes.lock:
            self.host.lanes.submit(update, (*after, self.staging.request(self.step.number)))
        self.host.lanes.submit(out, (update,))

    def put_back(self, after: Sequence[Operation]) -> None:
        """Submit putting back the state on the host, and its weights on the device."""
        put = self._operation("cpu", "update", self._put_back, label="undo")
        back = self._operation("h2d", "weight_copy", self._copy_back, finished=self.restored, label="undo copy")
        self.host.lanes.submit(put, after)
        self.host.lanes.submit(back, (put,))

    def release(self) -> None:
        """Give back the room of the kept state."""
        if self.undo is not None:
            self.host.undo.give_back(self.undo)
            self.undo = None

    def settle(self) -> None:
        """Note that the layer is whole again."""
        super().settle()
        self.when_settled(self.step)

    def _operation(
        self,
        lane: Lane,
        operation: OperationName,
        run: Callable[[], None],
        *,
        finished: Callable[[], None] | None = None,
        label: str | None = None,
    ) -> Operation:
        name = self.layer.layer.name
        planned = "update" if operation == "weight_copy" else operation
        return Operation(
            lane=lane,
            rank=(self.step.number, self.host.planned_start(planned, name, 0)),
            label=f"{label or operation} of {name!r}",
            run=run,
            finished=finished,
        )

    def _admit_update(self) -> Admission:
        if self.step.dropped:
            self._idle = True
        elif self.step.factors is not None:
            self._factors = self.step.factors
        else:
            if self.step.speculating:
                self.undo = self.host.undo.take(self.staging.size_bytes)
            if self.undo is None:
                return "wait"
            self._factors = self.step.unscale
        return "start"

    def _update(self) -> None:
        if self._idle:
            return
        if self.undo is not None:
            self._kept(self.undo).copy_(self.layer.state)
        with self.host.device.after(self.gradients.ready):
            update_on_device(self.layer, self.staging.on_device, self.gradients, self.step.values, self._factors)

    def _copy_out(self) -> None:
        if self._idle:
            return
        with self.host.device.after(None):
            self.layer.state.copy_(self.staging.on_device, non_blocking=True)

    def _copied_out(self) -> None:
        self.staging.release()
        self.ended()

    def _put_back(self) -> None:
        assert self.undo is not None
        self.layer.state.copy_(self._kept(self.undo))

    def _copy_back(self) -> None:
        with self.host.device.after(None):
            for slot in self.layer.layer.slots:
                slot.weights.copy_(self.layer.master(slot))

    def _kept(self, room: torch.Tensor) -> torch.Tensor:
        return room[: self.staging.size_bytes].view(torch.float32).view(KEPT, -1)
