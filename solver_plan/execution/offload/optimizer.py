"""`OffloadOptimizer`: AdamW whose updates run where and in the order in which an offload plan has them.

Hooks on the parameters see a layer's gradients complete during the backward, and start its update; hooks on the
modules make each layer's next forward wait for its own weights. `step` says how gradients are clipped, and returns
while updates go on.
"""

import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NoReturn, overload

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from solver_plan.documents import require_same_problem
from solver_plan.errors import InputError, InvalidPlanError, NotExecutableError, PlanMismatchError
from solver_plan.execution.offload.adamw import hyperparameters
from solver_plan.execution.offload.clipping import Speculation, clip_factor, norms_of, total_norm
from solver_plan.execution.offload.device import compute_device
from solver_plan.execution.offload.engine import Engine, default_workers
from solver_plan.execution.offload.layers import LayerModules, Slot, bind
from solver_plan.execution.offload.passes import LayerGradients, TrainingStep
from solver_plan.execution.offload.state import LayerState
from solver_plan.offload.check import violations
from solver_plan.offload.plan import OffloadPlan
from solver_plan.offload.problem import OffloadProblem

MASTER = "master"
"""Key of a parameter's 32-bit weights in `state_dict`, where the parameter has 16 bits."""

_OWN_OPTIONS = ("params", "foreach", "fused")
"""Of a group, not taken from a state that is loaded: parameters, and which of PyTorch's kernels runs."""


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
class _Arrivals:
    """Gradients of a layer as they come in one step."""

    counts: list[int]
    """Of each parameter: micro-steps whose gradient has come."""
    missing: int
    """Parameters whose gradient is not complete."""
    updated: tuple[bool, ...] | None = None
    """Whether each parameter is updated; None: the update has not been started."""


class _Hook:
    """Calls a method of an optimizer for as long as it is there.

    The optimizer is not kept alive, and a copy of the model, or one that was pickled, has nothing to do with it.
    """

    def __init__(self, optimizer: "OffloadOptimizer", method: Callable[..., None], *given: object) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._method = method
        self._given = given

    def __call__(self, *arguments: object) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            self._method(optimizer, *self._given, *arguments)

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _idle_hook, ()


def _idle_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*arguments: object) -> None:
    del arguments


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
    loss_scale : float
        The loss was multiplied by this: gradients are divided by it. A power of 2 changes no result.
    skipped : bool
        Whether the last step was skipped.

    Raises
    ------
    PlanMismatchError
        If the plan was made for another problem, or names none.
    InvalidPlanError
        If `check` finds violations.
    NotExecutableError
        If the plan is for another model, a trained parameter is in no layer, or a tensor's kind is not built.
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
        self._bound = True
        self.max_norm = max_norm
        self.skip_nonfinite = skip_nonfinite
        self.loss_scale = 1.0
        self.skipped = False
        self.accumulation_steps = problem.accumulation_steps if accumulation_steps is None else accumulation_steps
        self._speculation = Speculation(barrier_above)
        devices = {slot.parameter.device for layer in bound for slot in layer.slots}
        device = devices.pop() if devices else torch.device("cpu")
        self._engine = Engine(
            problem,
            plan,
            bound,
            compute_device(device),
            workers=default_workers() if workers is None else workers,
            speculate=self._may_undo,
            undo_bytes=undo_bytes,
        )
        self._report = OffloadReport()
        self._step: TrainingStep | None = None
        self._number = 0
        self._arrivals: dict[LayerState, _Arrivals] = {}
        self._norms: dict[LayerState, list[torch.Tensor]] = {}
        self._counts: dict[Slot, torch.Tensor] = {}
        self._handles: list[RemovableHandle] = []
        self._owners: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._layer_of: dict[nn.Parameter, LayerState] = {}
        for layer in self._engine.layers:
            self._register_parameters(layer)
        for layer in self._engine.layers:
            self._register_modules(layer)

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
            If the model was moved, or its parameters replaced.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._engine.lanes.raise_failure()
        self._require_same_parameters()
        for layer in self._engine.layers:
            self._start_late(layer)
        step = self._step
        if step is None:
            return loss
        total = self._total_norm()
        factor = clip_factor(total, self.max_norm) if total is not None and self.max_norm is not None else None
        skipped = self.skip_nonfinite and total is not None and not bool(torch.isfinite(total))
        self._require_same_values(step)
        self._close(step, skipped=skipped, factor=None if factor is None or bool(factor == 1) else factor)
        if any(layer.layer.bare and layer.open for layer in self._engine.layers):  # no module that could wait for them
            self._wait(lambda: not any(layer.layer.bare and layer.open for layer in self._engine.layers))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; a step that has begun in the backward is taken back.

        Raises
        ------
        InputError
            If it cannot be taken back, because nothing is kept for that (no `max_norm`, `skip_nonfinite=False`).
        """
        self._forget()
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
        if self._step is not None:
            self._withdraw(self._step, "weights and state are asked for")
        self._wait(self._settled)

    def report(self) -> OffloadReport:
        """Return what happened so far."""
        host = self._engine
        return replace(self._report, host_bytes=host.host_bytes, pinned=host.device.pinned)

    def close(self) -> None:
        """Wait for updates, end the threads and remove the hooks. The state stays readable."""
        if self._engine.lanes.failure is None:
            self.zero_grad()
            self.synchronize()
        for handle in self._handles:
            handle.remove()
        self._engine.lanes.stop()

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
        self._abandon()
        self.synchronize()
        self._engine.drop_prefetched()
        groups = state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in self.param_groups]:
            raise InputError(
                f"state_dict: found groups of {[len(group['params']) for group in groups]} parameters; the optimizer "
                f"has {[len(group['params']) for group in self.param_groups]}: load it with the same parameters"
            )
        for index, group in enumerate(groups):
            hyperparameters({**self.param_groups[index], **group}, index)
        numbers = [number for group in groups for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            saved = state_dict["state"].get(number, {})
            for key in ("exp_avg", "exp_avg_sq", MASTER):
                if key in saved and saved[key].shape != parameter.shape:
                    raise InputError(
                        f"state_dict: found {key} of shape {tuple(saved[key].shape)} for parameter {number} of shape "
                        f"{tuple(parameter.shape)}; load the state of the same model"
                    )
        for mine, group in zip(self.param_groups, groups, strict=True):
            mine.update({key: value for key, value in group.items() if key not in _OWN_OPTIONS})
        for number, parameter in zip(numbers, parameters, strict=True):
            if parameter in self._layer_of:
                self._load(parameter, state_dict["state"].get(number, {}))
        self._engine.prefetch(self._number)

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
        self._arrivals[layer] = _Arrivals([0] * len(layer.layer.slots), len(layer.layer.slots))
        for index, slot in enumerate(layer.layer.slots):
            self._layer_of[slot.parameter] = layer
            first, second = layer.moments(slot)
            shape = slot.parameter.shape
            self._counts[slot] = torch.zeros(())
            state = {"step": self._counts[slot], "exp_avg": first.view(shape), "exp_avg_sq": second.view(shape)}
            if slot.weights.dtype != torch.float32:
                state[MASTER] = layer.master(slot).view(shape)
            self.state[slot.parameter] = state
            arrived = _Hook(self, OffloadOptimizer._gradient_arrived, layer, index)
            register = slot.parameter.register_post_accumulate_grad_hook
            self._handles.append(register(arrived))  # type: ignore[no-untyped-call]

    def _register_modules(self, layer: LayerState) -> None:
        """Make a layer's modules wait for all weights in them, and each module in them for its own."""
        for top in layer.layer.modules:
            for module in top.modules():
                found = [layer] if module is top and layer.layer.slots else []
                for name, parameter in module.named_parameters(recurse=module is top):
                    if parameter in self._layer_of:
                        found.append(self._layer_of[parameter])
                        if "." not in name:
                            self._owners.append((module, name, parameter))
                if found:
                    wait = _Hook(self, OffloadOptimizer._before_forward, tuple(dict.fromkeys(found)))
                    whole = _Hook(self, OffloadOptimizer._before_access)
                    self._handles += [
                        module.register_forward_pre_hook(wait),
                        module.register_state_dict_pre_hook(whole),  # type: ignore[no-untyped-call]
                        module.register_load_state_dict_pre_hook(whole),  # type: ignore[no-untyped-call]
                    ]

    def _before_forward(self, layers: tuple[LayerState, ...], module: nn.Module, inputs: object) -> None:
        del module, inputs
        for layer in layers:
            if layer.open:
                if self._step is not None and any(each.step is self._step for each in tuple(layer.open)):
                    self._withdraw(self._step, f"layer {layer.layer.name!r} runs again")
                self._wait(lambda layer=layer: _at_rest(layer))  # type: ignore[misc]
        self._engine.lanes.raise_failure()

    def _before_access(self, *about: object) -> None:
        """Before a module's weights are saved or loaded."""
        del about
        self.synchronize()

    def _gradient_arrived(self, layer: LayerState, index: int, parameter: torch.Tensor) -> None:
        self._engine.lanes.raise_failure()
        slot = layer.layer.slots[index]
        arrivals = self._arrivals[layer]
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
        arrivals.counts[index] += 1
        if arrivals.counts[index] > self.accumulation_steps:
            self._refuse(
                InputError(
                    f"{slot.label}: gradient number {arrivals.counts[index]} since the last step, planned are "
                    f"{self.accumulation_steps}; call step() after {self.accumulation_steps} backward passes, or give "
                    "accumulation_steps"
                )
            )
        if arrivals.counts[index] == self.accumulation_steps:
            arrivals.missing -= 1
            if arrivals.missing == 0:
                self._start(layer)

    # a step

    @property
    def _may_undo(self) -> bool:
        return self.max_norm is not None or self.skip_nonfinite

    def _begin(self) -> TrainingStep:
        unscale: tuple[torch.Tensor, ...] = ()
        if self.loss_scale != 1.0:
            unscale = (torch.tensor(1.0 / self.loss_scale),)
        step = TrainingStep(
            number=self._number,
            values=tuple(hyperparameters(group, index) for index, group in enumerate(self.param_groups)),
            unscale=unscale,
            speculating=self._may_undo and self._speculation.on,
            factors=None if self._may_undo else unscale,
        )
        self._step = step
        return step

    @torch.no_grad()
    def _start(self, layer: LayerState) -> None:
        """Start the update of a layer with the gradients that are there."""
        step = self._begin() if self._step is None else self._step
        slots = layer.layer.slots
        if layer.open:  # a model that got a gradient without a forward
            self._wait(lambda: not layer.open)
        if any(slot.parameter._version != slot.version for slot in slots):  # noqa: SLF001
            layer.take_changed_weights()
            self._engine.drop_prefetched_of(layer)
        found = tuple(slot.parameter.grad for slot in slots)
        for slot in slots:
            slot.parameter.grad = None
        self._arrivals[layer].updated = tuple(gradient is not None for gradient in found)
        if self._may_undo:
            self._norms[layer] = norms_of(self._in_order(layer, found))
        gradients = LayerGradients(
            of_slots=found,
            ready=self._engine.device.mark(),
            steps=tuple(float(self._counts[slot]) + 1 for slot in slots),
        )
        self._engine.start(step, layer, gradients)

    def _start_late(self, layer: LayerState) -> None:
        """Start a layer that did not get all its gradients, with those that it has."""
        arrivals = self._arrivals[layer]
        if arrivals.updated is None and any(slot.parameter.grad is not None for slot in layer.layer.slots):
            self._start(layer)

    def _in_order(self, layer: LayerState, found: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor]:
        """Return a layer's gradients in the order of its modules."""
        return [found[index] for index in layer.layer.order if found[index] is not None]  # type: ignore[misc]

    def _total_norm(self) -> torch.Tensor | None:
        if not self._may_undo:
            return None
        norms = [norm for layer in self._engine.layers for norm in self._norms.get(layer, ())]
        total = total_norm(norms)
        return total if self.loss_scale == 1.0 else total * torch.tensor(1.0 / self.loss_scale)

    def _close(self, step: TrainingStep, *, skipped: bool, factor: torch.Tensor | None) -> None:
        """Decide a step, and make ready for the next."""
        wrong = skipped or factor is not None
        undone = wrong and step.speculated
        waited = self._may_undo and not self._speculation.on
        if wrong:
            self._engine.withdraw(step)
        if skipped:
            step.dropped = True
        elif step.factors is None:
            step.factors = step.unscale if factor is None else (*step.unscale, factor)
        self._engine.decided(step)
        if not skipped:
            for layer, arrivals in self._arrivals.items():
                for slot, updated in zip(layer.layer.slots, arrivals.updated or (), strict=bool(arrivals.updated)):
                    if updated:
                        self._counts[slot] += 1
        self._speculation.record(wrong)
        self._report = replace(
            self._report,
            steps=self._report.steps + 1,
            clipped=self._report.clipped + (factor is not None and not skipped),
            skipped=self._report.skipped + skipped,
            undone=self._report.undone + undone,
            waited=self._report.waited + waited,
        )
        self.skipped = skipped
        self._next()

    def _next(self) -> None:
        self._step = None
        self._number += 1
        self._norms.clear()
        for arrivals in self._arrivals.values():
            arrivals.counts = [0] * len(arrivals.counts)
            arrivals.missing = len(arrivals.counts)
            arrivals.updated = None

    def _forget(self) -> None:
        """Drop the step that the backward has begun."""
        step = self._step
        if step is not None:
            self._withdraw(step, "gradients are dropped")
            step.dropped = True
            self._engine.decided(step)
        self._next()

    def _abandon(self) -> None:
        """End a step that is under way, whatever comes of it: all is about to be replaced."""
        if self._step is not None and not self._may_undo:
            self._engine.decided(self._step)
            self._next()
        else:
            self._forget()

    def _withdraw(self, step: TrainingStep, why: str) -> None:
        if not self._may_undo and (step.passes or self._updated_layers()):
            raise InputError(
                f"{why} between backward and step(), when layers {', '.join(self._updated_layers())} are updated "
                "already: call step() before, or keep what undoing needs (max_norm, or skip_nonfinite=True)"
            )
        self._engine.withdraw(step)

    def _updated_layers(self) -> list[str]:
        return [layer.layer.name for layer, arrivals in self._arrivals.items() if arrivals.updated]

    def _refuse(self, error: InputError) -> NoReturn:
        """Take back what the step has begun, and raise; what cannot be taken back is said."""
        if self._may_undo:
            self._forget()
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
            raise error
        updated = self._updated_layers()
        if updated:
            raise type(error)(f"{error}; layers {', '.join(updated)} have been updated in this step already")
        raise error

    def _settled(self) -> bool:
        return all(_at_rest(layer) for layer in self._engine.layers)

    def _wait(self, until: Callable[[], bool]) -> None:
        began = time.perf_counter()
        self._engine.lanes.wait(until)
        self._report = replace(self._report, exposed_s=self._report.exposed_s + time.perf_counter() - began)

    # checks

    def _require_same_parameters(self) -> None:
        for module, name, parameter in self._owners:
            if module._parameters.get(name) is not parameter:  # noqa: SLF001  (a plain dict: named_parameters is slow)
                slot = self._slot(parameter)
                self._refuse(
                    NotExecutableError(
                        f"{slot.label}: was replaced by another parameter after planning; make a new optimizer"
                    )
                )
        for slot in self._counts:
            if slot.parameter.data_ptr() != slot.weights.data_ptr():
                self._refuse(_moved(slot))
        for index, group in enumerate(self.param_groups):
            for number, parameter in enumerate(group["params"]):
                if parameter.grad is not None and parameter not in self._layer_of:
                    self._refuse(
                        NotExecutableError(
                            f"param_groups[{index}], parameter {number} of shape {tuple(parameter.shape)}: has a "
                            "gradient, but was frozen when the optimizer was made; make a new one"
                        )
                    )

    def _require_same_values(self, step: TrainingStep) -> None:
        now = tuple(hyperparameters(group, index) for index, group in enumerate(self.param_groups))
        if now != step.values:
            self._refuse(
                InputError(
                    "param_groups: changed between the backward and step(), when updates had begun; change them after "
                    "step(), or before the backward"
                )
            )

    def _slot(self, parameter: nn.Parameter) -> Slot:
        return next(slot for slot in self._counts if slot.parameter is parameter)

    def _load(self, parameter: nn.Parameter, saved: dict[str, torch.Tensor]) -> None:
        layer = self._layer_of[parameter]
        slot = self._slot(parameter)
        first, second = layer.moments(slot)
        step = saved.get("step", 0.0)
        self._counts[slot].fill_(float(step))
        for key, mine in (("exp_avg", first), ("exp_avg_sq", second)):
            if key in saved:
                mine.copy_(saved[key].reshape(-1))
            else:
                mine.zero_()
        master = layer.master(slot)
        if MASTER in saved:
            master.copy_(saved[MASTER].reshape(-1))
            slot.weights.copy_(master)
        elif master is not slot.weights:
            master.copy_(slot.weights)
        slot.version = parameter._version  # noqa: SLF001


def _at_rest(layer: LayerState) -> bool:
    """Whether a layer's weights and state are whole: of one step, if it is not decided of that before."""
    return all(each.at_rest for each in layer.open)


def _moved(slot: Slot) -> NotExecutableError:
    return NotExecutableError(
        f"{slot.label}: was moved after planning, from {slot.weights.device} {slot.weights.dtype} to "
        f"{slot.parameter.device} {slot.parameter.dtype}, or other memory; move the model before making the optimizer"
    )


def _require_valid(problem: OffloadProblem, plan: OffloadPlan) -> None:
    if plan.problem_digest is None:
        raise PlanMismatchError(
            "problem_digest: found null, a plan that was written by hand; write its problem's digest, or plan again"
        )
    require_same_problem(problem, plan)
    found = violations(problem, plan)
    if found:
        raise InvalidPlanError(found)
