"""Faults: a rank that dies, stalls or fails ends the run on all, is named, and a restart trains as if undisturbed."""

import dataclasses
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch import nn

from solver_plan.errors import InputError, RunFailedError
from solver_plan.execution.checkpoint_folder import Checkpoints
from solver_plan.execution.model import Batch, Layer, Model
from solver_plan.execution.run import Training, run
from tests.execution.cases import plan, problem, stage
from tests.execution.small_models import names

TIMEOUT_S = 3.0


class Troubled(nn.Module):
    """A layer in which something happens at a certain forward, once, in the backward or forward."""

    def __init__(self, trouble: Callable[[], None] | None, at: int, backward: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.trouble, self.at, self.backward, self.forwards = trouble, at, backward, 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        outputs = self.linear(values)
        if not values.is_meta:
            self.forwards += 1
            if self.trouble is not None and self.forwards == self.at:
                trouble = self.trouble
                if self.backward:
                    outputs.register_hook(lambda gradient: trouble())
                else:
                    trouble()
        return outputs


def model(trouble: Callable[[], None] | None = None, at: int = 0, *, layer: int = 2, backward: bool = False) -> Model:
    layers = tuple(
        Layer(f"layer{index}", lambda index=index: Troubled(trouble if index == layer else None, at, backward))  # type: ignore[misc]
        for index in range(4)
    )

    def batch(samples: int, generator: torch.Generator) -> Batch:
        return Batch(*(((torch.randn(samples, 8, generator=generator),)) for _ in range(2)))

    return Model(layers, lambda outputs, targets: ((outputs[0] - targets[0]) ** 2).sum(), batch)


TWO = problem(names(model()), 2)
TWO_STAGES = plan(TWO, [stage((0, 2), [0]), stage((2, 4), [1])], 4)
"""Two micro-batches a step: forwards 1 and 2 are those of step 1."""
THREE = problem(names(model()), 4)
TEAM = plan(THREE, [stage((0, 2), [0, 1]), stage((2, 4), [2, 3])], 4)


def train(
    modules: Model, steps: int = 4, folder: Path | None = None, *, restarts: int = 0, **changed: object
) -> list[float]:
    """Train on two ranks and return the loss of each step, whichever attempt came to it."""
    found: dict[int, float] = {}
    checkpoints = None if folder is None else Checkpoints(folder, every=1)
    training = Training(steps=steps, timeout_s=TIMEOUT_S, checkpoints=checkpoints)
    training = dataclasses.replace(training, **changed)  # type: ignore[arg-type]
    report = run(TWO, TWO_STAGES, training, model=modules, local=2, restarts=restarts)
    found.update(enumerate(report.losses, report.first_step))
    return [found[step] for step in sorted(found)]


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stalled() -> None:
    time.sleep(100)


def failed() -> None:
    raise ArithmeticError("this layer is broken")


@pytest.mark.parametrize(
    ("trouble", "layer", "backward", "message", "longest_s"),
    [
        (killed, 2, False, r"rank 1 was killed or crashed \(SIGKILL\), last seen at ", 0.0),
        (killed, 0, True, r"rank 0 was killed or crashed \(SIGKILL\), last seen at ", 0.0),
        (stalled, 2, False, r"rank 1 stalled: for [34] s at step 2, 1F1, timeout 3 s", TIMEOUT_S),
        (stalled, 0, True, r"rank 0 stalled: for [34] s at step 2, 0B1, timeout 3 s", TIMEOUT_S),
        (stopped, 2, False, r"rank 1 does not answer: it died, is stopped or .* last seen at ", TIMEOUT_S),
        (failed, 2, True, r"rank 1 failed: 1B1: ArithmeticError: this layer is broken; all were ended", 0.0),
    ],
)
def test_a_rank_that_ends_or_stalls_ends_all_and_is_named(
    trouble: Callable[[], None], layer: int, backward: bool, message: str, longest_s: float
) -> None:
    began = time.monotonic()
    with pytest.raises(RunFailedError, match=message) as caught:
        train(model(trouble, 4, layer=layer, backward=backward))
    assert time.monotonic() - began < longest_s + 5
    assert "\n" not in str(caught.value)
