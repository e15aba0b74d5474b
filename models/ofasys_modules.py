"""Torch modules of OFASys: adaptors, and one encoder-decoder that takes what they give behind a prompt of words."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn

from models.multitask import Task, Tower
from models.multitask_modules import (
    LogitsExit,
    NormExit,
    PatchEntrance,
    WordEntrance,
    next_word_loss,
    random_patches,
    random_words,
    tower_layers,
)
from solver_plan.execution.model import Values
from solver_plan.execution.waves.model import (
    ComponentModel,
    MultitaskBatch,
    MultitaskModel,
    Objective,
    TaskBatch,
)


class EncoderEntrance(nn.Module):
    """What an adaptor gives, if there is one, and behind it the words of the prompt, of which there may be none."""

    def __init__(self, hidden: int, vocabulary: int, tokens: int) -> None:
        super().__init__()
        self.prompt = WordEntrance(hidden, vocabulary, tokens)

    def forward(self, *values: torch.Tensor) -> Values:
        """(samples, length, hidden) or nothing, (samples, length of the prompt) -> stream."""
        *adapted, prompt = values
        return (torch.cat([*adapted, *self.prompt(prompt)], dim=1),)


class DecoderEntrance(WordEntrance):
    """The words to go on from; the encoder's output is carried past the decoder."""

    def forward(self, memory: torch.Tensor, words: torch.Tensor) -> Values:  # type: ignore[override]
        """(memory, words) -> (stream, memory)."""
        return *super().forward(words), memory


def encoder_decoder_tasks(tasks: Sequence[Task], features: int, vocabulary: int) -> MultitaskModel:
    """Return the modules of tasks of an adaptor or none, the encoder and the decoder."""
    longest: dict[str, int] = {}
    towers: dict[str, Tower] = {}
    for task in tasks:
        for (tower,), tokens in zip(task.stages, _lengths(task), strict=True):
            longest[tower.name] = max(longest.get(tower.name, 0), tokens)
            towers[tower.name] = tower
    encoder, decoder = (tower for (tower,) in tasks[0].stages[-2:])

    def make(samples: Mapping[str, int], generator: torch.Generator) -> MultitaskBatch:
        return {task.name: _batch(task, samples[task.name], generator) for task in tasks if task.name in samples}

    def _batch(task: Task, count: int, generator: torch.Generator) -> TaskBatch:
        *adapted, encoded, words = _lengths(task)
        inputs: dict[str, Values] = {}
        for length in adapted:
            inputs[task.component(task.stages[0][0])] = (random_patches(count, length, features, generator),)
        inputs[task.component(encoder)], _ = random_words(count, encoded - sum(adapted), vocabulary, generator)
        inputs[task.component(decoder)], targets = random_words(count, words, vocabulary, generator)
        return TaskBatch(inputs, targets)

    weights = {
        name: tower_layers(
            tower,
            entrance=partial(PatchEntrance, tower.hidden, features, longest[name]),
            leaving=partial(NormExit, tower),
        )
        for name, tower in towers.items()
        if tower not in (encoder, decoder)
    }
    weights[encoder.name] = tower_layers(
        encoder,
        entrance=partial(EncoderEntrance, encoder.hidden, vocabulary, longest[encoder.name]),
        leaving=partial(NormExit, encoder),
    )
    weights[decoder.name] = tower_layers(
        decoder,
        entrance=partial(DecoderEntrance, decoder.hidden, vocabulary, longest[decoder.name]),
        leaving=partial(LogitsExit, decoder, vocabulary),
        causal=True,
        memory=True,
    )
    return MultitaskModel(
        weights=weights,
        components={task.component(tower): ComponentModel(tower.name) for task in tasks for (tower,) in task.stages},
        objectives={task.name: Objective(next_word_loss) for task in tasks},
        make_batch=make,
    )


def _lengths(task: Task) -> tuple[int, ...]:
    return task.tokens or tuple(tower.tokens for (tower,) in task.stages)
