"""Checkpoints of wavefront runs load under another plan: other slices, degrees, number of ranks."""

import dataclasses
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch import nn

from solver_plan.errors import CheckpointError, RunFailedError
from solver_plan.execution.checkpoint_folder import Checkpoints
from solver_plan.execution.launch import run_local
from solver_plan.execution.model import Layer, Values
from solver_plan.execution.run import Training, run
from solver_plan.execution.waves.compile import compile_waves
from solver_plan.execution.waves.executor import WaveExecutor
from solver_plan.execution.waves.model import MultitaskModel
from solver_plan.wavefront.plan import WavefrontPlan
from tests.execution.waves.cases import Piece, plan
from tests.execution.waves.small_models import Block
from tests.execution.waves.test_run import FOUR, MODEL, PLAN

TWO_RANKS: list[Piece] = [
    ("caption/image", (0, 1), [0], 0),
    ("pair/sound", (0, 2), [1], 0),
    ("caption/image", (1, 3), [0, 1], 1),
    ("pair/image", (0, 2), [0, 1], 1),
    ("caption/text", (0, 3), [1], 0),
]
TENSOR_RANKS: list[Piece] = [
    ("caption/image", (0, 3), [0, 1], 3),
    ("pair/image", (0, 2), [2, 3], 3),
    ("pair/sound", (0, 2), [2], 0),
    ("caption/text", (0, 3), range(4), 4),
]


def train(
    made: WavefrontPlan, ranks: int, steps: int, folder: Path | None, modules: MultitaskModel = MODEL
) -> list[float]:
    checkpoints = None if folder is None else Checkpoints(folder, every=2)
    training = Training(steps=steps, dtype=torch.float64, checkpoints=checkpoints)
    return list(run(FOUR, made, training, model=modules, local=ranks).losses)


def test_a_checkpoint_goes_on_under_other_slices_degrees_and_ranks(tmp_path: Path) -> None:
    undisturbed = train(PLAN, 4, 8, None)
    assert train(PLAN, 4, 2, tmp_path) == undisturbed[:2]
    losses = train(plan(FOUR, TWO_RANKS), 2, 4, tmp_path)
    losses += train(plan(FOUR, TENSOR_RANKS), 4, 6, tmp_path)
    losses += train(PLAN, 4, 8, tmp_path)
    assert losses == pytest.approx(undisturbed[2:], rel=1e-12)


class Noisy(Block):
    """With dropout."""

    def forward(self, stream: torch.Tensor, *carried: torch.Tensor) -> Values:
        stream, *carried_on = super().forward(stream, *carried)
        return nn.functional.dropout(stream, 0.2), *carried_on


def noisy() -> MultitaskModel:
    image = MODEL.weights["image"]
    weights = {**MODEL.weights, "image": [image[0], Layer("image.1", Noisy, image[1].tensor_parallel), image[2]]}
    return dataclasses.replace(MODEL, weights=weights)


@pytest.mark.parametrize("slices", [None, TENSOR_RANKS])
def test_under_the_same_plan_dropout_goes_on_too(slices: list[Piece] | None, tmp_path: Path) -> None:
    made = PLAN if slices is None else plan(FOUR, slices)
    undisturbed = train(made, 4, 4, None, noisy())
    if slices is None:
        assert undisturbed != pytest.approx(train(made, 4, 4, None), rel=1e-6)
    assert train(made, 4, 2, tmp_path, noisy()) + train(made, 4, 4, tmp_path, noisy()) == undisturbed


def test_tensor_ranks_draw_the_same_numbers() -> None:
    program = compile_waves(FOUR, plan(FOUR, TENSOR_RANKS))

    def weights(rank: int) -> dict[str, dict[str, torch.Tensor]]:
        executor = WaveExecutor(program, noisy())
        for number in range(2):
            executor.step(MODEL.make_batch(program.task_samples, torch.Generator().manual_seed(number)))
        return executor.weights()

    first, second, *_ = run_local(weights, 4, timeout_s=60)
    image = [name for name in first if name.startswith("image.")]
    assert len(image) == 3
    for name in image:
        for key, tensor in first[name].items():
            assert torch.equal(tensor, second[name][key]), (name, key)


def test_a_checkpoint_of_other_weights_is_refused(tmp_path: Path) -> None:
    train(PLAN, 4, 2, tmp_path)
    other = dataclasses.replace(
        MODEL,
        weights={"words" if name == "text" else name: layers for name, layers in MODEL.weights.items()},
        components={
            name: dataclasses.replace(each, weights="words" if each.weights == "text" else each.weights)
            for name, each in MODEL.components.items()
        },
    )
    with pytest.raises(CheckpointError, match=r"it has no weight 'words\.0/"):
        train(PLAN, 4, 4, tmp_path, other)


def test_a_rank_that_dies_is_named_with_its_slice(tmp_path: Path) -> None:
    class Deadly(Block):
        def forward(self, stream: torch.Tensor, *carried: torch.Tensor) -> Values:
            if not stream.is_meta:
                os._exit(9)
            return super().forward(stream, *carried)

    image = MODEL.weights["image-pair"]
    weights = {**MODEL.weights, "image-pair": [image[0], Layer("image-pair.1", Deadly)]}
    with pytest.raises(RunFailedError, match=r"rank 2 .*step 1, 1F"):
        train(PLAN, 4, 2, None, dataclasses.replace(MODEL, weights=weights))
