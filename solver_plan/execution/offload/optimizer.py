"""`OffloadOptimizer`: AdamW whose updates run where and in the order in which an offload plan has them.

Hooks on the parameters see a layer's gradients complete during the backward, and start its update; hooks on the
modules make each layer's next forward wait for its own weights. `step` says how gradients are clipped, and returns
while updates go on.
"""

import gc
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NoReturn, overload

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from solver_plan.documents import require_same_problem
from solver_plan.errors import InputError, InvalidPlanError, NotExecutableError, PlanMismatchError
from solver_plan.execution.offload.adamw import Hyperparameters, hyperparameters
from solver_plan.execution.offload.clipping import clip_factor
from solver_plan.execution.offload.device import compute_device
from solver_plan.execution.offload.engine import Engine, default_workers
from solver_plan.execution.offload.hooks import Hook, is_taken
from solver_plan.execution.offload.layers import BoundLayer, LayerModules, Slot, bind
from solver_plan.execution.offload.saved_state import load_groups, load_slot, saved_states, state_of
from solver_plan.execution.offload.state import LayerState
from solver_plan.execution.offload.steps import OffloadReport, Steps
from solver_plan.offload.check import violations
from solver_plan.offload.plan import OffloadPlan
from solver_plan.offload.problem import OffloadProblem


class OffloadOptimizer(torch.optim.Optimizer):
    """AdamW, planned over device and host.

    Call `loss.backward()` once for each micro-step, then `step()`. Gradients are taken as they become complete:
    `parameter.grad` is None afterwards, and clipping is done here (`max_norm`). Weights are whole in the next forward,
    and after `synchronize()`. Learning rates and other values of `param_groups` are read when the first gradient of a
    step is complete; change them after `step()`, as learning-rate schedulers do.

    Parameters
    ----------
    params
        Parameters or groups, as for `torch.optim.AdamW`.
    problem, plan
        What was planned.
    layers
        Modules or parameters of each layer of the plan, in forward order. A parameter in several belongs to the first.
        Norms are added up in this order, parameters in the order of their modules.
    lr, betas, eps, weight_decay, maximize
        As in `torch.optim.AdamW`.
    max_norm
        Gradients are clipped to this global norm, as `torch.nn.utils.clip_grad_norm_` does; None: they are not.
    skip_nonfinite
        Skip a step with a gradient that is not finite, state unchanged. False and no `max_norm`: nothing needs to be
        undone, and no memory is kept for that.
    accumulation_steps
        Micro-steps; None: the problem's.
    workers
        Threads that update on the CPU; None: all cores but one. The problem's rate should have been measured with as
        many.
    undo_bytes
        Host memory for the state before updates that start before the norm is known; what finds no room waits. None:
        what the plan's timeline needs.
    barrier_above
        Updates wait for the norm while more than this share of the last 16 steps was clipped or skipped.

    Attributes
    ----------
    skipped : bool
        Whether the last step was skipped.

    Raises
    ------
    PlanMismatchError
        If the plan was made for another problem, or names none.
    InvalidPlanError
        If `check` finds violations.
    NotExecutableError
        If the plan is for another model, a trained parameter is in no layer or in another `OffloadOptimizer`, or a
        tensor's kind is not built.
    InputError
        If an option makes no sense.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]],
        *,
        problem: OffloadProblem,
        plan: OffloadPlan,
        layers: LayerModules,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        maximize: bool = False,
        max_norm: float | None = None,
        skip_nonfinite: bool = True,
        accumulation_steps: int | None = None,
        workers: int | None = None,
        undo_bytes: int | None = None,
        barrier_above: float = 0.25,
    ) -> None:
        _require_valid(problem, plan)
        if max_norm is not None and not max_norm > 0:
            raise InputError(f"max_norm: found {max_norm}; greater than 0, or None: no clipping")
        if accumulation_steps is not None and accumulation_steps < 1:
            raise InputError(f"accumulation_steps: found {accumulation_steps}; at least 1")
        if not 0 <= barrier_above <= 1:
            raise InputError(f"barrier_above: found {barrier_above}; a fraction from 0 to 1")
        # the keys of torch.optim.AdamW, so that state goes to it and comes from it
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": False,
            "maximize": maximize,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": True,
            "decoupled_weight_decay": True,
        }
        self._bound = False
        super().__init__(params, defaults)
        for index, group in enumerate(self.param_groups):
            hyperparameters(group, index)
        bound = bind(problem, plan, layers, self.param_groups)
        _require_free(bound)
        self._bound = True
        self._closed = False
        self.max_norm = max_norm
        self.skip_nonfinite = skip_nonfinite
        self.skipped = False
        self.accumulation_steps = problem.accumulation_steps if accumulation_steps is None else accumulation_steps
        devices = {slot.parameter.device for layer in bound for slot in layer.slots}
        may_undo = max_norm is not None or skip_nonfinite
        self._engine = Engine(
            problem,
            plan,
            bound,
            compute_device(devices.pop() if devices else torch.device("cpu")),
            workers=default_workers() if workers is None else workers,
            speculate=may_undo,
            undo_bytes=undo_bytes,
        )
        self._steps = Steps(self._engine, self._values, may_undo=may_undo, barrier_above=barrier_above)
        self._handles: list[RemovableHandle] = []
        self._owners: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._slot_of: dict[torch.Tensor, tuple[LayerState, Slot]] = {
            slot.parameter: (layer, slot) for layer in self._engine.layers for slot in layer.layer.slots
        }
        for layer in self._engine.layers:
            self._register_parameters(layer)
            self._register_modules(layer)

    @property
    def loss_scale(self) -> float:
        """The loss was multiplied by this: gradients are divided by it. A power of 2 changes no result."""
        return self._steps.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        if not 0 < value < math.inf:
            raise InputError(f"loss_scale: found {value}; a finite number greater than 0")
        self._steps.loss_scale = value

    # the training loop

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Decide the step: clip, skip, or go ahead. Waits for the backward, not for updates.

        Raises
        ------
        RunFailedError
            If an update failed.
        NotExecutableError
            If the model was moved, its parameters replaced, or the optimizer closed.
        """
        if self._closed:
            raise NotExecutableError("step: the optimizer is closed and takes no gradients; make a new one")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._engine.lanes.raise_failure()
        self._require_same_parameters()
        self._steps.start_late()
        step = self._steps.current
        if step is None:
            return loss
        total = self._steps.total_norm()
        if total is None and (self.max_norm is not None or self.skip_nonfinite):
            raise InputError(
                f"max_norm: found {self.max_norm}, skip_nonfinite: found {self.skip_nonfinite}, set after the "
                "optimizer was made without either, when nothing is kept for undoing; give them when making it"
            )
        factor = clip_factor(total, self.max_norm) if total is not None and self.max_norm is not None else None
        self.skipped = self.skip_nonfinite and total is not None and not bool(torch.isfinite(total))
        if self._values() != step.values:
            self._refuse(
                InputError(
                    "param_groups: changed between the backward and step(), when updates had begun; change them after "
                    "step(), or before the backward"
                )
            )
        self._steps.close(step, skipped=self.skipped, factor=None if factor is None or bool(factor == 1) else factor)
        bare = [layer for layer in self._engine.layers if layer.layer.bare]
        if any(layer.open for layer in bare):  # there is no module that could wait for them
            self._steps.wait(lambda: not any(layer.open for layer in bare))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; a step that has begun in the backward is taken back.

        Raises
        ------
        InputError
            If it cannot be taken back, because nothing is kept for that (no `max_norm`, `skip_nonfinite=False`).
        """
        self._steps.forget()
        super().zero_grad(set_to_none)

    def synchronize(self) -> None:
        """Wait until weights and state are whole: those of the last `step`.

        Raises
        ------
        RunFailedError
            If an update failed.
        InputError
            If the backward has begun a step that cannot be taken back.
        """
        self._steps.withdraw("weights and state are asked for")
        self._steps.wait_whole()

    def report(self) -> OffloadReport:
        """Return what happened so far."""
        engine = self._engine
        return replace(self._steps.report, host_bytes=engine.host_bytes, pinned=engine.device.pinned)

    def close(self) -> None:
        """Wait for updates, take back a step that is not decided, end the threads, and remove the hooks."""
        if self._engine.lanes.failure is None:
            self._steps.abandon()
            self._steps.wait_whole()
        for handle in self._handles:
            handle.remove()
        self._engine.lanes.stop()
        self._closed = True

    def __getstate__(self) -> dict[str, Any]:
        raise NotExecutableError("an OffloadOptimizer cannot be copied or pickled; take its state_dict()")

    # documents of state

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the form of `torch.optim.AdamW`, when it is whole."""
        self.synchronize()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of this class or of `torch.optim.AdamW`.

        Master weights of 16-bit parameters are taken from it where it has them, else from the parameters.

        Raises
        ------
        InputError
            If groups or shapes differ.
        """
        self._steps.abandon()
        self.synchronize()
        self._engine.drop_prefetched()
        states = saved_states(self.param_groups, state_dict)
        load_groups(self.param_groups, state_dict)
        for parameter, saved in states.items():
            if parameter in self._slot_of:
                layer, slot = self._slot_of[parameter]
                load_slot(layer, slot, self._steps.counts[slot], saved)
        self._engine.prefetch(self._steps.number)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimizer is made; afterwards the plan is fixed.

        Raises
        ------
        NotExecutableError
            If the optimizer is made already.
        """
        if getattr(self, "_bound", False):
            raise NotExecutableError("add_param_group: the plan does not have these parameters; make a new optimizer")
        super().add_param_group(param_group)

    # hooks

    def _register_parameters(self, layer: LayerState) -> None:
        for index, slot in enumerate(layer.layer.slots):
            self.state[slot.parameter] = state_of(layer, slot, self._steps.counts[slot])
            arrived = Hook(self, OffloadOptimizer._gradient_arrived, layer, index)
            register = slot.parameter.register_post_accumulate_grad_hook
            self._handles.append(register(arrived))  # type: ignore[no-untyped-call]

    def _register_modules(self, layer: LayerState) -> None:
        """Make a layer's modules wait for all weights in them, and each module in them for its own."""
        for top in layer.layer.modules:
            for module in top.modules():
                found = [layer] if module is top and layer.layer.slots else []
                for name, parameter in module.named_parameters(recurse=module is top):
                    if parameter in self._slot_of:
                        found.append(self._slot_of[parameter][0])
                        if "." not in name:
                            self._owners.append((module, name, parameter))
                if found:
                    wait = Hook(self, OffloadOptimizer._before_forward, tuple(dict.fromkeys(found)))
                    whole = Hook(self, OffloadOptimizer._before_access)
                    self._handles += [
                        module.register_forward_pre_hook(wait),
                        module.register_state_dict_pre_hook(whole),  # type: ignore[no-untyped-call]
                        module.register_load_state_dict_pre_hook(whole),  # type: ignore[no-untyped-call]
                    ]

    def _before_forward(self, layers: tuple[LayerState, ...], module: nn.Module, inputs: object) -> None:
        del module, inputs
        for layer in layers:
            if layer.open:
                if any(each.step is self._steps.current for each in tuple(layer.open)):
                    self._steps.withdraw(f"layer {layer.layer.name!r} runs again")
                self._steps.wait(lambda layer=layer: layer.at_rest)  # type: ignore[misc]
        self._engine.lanes.raise_failure()

    def _before_access(self, *about: object) -> None:
        """Before a module's weights are saved or loaded."""
        del about
        self.synchronize()

    def _gradient_arrived(self, layer: LayerState, index: int, parameter: torch.Tensor) -> None:
        self._engine.lanes.raise_failure()
        slot = layer.layer.slots[index]
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse or gradient.layout != torch.strided:
            self._refuse(
                NotExecutableError(
                    f"{slot.label}: found a sparse gradient, which is not built; make its module with sparse=False"
                )
            )
        if parameter.data_ptr() != slot.weights.data_ptr():
            self._refuse(_moved(slot))
        came = self._steps.arrived(layer, index, self.accumulation_steps)
        if came > self.accumulation_steps:
            self._refuse(
                InputError(
                    f"{slot.label}: gradient number {came} since the last step, planned are "
                    f"{self.accumulation_steps}; call step() after {self.accumulation_steps} backward passes, or give "
                    "accumulation_steps"
                )
            )

    # checks

    def _values(self) -> tuple[Hyperparameters, ...]:
        return tuple(hyperparameters(group, index) for index, group in enumerate(self.param_groups))

    def _refuse(self, error: InputError) -> NoReturn:
        """Take back what the step has begun, and raise; what cannot be taken back is said."""
        updated = self._steps.updated_layers()
        if self._steps.may_undo:
            self._steps.forget()
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        elif updated:
            raise type(error)(f"{error}; layers {', '.join(updated)} have been updated in this step already")
        raise error

    def _require_same_parameters(self) -> None:
        for module, name, parameter in self._owners:
            if module._parameters.get(name) is not parameter:  # noqa: SLF001  (a plain dict: named_parameters is slow)
                slot = self._slot_of[parameter][1]
                self._refuse(
                    NotExecutableError(
                        f"{slot.label}: was replaced by another parameter after planning; make a new optimizer"
                    )
                )
        for _, slot in self._slot_of.values():
            if slot.parameter.data_ptr() != slot.weights.data_ptr():
                self._refuse(_moved(slot))
        for index, group in enumerate(self.param_groups):
            for number, parameter in enumerate(group["params"]):
                if parameter.grad is not None and parameter not in self._slot_of:
                    self._refuse(
                        NotExecutableError(
                            f"param_groups[{index}], parameter {number} of shape {tuple(parameter.shape)}: has a "
                            "gradient, but was frozen when the optimizer was made; make a new one"
                        )
                    )


def _moved(slot: Slot) -> NotExecutableError:
    return NotExecutableError(
        f"{slot.label}: was moved after planning, from {slot.weights.device} {slot.weights.dtype} to "
        f"{slot.parameter.device} {slot.parameter.dtype}, or other memory; move the model before making the optimizer"
    )


def _require_free(layers: Sequence[BoundLayer]) -> None:
    """Refuse parameters whose gradients another optimizer takes."""
    slots = [slot for layer in layers for slot in layer.slots]
    if any(is_taken(slot.parameter) for slot in slots):
        # one that nobody knows any more may wait for the collector
        gc.collect()
    for slot in slots:
        if is_taken(slot.parameter):
            raise NotExecutableError(f"{slot.label}: another OffloadOptimizer takes its gradients; close() that first")


def _require_valid(problem: OffloadProblem, plan: OffloadPlan) -> None:
    if plan.problem_digest is None:
        raise PlanMismatchError(
            "problem_digest: found null, a plan that was written by hand; write its problem's digest, or plan again"
        )
    require_same_problem(problem, plan)
    found = violations(problem, plan)
    if found:
        raise InvalidPlanError(found)
