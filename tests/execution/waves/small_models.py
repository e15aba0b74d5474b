"""A small multi-task model: encoders, a text model that takes what they give, a contrastive loss."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from solver_plan.execution.model import Layer, TensorParallel, Values
from solver_plan.execution.waves.model import (
    ComponentModel,
    Given,
    MultitaskBatch,
    MultitaskModel,
    Objective,
    TaskBatch,
)

WIDTH, LENGTH, CLASSES = 12, 3, 5


class Block(nn.Module):
    """A residual MLP, and mixing over the length, on the stream; what else comes is carried past."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, stream: torch.Tensor, *carried: torch.Tensor) -> Values:
        mixed = stream + stream.mean(dim=1, keepdim=True)
        return stream + self.narrow(self.wide(self.norm(mixed)).tanh()), *carried


class Stem(Block):
    """The first layer of an encoder."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.stem = nn.Linear(features, WIDTH)

    def forward(self, features: torch.Tensor, *carried: torch.Tensor) -> Values:
        return super().forward(self.stem(features), *carried)


class Words(Block):
    """The first layer of the text model: what the encoders give, then embedded words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(CLASSES, WIDTH)

    def forward(self, *values: torch.Tensor) -> Values:
        *given, words = values
        return super().forward(torch.cat([*given, self.words(words)], dim=1), words)


class Logits(Block):
    """The last layer of the text model."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, stream: torch.Tensor, *carried: torch.Tensor) -> Values:
        stream, *_ = super().forward(stream)
        return (self.head(stream[:, -LENGTH:]),)


class Pooled(Block):
    """The last layer of an encoder of a contrastive pair: a vector of length 1 for each sample."""

    def forward(self, stream: torch.Tensor, *carried: torch.Tensor) -> Values:
        stream, *_ = super().forward(stream)
        return (nn.functional.normalize(stream.mean(dim=1), dim=-1),)


def split(tensor_parallel: int, partition: int) -> TensorParallel:
    return TensorParallel({"wide": ColwiseParallel(), "narrow": RowwiseParallel()})


def layers(name: str, first: type[nn.Module] | partial[nn.Module], middle: int, last: type[nn.Module]) -> list[Layer]:
    builds = [first, *[Block] * middle, last]
    return [Layer(f"{name}.{number}", build, split) for number, build in enumerate(builds)]


FEATURES = {"image": 7, "sound": 4, "depth": 9}
WEIGHTS = {
    **{name: layers(name, partial(Stem, width), 1, Block) for name, width in FEATURES.items()},
    **{f"{name}-pair": layers(name, partial(Stem, width), 0, Pooled) for name, width in FEATURES.items()},
    "text": layers("text", Words, 1, Logits),
}
"""An encoder has three layers, one of a pair two, the text model three."""


def cross_entropy(outputs: Given, targets: Values) -> torch.Tensor:
    (wanted,) = targets
    losses = [
        nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum") / LENGTH
        for (logits,) in outputs.values()
    ]
    return torch.stack(losses).sum()


def contrastive(outputs: Given, targets: Values) -> torch.Tensor:
    (one,), (other,) = outputs.values()
    scores = one @ other.T / 0.2
    right = torch.arange(len(one))
    return (
        nn.functional.cross_entropy(scores, right, reduction="sum")
        + nn.functional.cross_entropy(scores.T, right, reduction="sum")
    ) / 2


def model(components: Mapping[str, str], frozen: Sequence[str] = ()) -> MultitaskModel:
    """The model of components, each with the name of its weights; a task with a text component has words to predict."""
    texts = [name for name, weights in components.items() if weights == "text"]
    tasks = dict.fromkeys(name.split("/")[0] for name in components)
    with_text = {name.split("/")[0] for name in texts}
    used = dict.fromkeys(components.values())

    def make(samples: Mapping[str, int], generator: torch.Generator) -> MultitaskBatch:
        batch = {}
        for task, count in samples.items():
            inputs: dict[str, Values] = {}
            for name, weights in components.items():
                if name.split("/")[0] != task:
                    continue
                if weights == "text":
                    inputs[name] = (torch.randint(CLASSES, (count, LENGTH), generator=generator),)
                else:
                    width = FEATURES[weights.removesuffix("-pair")]
                    inputs[name] = (torch.randn(count, LENGTH, width, generator=generator),)
            targets = (torch.randint(CLASSES, (count, LENGTH), generator=generator),) if task in with_text else ()
            batch[task] = TaskBatch(inputs, targets)
        return batch

    return MultitaskModel(
        weights={name: WEIGHTS[name] for name in used},
        components={name: ComponentModel(weights, trained=name not in frozen) for name, weights in components.items()},
        objectives={
            task: Objective(cross_entropy) if task in with_text else Objective(contrastive, whole_batch=True)
            for task in tasks
        },
        make_batch=make,
    )
