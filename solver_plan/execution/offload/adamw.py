"""AdamW on flat 32-bit state, with PyTorch's fused kernel: the results of `torch.optim.AdamW(fused=True)`.

Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019, algorithm 2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from solver_plan.errors import InputError


@dataclass(frozen=True)
class Hyperparameters:
    """Of one parameter group in one step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool


def hyperparameters(group: dict[str, object], index: int) -> Hyperparameters:
    """Return a parameter group's values. Raises `InputError` for one that makes no sense or is not built."""
    for option in ("amsgrad", "capturable", "differentiable"):
        if group.get(option):
            raise InputError(f"param_groups[{index}].{option}: found True, which is not built; set it to False")
    betas = group["betas"]
    assert isinstance(betas, tuple | list)
    found = Hyperparameters(
        lr=_number(group["lr"]),
        beta1=_number(betas[0]),
        beta2=_number(betas[1]),
        eps=_number(group["eps"]),
        weight_decay=_number(group["weight_decay"]),
        maximize=bool(group["maximize"]),
    )
    for name, value, most in (
        ("lr", found.lr, math.inf),
        ("betas", found.beta1, 1.0),
        ("betas", found.beta2, 1.0),
        ("eps", found.eps, math.inf),
        ("weight_decay", found.weight_decay, math.inf),
    ):
        if not 0 <= value < most:
            rule = "a finite number of at least 0" if most == math.inf else "at least 0 and below 1"
            raise InputError(f"param_groups[{index}].{name}: found {value}; {rule}")
    return found


def _number(value: object) -> float:
    assert isinstance(value, int | float | torch.Tensor)
    return float(value)


def scale(gradients: Sequence[torch.Tensor], factors: Sequence[torch.Tensor]) -> None:
    """Multiply 32-bit gradients by factors (0-dim), one after the other."""
    for factor in factors:
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device))


def update(
    masters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    steps: Sequence[float],
    values: Hyperparameters,
) -> None:
    """Update tensors of one parameter group in place; all are 32-bit, `steps` count this one."""
    device = masters[0].device
    torch._fused_adamw_(  # (the kernel behind torch.optim.AdamW(fused=True))
        list(masters),
        list(gradients),
        list(exp_avgs),
        list(exp_avg_sqs),
        [],
        [torch.full((), step, dtype=torch.float32, device=device) for step in steps],
        lr=values.lr,
        beta1=values.beta1,
        beta2=values.beta2,
        weight_decay=values.weight_decay,
        eps=values.eps,
        amsgrad=False,
        maximize=values.maximize,
        grad_scale=None,
        found_inf=None,
    )
