"""State in the form of `torch.optim.AdamW`: the tensors of each parameter, and taking over a state that was saved."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from solver_plan.errors import InputError
from solver_plan.execution.offload.adamw import hyperparameters
from solver_plan.execution.offload.layers import Slot
from solver_plan.execution.offload.state import LayerState

MASTER = "master"
"""Key of a parameter's 32-bit weights, where the parameter has 16 bits."""

_OWN_OPTIONS = ("params", "foreach", "fused")
"""Of a group, not taken from a state that is loaded: parameters, and which of PyTorch's kernels runs."""

Group = dict[str, Any]
"""A parameter group as PyTorch has it."""


def state_of(layer: LayerState, slot: Slot, count: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the state of a parameter as views of its layer's."""
    shape = slot.parameter.shape
    first, second = layer.moments(slot)
    state = {"step": count, "exp_avg": first.view(shape), "exp_avg_sq": second.view(shape)}
    if slot.weights.dtype != torch.float32:
        state[MASTER] = layer.master(slot).view(shape)
    return state


def saved_states(groups: Sequence[Group], state_dict: Mapping[str, Any]) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the saved state of each parameter, and check that it fits. Raises `InputError`."""
    if not isinstance(state_dict, Mapping) or not {"param_groups", "state"} <= state_dict.keys():
        raise InputError("state_dict: found no 'param_groups' and 'state'; load what state_dict() of AdamW returns")
    saved_groups = state_dict["param_groups"]
    sizes, saved_sizes = ([len(group["params"]) for group in each] for each in (groups, saved_groups))
    if sizes != saved_sizes:
        raise InputError(
            f"state_dict: found groups of {saved_sizes} parameters; the optimizer has {sizes}: load it with the same "
            "parameters"
        )
    found: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
    for index, (group, saved_group) in enumerate(zip(groups, saved_groups, strict=True)):
        hyperparameters({**group, **saved_group}, index)
        for parameter, number in zip(group["params"], saved_group["params"], strict=True):
            saved = state_dict["state"].get(number, {})
            for key in ("exp_avg", "exp_avg_sq", MASTER):
                if key in saved and saved[key].shape != parameter.shape:
                    raise InputError(
                        f"state_dict: found {key} of shape {tuple(saved[key].shape)} for parameter {number} of shape "
                        f"{tuple(parameter.shape)}; load the state of the same model"
                    )
            found[parameter] = saved
    return found


def load_groups(groups: Sequence[Group], state_dict: Mapping[str, Any]) -> None:
    """Take over learning rates and other values."""
    for mine, saved in zip(groups, state_dict["param_groups"], strict=True):
        mine.update({key: value for key, value in saved.items() if key not in _OWN_OPTIONS})


def load_slot(layer: LayerState, slot: Slot, count: torch.Tensor, saved: Mapping[str, torch.Tensor]) -> None:
    """Take over the state of one parameter; what is not there is that of a parameter that was never updated."""
    count.fill_(float(saved.get("step", 0.0)))
    for key, mine in zip(("exp_avg", "exp_avg_sq"), layer.moments(slot), strict=True):
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
    slot.version = slot.parameter._version  # noqa: SLF001  (counts changes that are not ours)
