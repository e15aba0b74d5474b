"""What is refused, and what is said when an update fails."""

import copy
import dataclasses
import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

from solver_plan.errors import (
    InputError,
    InvalidPlanError,
    NotExecutableError,
    PlanMismatchError,
    RunFailedError,
)
from solver_plan.execution.offload.device import CpuDevice, pinned_or_plain
from solver_plan.execution.offload.host_updates import HostPass
from solver_plan.execution.offload.optimizer import OffloadOptimizer
from solver_plan.offload.plan import Place
from tests.execution.offload.offload_models import (
    MIXED,
    Gpt,
    Layers,
    Reference,
    assert_same_weights,
    batch,
    gpt,
    loss_of,
    plan_of,
    problem_of,
    train,
    unequal,
)


def make(
    model: Gpt,
    layers: object = None,
    places: tuple[Place, ...] = MIXED,
    *,
    planned: Layers | None = None,
    **options: object,
) -> OffloadOptimizer:
    """Make the optimizer of a model with a plan for `planned`."""
    problem = problem_of(model.layers() if planned is None else planned)
    return OffloadOptimizer(
        options.pop("params", model.parameters()),  # type: ignore[arg-type]
        problem=problem,
        plan=plan_of(problem, *places),
        layers=model.layers() if layers is None else layers,  # type: ignore[arg-type]
        **options,  # type: ignore[arg-type]
    )


def test_a_plan_for_another_model_is_refused() -> None:
    model = gpt()
    layers = model.layers()
    renamed = {("top" if name == "head" else name): module for name, module in layers.items()}
    with pytest.raises(NotExecutableError, match=r"layers: found 'top', which the plan does not have; its layers: em"):
        make(model, renamed, planned=layers)
    with pytest.raises(NotExecutableError, match=r"layers: the plan's 'head' is missing"):
        make(model, {name: module for name, module in layers.items() if name != "head"}, planned=layers)
    wide = Gpt((44, 45, 44))
    with pytest.raises(NotExecutableError, match=r"layers\[2\].parameters: planned \d+ for 'block1', the model"):
        make(wide, planned=layers)


def test_a_parameter_in_no_layer_is_refused() -> None:
    model = gpt()
    layers = model.layers()
    without = {**layers, "block1": nn.Identity()}
    with pytest.raises(
        NotExecutableError, match=r"param_groups\[0\], parameter 13 of shape \(22,\): is in no layer of the plan"
    ):
        make(model, without, planned=without)
    with pytest.raises(NotExecutableError, match=r"embed.weight: is trained in layer 'embed', but in no param_gr"):
        make(model, params=list(model.parameters())[1:])


def test_a_plan_that_is_not_valid_or_of_another_problem_is_refused() -> None:
    model = gpt()
    problem = problem_of(model.layers())
    plan = plan_of(problem, "cpu")
    for changed, error, message in (
        (dataclasses.replace(plan, problem_digest=None), PlanMismatchError, "problem_digest: found null"),
        (plan_of(problem_of(model.layers(), clip=True), "cpu"), PlanMismatchError, "was made for problem sha256"),
        (dataclasses.replace(plan, timeline=plan.timeline[1:]), InvalidPlanError, "is missing"),
    ):
        with pytest.raises(error, match=message):
            OffloadOptimizer(model.parameters(), problem=problem, plan=changed, layers=model.layers())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_norm": 0.0}, "max_norm: found 0.0"),
        ({"max_norm": float("nan")}, "max_norm: found nan"),
        ({"workers": 0}, "workers: found 0"),
        ({"undo_bytes": -1}, "undo_bytes: found -1"),
        ({"accumulation_steps": 0}, "accumulation_steps: found 0"),
        ({"barrier_above": 2.0}, "barrier_above: found 2.0"),
        ({"lr": float("nan")}, r"param_groups\[0\].lr: found nan"),
        ({"lr": -1.0}, r"param_groups\[0\].lr: found -1.0"),
        ({"betas": (0.9, 1.0)}, r"param_groups\[0\].betas: found 1.0"),
        ({"weight_decay": float("inf")}, r"param_groups\[0\].weight_decay: found inf"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make(gpt(), **options)


@pytest.mark.parametrize("value", [0.0, -2.0, float("nan"), float("inf")])
def test_a_loss_scale_that_makes_no_sense_is_refused(value: float) -> None:
    optimizer = make(gpt())
    with pytest.raises(InputError, match="loss_scale: found"):
        optimizer.loss_scale = value
    optimizer.close()


@pytest.mark.parametrize("state", [{}, None, {"param_groups": []}])
def test_a_state_that_is_none_is_refused(state: object) -> None:
    optimizer = make(gpt())
    with pytest.raises(InputError, match="state_dict: found no 'param_groups' and 'state'"):
        optimizer.load_state_dict(state)  # type: ignore[arg-type]
    optimizer.close()


def test_a_learning_rate_that_turns_bad_is_refused_and_may_be_mended() -> None:
    model = gpt()
    reference = Reference(model, lr=1e-3)
    optimizer = make(model, lr=1e-3)
    train(model, optimizer, range(1))
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(InputError, match=r"param_groups\[0\].lr: found -1.0"):
        train(model, optimizer, range(1, 2))
    optimizer.param_groups[0]["lr"] = 1e-3
    optimizer.zero_grad()
    train(model, optimizer, range(1, 2))
    for number in range(2):
        reference.step(number)
    assert_same_weights(model, reference.model)
    optimizer.close()


def test_one_optimizer_takes_the_gradients_of_a_parameter() -> None:
    model = gpt()
    first = make(model)
    with pytest.raises(NotExecutableError, match="another OffloadOptimizer takes its gradients; close"):
        make(model)
    first.close()
    with pytest.raises(NotExecutableError, match="step: the optimizer is closed"):
        first.step()
    second = make(model)
    del second  # not closed: who drops it need not know
    make(model).close()


def test_an_optimizer_is_not_copied() -> None:
    optimizer = make(gpt())
    with pytest.raises(NotExecutableError, match="take its state_dict"):
        copy.deepcopy(optimizer)
    optimizer.close()


def test_kinds_of_parameters_that_are_not_built_are_refused() -> None:
    model = gpt()
    model.embed.weight.data = model.embed.weight.data.double()
    with pytest.raises(NotExecutableError, match=r"embed.weight: found torch.float64, strides \(22, 1\)"):
        make(model)
    model = gpt()
    model.embed.weight = nn.Parameter(torch.randn(22, 37).t())
    with pytest.raises(NotExecutableError, match=r"embed.weight: found torch.float32, strides \(1, 37\)"):
        make(model)
    model = gpt()
    with pytest.raises(InputError, match=r"param_groups\[0\].amsgrad: found True"):
        make(model, params=[{"params": list(model.parameters()), "amsgrad": True}])
    with pytest.raises(NotExecutableError, match="add_param_group"):
        make(model).add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


@pytest.mark.parametrize("places", [("cpu",), MIXED])
def test_sparse_gradients_are_refused_and_nothing_is_changed(places: tuple[Place, ...]) -> None:
    model = gpt()
    optimizer = make(model, places=places)
    train(model, optimizer, range(2))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    model.embed.sparse = True
    with pytest.raises(NotExecutableError, match=r"embed.weight: found a sparse gradient, which is not built"):
        loss_of(model, batch(2)).backward()
    _assert_unchanged(before, model, optimizer)
    model.embed.sparse = False
    reference = Reference(model)
    reference.optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, range(3, 5))
    for number in range(3, 5):
        reference.step(number)
    assert_same_weights(model, reference.model)


Saved = tuple[dict[str, torch.Tensor], dict[int, dict[str, torch.Tensor]]]
"""Weights, and optimizer state."""


def _assert_unchanged(before: Saved, model: Gpt, optimizer: OffloadOptimizer) -> None:
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[0][name])
    for number, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            assert torch.equal(value, before[1][number][key])


def _move(model: Gpt) -> None:
    model.double().float()


def _replace(model: Gpt) -> None:
    model.head.norm.weight = nn.Parameter(torch.ones(22))


@pytest.mark.parametrize(("change", "message"), [(_move, "was moved after planning"), (_replace, "was replaced by")])
def test_a_model_that_was_moved_after_planning_is_refused(change: Callable[[Gpt], None], message: str) -> None:
    model = gpt()
    optimizer = make(model)
    train(model, optimizer, range(1))
    change(model)
    with pytest.raises(NotExecutableError, match=message):
        train(model, optimizer, range(1, 2))


def test_a_parameter_that_is_thawed_after_planning_is_refused() -> None:
    model = gpt()
    model.embed.weight.requires_grad_(False)
    optimizer = make(model)
    train(model, optimizer, range(1))
    model.embed.weight.requires_grad_(True)
    with pytest.raises(NotExecutableError, match=r"param_groups\[0\], parameter 0 .*was frozen when"):
        train(model, optimizer, range(1, 2))


def test_more_backward_passes_than_planned_are_refused() -> None:
    model = gpt()
    optimizer = make(model)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    loss_of(model, batch(0)).backward()
    with pytest.raises(InputError, match=r"gradient number 2 since the last step, planned are 1; call step\(\)"):
        loss_of(model, batch(1)).backward()
    _assert_unchanged(before, model, optimizer)


def test_values_that_change_while_updates_run_are_refused() -> None:
    model = gpt()
    optimizer = make(model)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    loss_of(model, batch(0)).backward()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(InputError, match=r"param_groups: changed between the backward and step\(\)"):
        optimizer.step()
    _assert_unchanged(before, model, optimizer)


def test_pinned_memory_that_cannot_be_had_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # without a device PyTorch refuses to pin, as the system does where the limit is reached
    monkeypatch.setattr(CpuDevice, "host_memory", pinned_or_plain)
    monkeypatch.setattr(CpuDevice, "__init__", _pinning)
    model = gpt()
    reference = Reference(model)
    with caplog.at_level(logging.WARNING):
        optimizer = make(model)
    assert "pinned memory:" in caplog.text
    assert "go through plain memory" in caplog.text
    assert not optimizer.report().pinned
    train(model, optimizer, range(2))
    for number in range(2):
        reference.step(number)
    assert_same_weights(model, reference.model)


def _pinning(self: CpuDevice) -> None:
    self.device = torch.device("cpu")
    self.pinned = not torch.cuda.is_available()


CALLS: dict[str, Callable[[Gpt, OffloadOptimizer], object]] = {
    "forward": lambda model, optimizer: loss_of(model, batch(1)),
    "step": lambda model, optimizer: optimizer.step(),
    "state_dict": lambda model, optimizer: optimizer.state_dict(),
    "model.state_dict": lambda model, optimizer: model.state_dict(),
    "synchronize": lambda model, optimizer: optimizer.synchronize(),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_exception_in_a_worker_surfaces_at_the_next_call(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: HostPass) -> None:
        if self.layer.layer.name == "embed" and self.chunk.number == 1:
            raise MemoryError("no room")

    model = gpt()
    optimizer = make(model, places=("cpu",))
    train(model, optimizer, range(1))
    monkeypatch.setattr(HostPass, "_update", fail)
    loss_of(model, batch(1)).backward()
    lanes = optimizer._engine.lanes
    with lanes.lock:
        lanes._waiting.wait_for(lambda: lanes.failure is not None)
    # until a new optimizer is made, every call says so, and which layers are not whole
    for _ in range(2):
        with pytest.raises(
            RunFailedError, match=r"update of 'embed' chunk 1: MemoryError: no room; not whole: .*'embed'"
        ) as caught:
            CALLS[call](model, optimizer)
        assert isinstance(caught.value.__cause__, MemoryError)
    optimizer.close()


def test_updates_of_unequal_models_do_not_hang_with_the_least_room() -> None:
    """Rings of two chunks, staging of one layer, no room for undoing."""
    model = unequal()
    reference = Reference(model, max_norm=1.0)
    problem = problem_of(model.layers(), streamed_layers=1)
    places: tuple[Place, ...] = ("gpu_streamed", "cpu", "gpu_streamed", "gpu_streamed", "cpu", "gpu_streamed")
    optimizer = OffloadOptimizer(
        model.parameters(),
        problem=problem,
        plan=plan_of(problem, *places),
        layers=model.layers(),
        max_norm=1.0,
        undo_bytes=12 * 22 * 37 * 4,
        workers=3,
    )
    train(model, optimizer, range(8))
    for number in range(8):
        reference.step(number)
    assert_same_weights(model, reference.model)
