"""What a training loop does, step by step: gradients come, updates start, the step is decided, or taken back."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from solver_plan.errors import InputError
from solver_plan.execution.offload.adamw import Hyperparameters
from solver_plan.execution.offload.clipping import Speculation, norms_of, total_norm
from solver_plan.execution.offload.engine import Engine
from solver_plan.execution.offload.layers import Slot
from solver_plan.execution.offload.passes import LayerGradients, TrainingStep
from solver_plan.execution.offload.state import LayerState


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadReport:
    """What happened so far."""

    steps: int = 0
    clipped: int = 0
    """Steps whose gradients were clipped."""
    skipped: int = 0
    """Steps that were skipped because a gradient was not finite."""
    undone: int = 0
    """Steps in which updates had speculated wrongly, and were undone."""
    waited: int = 0
    """Steps whose updates waited for the norm, because clipping was frequent before."""
    exposed_s: float = 0.0
    """Seconds in which the training loop waited for weights."""
    host_bytes: int = 0
    """Host memory that was taken: state, rings, and room for undoing."""
    pinned: bool = False
    """Whether memory for copies is pinned."""


@dataclass(eq=False)
class Arrivals:
    """Gradients of a layer as they come in one step."""

    counts: list[int]
    """Of each parameter: micro-steps whose gradient has come."""
    missing: int
    """Parameters whose gradient is not complete."""
    updated: tuple[bool, ...] | None = None
    """Whether each parameter is updated; None: the update has not been started."""


class Steps:
    """The step that is under way, and what came of those before.

    Parameters
    ----------
    engine
        Carries updates out.
    values
        Returns the values of each parameter group as they are now.
    may_undo
        Whether updates wait for a decision, or can be undone. False: all go ahead at once.
    barrier_above
        As in `OffloadOptimizer`.
    """

    def __init__(
        self,
        engine: Engine,
        values: Callable[[], tuple[Hyperparameters, ...]],
        *,
        may_undo: bool,
        barrier_above: float,
    ) -> None:
        self.engine = engine
        self.values = values
        self.may_undo = may_undo
        self.speculation = Speculation(barrier_above)
        self.loss_scale = 1.0
        self.report = OffloadReport()
        self.current: TrainingStep | None = None
        self.number = 0
        slots = [slot for layer in engine.layers for slot in layer.layer.slots]
        self.counts: dict[Slot, torch.Tensor] = {
            slot: torch.zeros((), dtype=torch.float32, device="cpu") for slot in slots
        }
        """Updates of each parameter so far."""
        self.arrivals: dict[LayerState, Arrivals] = {}
        self._norms: dict[LayerState, list[torch.Tensor]] = {}
        self._await_gradients()

    def arrived(self, layer: LayerState, index: int, planned: int) -> int:
        """Note a gradient of a layer's parameter, start the layer if it was the last, and return how many came."""
        arrivals = self.arrivals[layer]
        arrivals.counts[index] += 1
        if arrivals.counts[index] == planned:
            arrivals.missing -= 1
            if arrivals.missing == 0:
                self.start(layer)
        return arrivals.counts[index]

    @torch.no_grad()
    def start(self, layer: LayerState) -> None:
        """Start the update of a layer with the gradients that are there."""
        step = self._begin() if self.current is None else self.current
        slots = layer.layer.slots
        if layer.open:  # a model that got a gradient without a forward
            self.wait(lambda: not layer.open)
        if layer.take_changed_weights():
            self.engine.drop_prefetched_of(layer)
        found = tuple(slot.parameter.grad for slot in slots)
        for slot in slots:
            slot.parameter.grad = None
        self.arrivals[layer].updated = tuple(gradient is not None for gradient in found)
        if self.may_undo:
            in_order = [found[index] for index in layer.layer.order]
            self._norms[layer] = norms_of([gradient for gradient in in_order if gradient is not None])
        gradients = LayerGradients(
            of_slots=found,
            ready=self.engine.device.mark(),
            steps=tuple(float(self.counts[slot]) + 1 for slot in slots),
        )
        self.engine.start(step, layer, gradients)

    def start_late(self) -> None:
        """Start the layers that did not get all their gradients, with those that they have."""
        for layer, arrivals in self.arrivals.items():
            if arrivals.updated is None and any(slot.parameter.grad is not None for slot in layer.layer.slots):
                self.start(layer)

    def total_norm(self) -> torch.Tensor | None:
        """Return the norm of all gradients of the step; waits for the device. None: nobody asks for it."""
        if not self.may_undo:
            return None
        total = total_norm([norm for layer in self.engine.layers for norm in self._norms.get(layer, ())])
        return total if self.loss_scale == 1.0 else total * _on_host(1.0 / self.loss_scale)

    def close(self, step: TrainingStep, *, skipped: bool, factor: torch.Tensor | None) -> None:
        """Decide a step, and make ready for the next.

        Parameters
        ----------
        step
            The current one.
        skipped
            Nothing is updated.
        factor
            What gradients are multiplied by; None: nothing.
        """
        wrong = skipped or factor is not None
        waited = self.may_undo and not self.speculation.on
        undone = wrong and self.engine.withdraw(step)
        if skipped:
            step.dropped = True
        elif step.factors is None:
            step.factors = step.unscale if factor is None else (*step.unscale, factor)
        self.engine.decided(step)
        if not skipped:
            for layer, arrivals in self.arrivals.items():
                for slot, updated in zip(layer.layer.slots, arrivals.updated or (), strict=bool(arrivals.updated)):
                    if updated:
                        self.counts[slot] += 1
        self.speculation.record(wrong)
        self.report = replace(
            self.report,
            steps=self.report.steps + 1,
            clipped=self.report.clipped + (factor is not None and not skipped),
            skipped=self.report.skipped + skipped,
            undone=self.report.undone + undone,
            waited=self.report.waited + waited,
        )
        self._await_gradients()

    def forget(self) -> None:
        """Take back what the step has begun."""
        if self.current is not None:
            self.withdraw("gradients are dropped")
            self.current.dropped = True
            self.engine.decided(self.current)
        self._await_gradients()

    def abandon(self) -> None:
        """End a step that is under way, whatever comes of it: all is about to be replaced."""
        if self.current is not None and not self.may_undo:
            self.engine.decided(self.current)
            self._await_gradients()
        else:
            self.forget()

    def withdraw(self, why: str) -> None:
        """Undo what has been updated in the step; it starts again when the step is decided.

        Raises `InputError` where it cannot be undone.
        """
        if self.current is None:
            return
        if not self.may_undo and self.updated_layers():
            raise InputError(
                f"{why} between backward and step(), when layers {', '.join(self.updated_layers())} are updated "
                "already: call step() before, or keep what undoing needs (max_norm, or skip_nonfinite=True)"
            )
        self.engine.withdraw(self.current)

    def updated_layers(self) -> list[str]:
        """Return the layers whose update has been started in this step."""
        return [layer.layer.name for layer, arrivals in self.arrivals.items() if arrivals.updated]

    def wait_whole(self) -> None:
        """Wait until weights and state of every layer are those of the last step that was decided."""
        self.wait(lambda: all(layer.at_rest for layer in self.engine.layers))

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait for lanes, and count the time."""
        began = time.perf_counter()
        self.engine.lanes.wait(until)
        self.report = replace(self.report, exposed_s=self.report.exposed_s + time.perf_counter() - began)

    def _begin(self) -> TrainingStep:
        unscale = () if self.loss_scale == 1.0 else (_on_host(1.0 / self.loss_scale),)
        self.current = TrainingStep(
            number=self.number,
            values=self.values(),
            unscale=unscale,
            speculating=self.may_undo and self.speculation.on,
            factors=None if self.may_undo else unscale,
        )
        return self.current

    def _await_gradients(self) -> None:
        self.current = None
        self.number += 1
        self._norms.clear()
        for layer in self.engine.layers:
            count = len(layer.layer.slots)
            self.arrivals[layer] = Arrivals(counts=[0] * count, missing=count)


def _on_host(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32, device="cpu")
