"""Torch modules of Multitask-CLIP: encoders that end in a vector a sample, compared within a batch."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from models.multitask import Task, Tower
from models.multitask_modules import (
    PatchEntrance,
    WordEntrance,
    norm,
    random_patches,
    random_words,
    tower_layers,
)
from solver_plan.execution.model import Values
from solver_plan.execution.waves.model import (
    ComponentModel,
    Given,
    MultitaskBatch,
    MultitaskModel,
    Objective,
    TaskBatch,
)

SCALE = 100.0
"""Largest factor of the similarities of a pair (Radford et al. 2021, section 2.5)."""


class ClassEntrance(PatchEntrance):
    """Patches behind a learned class token."""

    def __init__(self, hidden: int, features: int, tokens: int) -> None:
        super().__init__(hidden, features, tokens)
        self.token = nn.Parameter(0.02 * torch.randn(hidden))

    def forward(self, patches: torch.Tensor) -> Values:
        """(samples, length - 1, features) -> stream."""
        projected = self.patches(patches)
        token = self.token.expand(len(projected), 1, -1)
        return (torch.cat([token, projected], dim=1) + self.positions,)


class VectorExit(nn.Module):
    """A token of each sample as a vector of the common space, of a learned length.

    The product of the lengths of a pair is the factor of its similarities, 1 / 0.07 at first.
    """

    def __init__(self, tower: Tower, common: int, token: int) -> None:
        super().__init__()
        self.token = token
        self.norm = norm(tower)
        self.out = nn.Linear(tower.hidden, common, bias=False)
        self.logarithm = nn.Parameter(torch.tensor(1 / 0.07).sqrt().log())

    def forward(self, stream: torch.Tensor) -> Values:
        """Stream -> (samples, common)."""
        vectors = nn.functional.normalize(self.out(self.norm(stream[:, self.token])), dim=-1)
        return (vectors * self.logarithm.exp().clamp(max=SCALE**0.5),)


def contrastive_loss(outputs: Given, targets: Values) -> torch.Tensor:
    """Return the sum over samples of the cross-entropy of their partner among all, both ways (Radford et al. 2021)."""
    (one,), (other,) = outputs.values()
    similarities = one @ other.T
    precise = similarities if similarities.dtype == torch.float64 else similarities.float()
    partners = torch.arange(len(precise), device=precise.device)
    there = nn.functional.cross_entropy(precise, partners, reduction="sum")
    return (there + nn.functional.cross_entropy(precise.T, partners, reduction="sum")) / 2


def contrastive_pairs(
    tasks: Sequence[Task], features: Mapping[str, int], vocabulary: int, common: int
) -> MultitaskModel:
    """Return the modules of tasks of two encoders; an encoder without `features` takes words."""
    towers = {tower.name: tower for task in tasks for stage in task.stages for tower in stage}

    def make(samples: Mapping[str, int], generator: torch.Generator) -> MultitaskBatch:
        made = {}
        for task in tasks:
            inputs: dict[str, Values] = {}
            for tower in task.stages[0] if task.name in samples else ():
                count = samples[task.name]
                if tower.name in features:
                    patches = random_patches(count, tower.tokens - 1, features[tower.name], generator)
                    inputs[task.component(tower)] = (patches,)
                else:
                    inputs[task.component(tower)], _ = random_words(count, tower.tokens, vocabulary, generator)
            if inputs:
                made[task.name] = TaskBatch(inputs)
        return made

    weights = {}
    for name, tower in towers.items():
        entrance: Callable[[], nn.Module]
        if name in features:
            entrance = partial(ClassEntrance, tower.hidden, features[name], tower.tokens)
            leaving = partial(VectorExit, tower, common, 0)
        else:
            entrance = partial(WordEntrance, tower.hidden, vocabulary, tower.tokens)
            leaving = partial(VectorExit, tower, common, -1)
        weights[name] = tower_layers(tower, entrance=entrance, leaving=leaving, causal=name not in features)
    return MultitaskModel(
        weights=weights,
        components={task.component(t): ComponentModel(t.name) for task in tasks for t in task.stages[0]},
        objectives={task.name: Objective(contrastive_loss, whole_batch=True) for task in tasks},
        make_batch=make,
    )
