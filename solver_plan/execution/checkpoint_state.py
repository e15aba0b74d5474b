"""What a rank brings to a checkpoint, by names that no plan changes.

A weight is named by its operator and its name in the operator's module: ``model/attention0/qkv.weight``; what the
optimizer keeps of it, ``optimizer/attention0/qkv.weight/exp_avg``. Where a rank holds a part, the tensor is a `DTensor`
that says which. An executor gives its tensors as `Held`; that is all that checkpoints need to know of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from solver_plan.errors import CheckpointError, NotExecutableError
from solver_plan.execution.model import Model, shared_users, without_storage

MODEL, OPTIMIZER = "model", "optimizer"
_NUMBER = "number:"
"""Before the name of optimizer state that is a Python number and no tensor."""

State = dict[str, torch.Tensor]
Weights = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and type of every weight and persistent buffer of a model, by name."""


@dataclass(frozen=True)
class Held:
    """A weight or buffer that a rank holds, whole or a part."""

    name: str
    """Operator and name in its module; of shared weights, those of the first operator that has them."""
    tensor: torch.Tensor
    """A `DTensor` where this rank holds a part."""
    speaks: bool = True
    """Whether it goes into a checkpoint from here; else another rank's copy does. Equal copies may all speak."""


class TrainedPart(Protocol):
    """This rank's part of what is trained, however it is executed."""

    rank: int
    optimizer: Optimizer | None

    def held(self) -> Sequence[Held]:
        """Return the weights and persistent buffers of this rank."""

    def seed_random(self, seed: int, step: int) -> None:
        """Seed torch's generators of this rank for the steps from `step` on."""


def tensors_of(module: nn.Module) -> State:
    """Return the weights and persistent buffers of a module by name, the very tensors."""
    return {key: value for key, value in module.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}


def weights_of(model: Model, dtype: torch.dtype) -> Weights:
    """Return shape and type of every weight and persistent buffer of a model, by name, without any storage."""
    shared = shared_users(model)
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for index, layer in enumerate(model.layers):
        copies = {path for name, path in layer.shared_weights.items() if shared[name][0] != index}
        for key, tensor in tensors_of(without_storage(layer, dtype)).items():
            if key not in copies:
                found[f"{layer.name}/{key}"] = tuple(tensor.shape), tensor.dtype
    return found


def require_same_weights(saved: Mapping[str, object], weights: Weights, checkpoint: str) -> None:
    """Raise `CheckpointError` unless a checkpoint holds the weights of this model in this precision.

    Parameters
    ----------
    saved
        What the checkpoint's metadata says of each tensor.
    weights
        Of the model.
    checkpoint
        Its name, for messages.
    """
    other = f"{checkpoint}: a checkpoint of another model"
    remedy = "choose another folder"
    for name, (shape, dtype) in weights.items():
        found = saved.get(f"{MODEL}/{name}")
        if not isinstance(found, TensorStorageMetadata):
            raise CheckpointError(f"{other}: it has no weight {name!r}; {remedy}")
        if tuple(found.size) != shape:
            raise CheckpointError(f"{other}: its weight {name!r} has shape {tuple(found.size)}, not {shape}; {remedy}")
        if found.properties.dtype != dtype:
            raise CheckpointError(
                f"{checkpoint}: its weight {name!r} has type {_plain(found.properties.dtype)}, this run trains in "
                f"{_plain(dtype)}; run in the checkpoint's precision, or {remedy}"
            )
    for key in saved:
        if key.startswith(f"{MODEL}/") and key.removeprefix(f"{MODEL}/") not in weights:
            raise CheckpointError(f"{other}: this model has no weight {key.removeprefix(f'{MODEL}/')!r}; {remedy}")


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def state_to_save(part: TrainedPart) -> State:
    """Return this rank's tensors for a checkpoint.

    Raises `NotExecutableError` if the optimizer keeps something of a split weight that cannot be split like it.
    """
    state: State = {}
    for held in part.held():
        if not held.speaks or f"{MODEL}/{held.name}" in state:
            continue
        state[f"{MODEL}/{held.name}"] = held.tensor.detach()
        kept = _optimizer_state(part, held.tensor)
        for key, value in kept.items():
            if isinstance(value, torch.Tensor):
                _require_splittable(held, key, tuple(value.shape), isinstance(value, DTensor))
                state[f"{OPTIMIZER}/{held.name}/{key}"] = value.detach()
            elif isinstance(value, bool | int | float):
                exact = torch.float64 if isinstance(value, float) else torch.int64
                state[f"{OPTIMIZER}/{held.name}/{_NUMBER}{key}"] = torch.tensor(value, dtype=exact)
            elif value is not None:
                raise NotExecutableError(
                    f"optimizer: its state {key!r} of weight {held.name!r} is a {type(value).__name__}; "
                    "checkpoints keep tensors and numbers"
                )
    return state


def _optimizer_state(part: TrainedPart, tensor: torch.Tensor) -> dict[str, object]:
    if part.optimizer is None or not isinstance(tensor, nn.Parameter):
        return {}
    found: dict[str, object] = part.optimizer.state.get(tensor, {})
    return found


def _require_splittable(held: Held, key: str, shape: tuple[int, ...], is_split: bool) -> None:
    """State of a split weight must have its shape and be split with it, or be one number that all ranks have."""
    if isinstance(held.tensor, DTensor) and shape and not (is_split and shape == tuple(held.tensor.shape)):
        raise NotExecutableError(
            f"optimizer: its state {key!r} of weight {held.name!r} has shape {shape}, the weight "
            f"{tuple(held.tensor.shape)}, split over ranks; checkpoints need state of the weight's shape"
        )


class Targets:
    """Where the tensors of a checkpoint go on this rank.

    A rank that holds several copies of shared weights takes them in several passes, one copy each.
    """

    def __init__(self, part: TrainedPart, saved: Mapping[str, object]) -> None:
        self.part = part
        self.passes: list[State] = []
        self._states: list[tuple[nn.Parameter, dict[str, torch.Tensor]]] = []
        of_weight = _optimizer_keys(saved)
        for held in part.held():
            targets = {f"{MODEL}/{held.name}": held.tensor.detach()}
            if part.optimizer is not None and isinstance(held.tensor, nn.Parameter):
                kept = {key: self._place(held, key, metadata) for key, metadata in of_weight.get(held.name, {}).items()}
                if kept:
                    self._states.append((held.tensor, kept))
                targets |= {f"{OPTIMIZER}/{held.name}/{key}": tensor for key, tensor in kept.items()}
            self._add(targets)

    def _add(self, targets: State) -> None:
        for before in self.passes:
            if not before.keys() & targets.keys():
                before.update(targets)
                return
        self.passes.append(targets)

    def _place(self, held: Held, key: str, metadata: TensorStorageMetadata) -> torch.Tensor:
        shape, dtype = tuple(metadata.size), metadata.properties.dtype
        if shape == tuple(held.tensor.shape) and shape:
            return torch.zeros_like(held.tensor, dtype=dtype).detach()
        _require_splittable(held, key, shape, False)
        return torch.zeros(shape, dtype=dtype, device=held.tensor.device if shape else "cpu")

    def hand_over(self) -> None:
        """Give the optimizer its state, once all passes have been read."""
        optimizer = self.part.optimizer
        if optimizer is None:
            return
        whole = optimizer.state_dict()
        numbers = _numbers(optimizer)
        state: dict[int, dict[str, object]] = {}
        for parameter, kept in self._states:
            state[numbers[parameter]] = {
                key.removeprefix(_NUMBER): tensor.item() if key.startswith(_NUMBER) else tensor
                for key, tensor in kept.items()
            }
        # the optimizer itself knows on which device it wants its numbers
        optimizer.load_state_dict({"state": state, "param_groups": whole["param_groups"]})


def _numbers(optimizer: Optimizer) -> dict[nn.Parameter, int]:
    """Return the number of each parameter in the optimizer's state dict: they are counted over the groups."""
    parameters: Iterator[nn.Parameter] = (each for group in optimizer.param_groups for each in group["params"])
    return {parameter: number for number, parameter in enumerate(parameters)}


def _optimizer_keys(saved: Mapping[str, object]) -> dict[str, dict[str, TensorStorageMetadata]]:
    found: dict[str, dict[str, TensorStorageMetadata]] = {}
    for name, metadata in saved.items():
        if name.startswith(f"{OPTIMIZER}/") and isinstance(metadata, TensorStorageMetadata):
            weight, _, key = name.removeprefix(f"{OPTIMIZER}/").rpartition("/")
            found.setdefault(weight, {})[key] = metadata
    return found
