"""What a training script does with `OffloadOptimizer` besides stepping: state, schedules, groups, types, odd steps."""

import copy
import gc
import io
import weakref

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from solver_plan.errors import InputError
from solver_plan.execution.offload.optimizer import OffloadOptimizer
from solver_plan.execution.offload.saved_state import MASTER
from solver_plan.offload.plan import Place
from tests.execution.offload.offload_models import (
    MIXED,
    Gpt,
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

LR = 3e-2


def make_optimizer(
    model: Gpt,
    places: tuple[Place, ...] = MIXED,
    *,
    params: object = None,
    accumulation: int = 1,
    clip: bool = False,
    **options: object,
) -> OffloadOptimizer:
    problem = problem_of(model.layers(), accumulation=accumulation, clip=clip)
    return OffloadOptimizer(
        model.parameters() if params is None else params,  # type: ignore[arg-type]
        problem=problem,
        plan=plan_of(problem, *places),
        layers=model.layers(),
        workers=2,
        **{"lr": LR, **options},  # type: ignore[arg-type]
    )


def decay_groups(model: nn.Module) -> list[dict[str, object]]:
    """Matrices decay, vectors do not; the embedding learns slower."""
    named = dict(model.named_parameters())
    embed = named.pop("embed.weight")
    return [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0, "betas": (0.8, 0.99)},
        {"params": [embed], "lr": 1e-3, "eps": 1e-6},
    ]


def test_parameter_groups_and_a_scheduler() -> None:
    model = unequal()
    reference = Reference(model, groups=decay_groups, lr=LR)
    optimizer = make_optimizer(model, params=decay_groups(model))
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 / (1 + step))
        for each in (optimizer, reference.optimizer)
    ]
    for number in range(6):
        train(model, optimizer, range(number, number + 1))
        reference.step(number)
        for schedule in schedules:
            schedule.step()
    assert_same_weights(model, reference.model)
    assert [group["lr"] for group in optimizer.param_groups] == [
        group["lr"] for group in reference.optimizer.param_groups
    ]


def test_pytorchs_default_differs_by_rounding_alone() -> None:
    # without `fused` PyTorch runs other kernels, which round differently: 1e-7 after a step. More steps show nothing,
    # as Adam turns gradients that are 0 but for rounding (biases of keys) into whole steps in any direction
    model = gpt()
    reference = Reference(model, max_norm=1.0, fused=False, lr=1e-3)
    optimizer = make_optimizer(model, max_norm=1.0, lr=1e-3)
    train(model, optimizer, range(1))
    reference.step(0)
    for mine, theirs in zip(model.parameters(), reference.model.parameters(), strict=True):
        assert (mine - theirs).norm() <= 1e-7 * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_16_bit_parameters_have_32_bit_master_weights(dtype: torch.dtype, max_norm: float | None) -> None:
    model = unequal().to(dtype)
    for block in model.blocks:
        block.norm.float()  # both types in one layer
        block.norm.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(),))
        block.norm.register_forward_hook(lambda module, inputs, output: output.to(dtype))
    reference = Reference(model, max_norm=max_norm, lr=LR)
    optimizer = make_optimizer(model, max_norm=max_norm)
    train(model, optimizer, range(8))
    for number in range(8):
        reference.step(number)
    assert_same_weights(model, reference.model)
    state = optimizer.state_dict()["state"]
    for number, (parameter, master) in enumerate(reference.masters.items()):
        if parameter.dtype == dtype:
            assert torch.equal(state[number][MASTER], master)


def test_scaled_losses_are_unscaled() -> None:
    model = unequal().half()
    reference = Reference(model, max_norm=0.5, loss_scale=2.0**7, lr=LR)
    optimizer = make_optimizer(model, max_norm=0.5)
    optimizer.loss_scale = 2.0**7
    train(model, optimizer, range(4), loss=lambda module, tokens: loss_of(module, tokens) * 2.0**7)
    for number in range(4):
        reference.step(number)
    assert_same_weights(model, reference.model)


def test_state_goes_to_and_comes_from_adamw() -> None:
    model = unequal()
    reference = Reference(model, max_norm=1.0, lr=LR)
    first = make_optimizer(model, max_norm=1.0)
    train(model, first, range(3))
    saved = copy.deepcopy(first.state_dict())

    # on in PyTorch
    for number in range(3):
        reference.step(number)
    on = Reference(model, max_norm=1.0, lr=1.0)
    on.optimizer.load_state_dict(saved)
    for number in range(3, 6):
        on.step(number)
        reference.step(number)
    assert_same_weights(on.model, reference.model)

    # and back, with another placement
    again = copy.deepcopy(on.model)
    assert isinstance(again, Gpt)
    second = make_optimizer(again, ("cpu", "gpu_streamed", "gpu"), max_norm=1.0, lr=1.0)
    second.load_state_dict(on.optimizer.state_dict())
    train(again, second, range(6, 9))
    for number in range(6, 9):
        reference.step(number)
    assert_same_weights(again, reference.model)
    assert second.param_groups[0]["lr"] == LR


def test_16_bit_state_survives_saving_whole() -> None:
    model = unequal().bfloat16()
    optimizer = make_optimizer(model)
    train(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, range(3, 6))
    file.seek(0)
    loaded = torch.load(file)
    for order in (("optimizer", "model"), ("model", "optimizer")):
        other = unequal().bfloat16()
        resumed = make_optimizer(other)
        for part in order:
            (other if part == "model" else resumed).load_state_dict(loaded[part])
        train(other, resumed, range(3, 6))
        assert_same_weights(other, model)


def test_a_state_of_another_model_is_refused() -> None:
    optimizer = make_optimizer(gpt())
    with pytest.raises(InputError, match=r"found groups of \[51\] parameters; the optimizer has \[40\]"):
        optimizer.load_state_dict(torch.optim.AdamW(unequal().parameters()).state_dict())


def test_saving_in_the_middle_of_overlap_waits() -> None:
    model = unequal()
    reference = Reference(model, max_norm=1e9, lr=LR)
    optimizer = make_optimizer(model, ("cpu",), max_norm=1e9)
    for number in range(4):
        reference.step(number)
        loss_of(model, batch(number)).backward()
        optimizer.step()
        weights = copy.deepcopy(model.state_dict())  # updates are under way
        for name, value in reference.model.state_dict().items():
            assert torch.equal(weights[name], value)


@pytest.mark.parametrize("places", [("cpu",), MIXED])
def test_saving_between_backward_and_step_gives_the_state_before(places: tuple[Place, ...]) -> None:
    model = unequal()
    reference = Reference(model, max_norm=1e9, lr=LR)
    optimizer = make_optimizer(model, places, max_norm=1e9)
    train(model, optimizer, range(2))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    loss_of(model, batch(2)).backward()
    during = model.state_dict(), optimizer.state_dict()["state"]
    for name, value in before[0].items():
        assert torch.equal(during[0][name], value)
    for number, state in before[1].items():
        for key, value in state.items():
            assert torch.equal(during[1][number][key], value)
    optimizer.step()
    train(model, optimizer, range(3, 5))
    for number in range(5):
        reference.step(number)
    assert_same_weights(model, reference.model)


@pytest.mark.parametrize("places", [("cpu",), MIXED])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_step_with_gradients_that_are_not_finite_is_skipped(places: tuple[Place, ...], poison: float) -> None:
    model = unequal()
    reference = Reference(model, max_norm=1.0, lr=LR)
    optimizer = make_optimizer(model, places, max_norm=1.0)
    for number in range(4):
        train(model, optimizer, range(number, number + 1))
        reference.step(number)
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
        # only the layer whose gradient comes last is poisoned: all others have started
        handle = model.embed.weight.register_hook(lambda gradient: gradient * poison)
        train(model, optimizer, range(99, 100))
        handle.remove()
        assert optimizer.skipped
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[0][name])
        for index, state in before[1].items():
            for key, value in state.items():
                assert torch.equal(optimizer.state_dict()["state"][index][key], value)
    train(model, optimizer, range(4, 5))
    reference.step(4)
    assert not optimizer.skipped
    assert_same_weights(model, reference.model)
    assert optimizer.report().skipped == 4


def test_gradients_that_are_dropped_leave_everything_as_it_was() -> None:
    model = unequal()
    reference = Reference(model, lr=LR)
    optimizer = make_optimizer(model)
    for number in range(3):
        loss_of(model, batch(77)).backward()
        optimizer.zero_grad()
        train(model, optimizer, range(number, number + 1))
        reference.step(number)
    assert_same_weights(model, reference.model)


def test_parameters_without_a_gradient_stay_as_they_are() -> None:
    """Blocks that are not run in a step: some parameters of a layer, then a whole layer."""

    def loss(module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        assert isinstance(module, Gpt)
        stream = module.embed(tokens[:, :-1])
        number = int(tokens.sum()) % 3
        for index, block in enumerate(module.blocks):
            if index != number:
                stream = block(stream)
            elif number == 1:
                stream = stream + block.mlp(stream)
        return nn.functional.cross_entropy(module.head(stream).flatten(0, 1), tokens[:, 1:].flatten())

    model = unequal()
    reference = Reference(model, max_norm=1.0, lr=LR)
    optimizer = make_optimizer(model, max_norm=1.0)
    train(model, optimizer, range(9), loss=loss)
    for number in range(9):
        reference.step(number, loss)
    assert_same_weights(model, reference.model)


def test_recomputed_layers_train_the_same() -> None:
    def loss(module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        assert isinstance(module, Gpt)
        stream = module.embed(tokens[:, :-1])
        for block in module.blocks:
            stream = torch.utils.checkpoint.checkpoint(block, stream, use_reentrant=False)
        return nn.functional.cross_entropy(module.head(stream).flatten(0, 1), tokens[:, 1:].flatten())

    model = unequal()
    reference = Reference(model, max_norm=1.0, lr=LR)
    optimizer = make_optimizer(model, ("cpu",), max_norm=1.0)
    train(model, optimizer, range(5), loss=loss)
    for number in range(5):
        reference.step(number)
    assert_same_weights(model, reference.model)


def test_parameters_given_without_a_module_are_waited_for() -> None:
    model = unequal()
    layers = {**model.layers(), "embed": [model.embed.weight]}
    problem = problem_of(layers)
    optimizer = OffloadOptimizer(
        model.parameters(), problem=problem, plan=plan_of(problem, "cpu"), layers=layers, lr=LR, max_norm=1.0
    )
    reference = Reference(model, max_norm=1.0, lr=LR)
    train(model, optimizer, range(5))
    for number in range(5):
        reference.step(number)
    assert_same_weights(model, reference.model)


def test_frozen_parameters_are_left_alone() -> None:
    model = unequal()
    for parameter in [*model.blocks[1].parameters(), model.blocks[0].out.bias]:
        parameter.requires_grad_(False)
    reference = Reference(model, lr=LR)
    optimizer = make_optimizer(model)
    train(model, optimizer, range(4))
    for number in range(4):
        reference.step(number)
    assert_same_weights(model, reference.model)


def test_nothing_is_kept_for_undoing_where_nothing_can_be_undone() -> None:
    model = unequal()
    reference = Reference(model, lr=LR)
    optimizer = make_optimizer(model, skip_nonfinite=False)
    train(model, optimizer, range(4))
    for number in range(4):
        reference.step(number)
    assert_same_weights(model, reference.model)
    assert optimizer.report().host_bytes < make_optimizer(unequal()).report().host_bytes
    loss_of(model, batch(9)).backward()
    for call in (optimizer.zero_grad, optimizer.state_dict):
        with pytest.raises(InputError, match=r"between backward and step\(\), when layers .* are updated already"):
            call()
    optimizer.max_norm = 1.0
    with pytest.raises(InputError, match=r"max_norm: found 1.0, .* set after the optimizer was made without either"):
        optimizer.step()
    optimizer.max_norm = None
    optimizer.step()
    loss_of(model, batch(10)).backward()
    optimizer.close()


@pytest.mark.parametrize("undo_bytes", [0, 5000])
def test_what_finds_no_room_for_undoing_waits(undo_bytes: int) -> None:
    model = unequal()
    reference = Reference(model, max_norm=1.0, lr=LR)
    optimizer = make_optimizer(model, max_norm=1.0, undo_bytes=undo_bytes, barrier_above=1.0)
    train(model, optimizer, range(5), speculated=undo_bytes > 0)
    for number in range(5):
        reference.step(number)
    assert_same_weights(model, reference.model)
    assert optimizer.report().undone == (5 if undo_bytes else 0)


def test_a_plan_with_clipping_waits_and_needs_no_room_for_undoing() -> None:
    model = unequal()
    reference = Reference(model, max_norm=1.0, lr=LR)
    optimizer = make_optimizer(model, clip=True, max_norm=1.0)
    train(model, optimizer, range(5))
    for number in range(5):
        reference.step(number)
    assert_same_weights(model, reference.model)
    assert optimizer.report().undone == 0


def test_updates_wait_where_clipping_is_frequent_and_speculate_again() -> None:
    model = unequal()
    optimizer = make_optimizer(model, max_norm=1e-3, barrier_above=0.25)
    train(model, optimizer, range(10), speculated=True)
    report = optimizer.report()
    assert (report.clipped, report.undone, report.waited) == (10, 5, 5)
    optimizer.max_norm = 1e9
    train(model, optimizer, range(10, 40))
    assert optimizer.report().clipped == 10
    # at most half of 0.25 * 16 clipped steps are left in sight after 14 steps
    assert optimizer.report().waited == 5 + 14


def test_what_is_ready_is_updated_in_the_plans_order() -> None:
    model = unequal()
    problem = problem_of(model.layers(), clip=True)
    plan = plan_of(problem, "cpu")
    optimizer = OffloadOptimizer(
        model.parameters(), problem=problem, plan=plan, layers=model.layers(), workers=1, max_norm=1.0
    )
    lanes = optimizer._engine.lanes
    loss_of(model, batch(0)).backward()
    lanes.wait(lambda: len(lanes._ready["cpu"]) >= 8)
    with lanes.lock:
        lanes.record = []
        ready = {operation.label for *_, operation in lanes._ready["cpu"]}
    optimizer.step()
    optimizer.synchronize()
    updates = sorted((item.start_ms, item.layer, item.chunk) for item in plan.timeline if item.operation == "update")
    planned = [f"update of {layer!r} chunk {chunk}" for _, layer, chunk in updates]
    assert [label for label in lanes.record if label in ready] == [label for label in planned if label in ready]


def test_evaluation_sees_whole_weights() -> None:
    model = unequal()
    reference = Reference(model, lr=LR)
    optimizer = make_optimizer(model)
    for number in range(3):
        loss_of(model, batch(number)).backward()
        optimizer.step()
        reference.step(number)
        with torch.no_grad():
            assert torch.equal(loss_of(model, batch(50)), loss_of(reference.model, batch(50)))
    loss_of(model, batch(3)).backward()
    with torch.no_grad():  # before the step
        assert torch.equal(loss_of(model, batch(50)), loss_of(reference.model, batch(50)))
    optimizer.step()
    reference.step(3)
    optimizer.synchronize()
    assert_same_weights(model, reference.model)


def test_weights_that_a_user_writes_are_taken_over() -> None:
    model = unequal()
    optimizer = make_optimizer(model)
    train(model, optimizer, range(2))
    reference = Reference(model, lr=LR)
    reference.optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with torch.no_grad():
        for each in (model, reference.model):
            for parameter in each.parameters():
                parameter.mul_(0.5)
    train(model, optimizer, range(2, 4))
    for number in range(2, 4):
        reference.step(number)
    assert_same_weights(model, reference.model)


@pytest.mark.parametrize("places", [("cpu",), MIXED])
def test_gradients_are_free_when_a_step_is_done(places: tuple[Place, ...]) -> None:
    model = unequal()
    found: list[weakref.ref[torch.Tensor]] = []

    def keep(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        found.append(weakref.ref(parameter.grad))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(keep)
    optimizer = make_optimizer(model, places, max_norm=1.0)
    gc.disable()  # a device's memory does not wait for it
    try:
        train(model, optimizer, range(2), speculated=True)
        assert len(found) == 2 * len(list(model.parameters()))
        assert [reference() for reference in found] == [None] * len(found)
    finally:
        gc.enable()


def test_closing_ends_the_threads_and_the_hooks() -> None:
    model = unequal()
    optimizer = make_optimizer(model)
    train(model, optimizer, range(1))
    optimizer.close()
    assert not any(thread.is_alive() for thread in optimizer._engine.lanes._threads)
    loss_of(model, batch(0)).backward()
    assert model.embed.weight.grad is not None
