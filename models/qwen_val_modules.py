"""Torch modules of QWen-VAL: encoders whose tokens stand before the words of one language model."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn

from models.multitask import Task, Tower
from models.multitask_modules import (
    LogitsExit,
    PatchEntrance,
    next_word_loss,
    norm,
    random_patches,
    random_words,
    tower_layers,
)
from models.qwen_val import Inputs
from solver_plan.execution.model import Values
from solver_plan.execution.waves.model import (
    ComponentModel,
    Given,
    MultitaskBatch,
    MultitaskModel,
    Objective,
    TaskBatch,
)


class PooledExit(nn.Module):
    """Means of neighbouring tokens, normalised."""

    def __init__(self, tower: Tower, pooled: int) -> None:
        super().__init__()
        self.pooled = pooled
        self.norm = norm(tower)

    def forward(self, stream: torch.Tensor) -> Values:
        """(samples, length, hidden) -> (samples, length / pooled, hidden)."""
        return (self.norm(stream.reshape(len(stream), -1, self.pooled, stream.shape[2]).mean(dim=2)),)


class LanguageEntrance(nn.Module):
    """Vision and audio projected to the width of the language model, then words; each may be of length 0."""

    def __init__(self, language: Tower, vision: Tower, audio: Tower, vocabulary: int) -> None:
        super().__init__()
        self.vision = nn.Linear(vision.hidden, language.hidden)
        self.audio = nn.Linear(audio.hidden, language.hidden)
        self.words = nn.Embedding(vocabulary, language.hidden)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, vision: torch.Tensor, audio: torch.Tensor, words: torch.Tensor) -> Values:
        """(samples, length, width of the encoder) twice, (samples, length) -> stream."""
        return (torch.cat([self.vision(vision), self.audio(audio), self.words(words)], dim=1),)


def with_encoders(encoders: Sequence[tuple[str, int]], given: Given, data: Values) -> Values:
    """Return what each encoder gives, of length 0 where the task has it not, and the words.

    `encoders` are the components of this task and their widths.
    """
    (some, *_), *_ = given.values()
    entering = [given[name][0] if name in given else some.new_empty(len(some), 0, width) for name, width in encoders]
    return (*entering, *data)


def vision_audio_language(
    tasks: Sequence[Task], vision: Tower, audio: Tower, language: Tower, inputs: Inputs
) -> MultitaskModel:
    """Return the modules of tasks of one or two encoders before the language model."""
    features = {vision.name: inputs.patch, audio.name: inputs.frame}

    def make(samples: Mapping[str, int], generator: torch.Generator) -> MultitaskBatch:
        return {task.name: _batch(task, samples[task.name], generator) for task in tasks if task.name in samples}

    def _batch(task: Task, count: int, generator: torch.Generator) -> TaskBatch:
        made: dict[str, Values] = {}
        words = language.tokens
        for tower in task.stages[0]:
            made[task.component(tower)] = (random_patches(count, tower.tokens, features[tower.name], generator),)
            words -= tower.tokens // inputs.pooled
        made[task.component(language)], targets = random_words(count, words, inputs.vocabulary, generator)
        return TaskBatch(made, targets)

    weights = {
        tower.name: tower_layers(
            tower,
            entrance=partial(PatchEntrance, tower.hidden, features[tower.name], tower.tokens),
            leaving=partial(PooledExit, tower, inputs.pooled),
        )
        for tower in (vision, audio)
    }
    weights[language.name] = tower_layers(
        language,
        entrance=partial(LanguageEntrance, language, vision, audio, inputs.vocabulary),
        leaving=partial(LogitsExit, language, inputs.vocabulary),
        causal=True,
        rotary=True,
    )
    components = {}
    for task in tasks:
        for tower in task.stages[0]:
            components[task.component(tower)] = ComponentModel(tower.name, trained=not tower.frozen)
        encoders = [(task.component(tower), tower.hidden) for tower in (vision, audio)]
        components[task.component(language)] = ComponentModel(language.name, enter=partial(with_encoders, encoders))
    return MultitaskModel(
        weights=weights,
        components=components,
        objectives={task.name: Objective(next_word_loss) for task in tasks},
        make_batch=make,
    )
