"""Clipping by the global norm, exactly as `torch.nn.utils.clip_grad_norm_` does it, and whether to speculate on it.

The norm of all gradients is known when the last backward has ended. An update that starts earlier speculates that no
gradient is clipped and all are finite. Where that is wrong the update is undone and repeated, so where it is often
wrong, waiting is better.
"""

from collections import deque
from collections.abc import Sequence

import torch

HISTORY = 16
"""Steps that are looked back on."""


def norms_of(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the 2-norm of each gradient, in 32 bit, on its device."""
    if not gradients:
        return []
    return list(torch._foreach_norm(list(gradients), 2.0, dtype=torch.float32))  # noqa: SLF001  (as clip_grad_norm_)


def total_norm(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all gradients, on the CPU; waits for the device."""
    if not norms:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(list(norms)), 2.0)
    return total.cpu()


def clip_factor(total: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return what gradients are multiplied by: 1 where they are not clipped."""
    return torch.clamp(max_norm / (total + 1e-6), max=1.0)


class Speculation:
    """Decides from the last steps whether the next one speculates.

    Parameters
    ----------
    barrier_above
        Share of the last `HISTORY` steps that were clipped or skipped above which updates wait for the norm; they
        speculate again at half of it. 0: always wait after the first such step in sight; 1: never wait.
    """

    def __init__(self, barrier_above: float) -> None:
        self.barrier_above = barrier_above
        self.on = True
        self._wrong: deque[bool] = deque(maxlen=HISTORY)

    def record(self, wrong: bool) -> None:
        """Say whether speculation was, or would have been, wrong in a step."""
        self._wrong.append(wrong)
        share = sum(self._wrong) / HISTORY
        if share > self.barrier_above:
            self.on = False
        elif share <= self.barrier_above / 2:
            self.on = True
