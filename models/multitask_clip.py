"""Multitask-CLIP: contrastive pairs of ImageBind-huge's encoders (Spindle, ASPLOS 2025, table 1b).

Depth and width of the encoders are ImageBind-huge's. The paper names the pairs of the first four tasks; the other pairs
and all batch sizes are not published and made up here. Planning leaves the contrastive loss out: it costs next to
nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from models.multitask import Task, Tower, graph_of
from solver_plan.errors import InputError
from solver_plan.profiles.multitask import MultitaskDescription

VISION = Tower(name="vision", layers=32, hidden=1280, heads=16, tokens=257)
TEXT = Tower(name="text", layers=24, hidden=1024, heads=16, tokens=77)
AUDIO = Tower(name="audio", layers=12, hidden=768, heads=12, tokens=3 * 229)
"""Three clips a sample."""
DEPTH = Tower(name="depth", layers=12, hidden=384, heads=8, tokens=197)
THERMAL = Tower(name="thermal", layers=12, hidden=768, heads=12, tokens=197)
MOTION = Tower(name="motion", layers=6, hidden=512, heads=8, tokens=251)

PAIRS = (
    (TEXT, AUDIO, 96),
    (VISION, DEPTH, 64),
    (AUDIO, THERMAL, 64),
    (MOTION, THERMAL, 128),
    (VISION, TEXT, 64),
    (VISION, AUDIO, 32),
    (TEXT, MOTION, 128),
    (VISION, THERMAL, 32),
    (DEPTH, TEXT, 96),
    (AUDIO, DEPTH, 64),
)


@dataclass(frozen=True)
class Inputs:
    """What the encoders take; sizes are ImageBind's."""

    features: tuple[tuple[str, int], ...] = (
        ("vision", 2 * 14 * 14 * 3),
        ("audio", 16 * 16),
        ("depth", 16 * 16),
        ("thermal", 16 * 16),
        ("motion", 6 * 8),
    )
    """Numbers of a patch, by encoder."""
    vocabulary: int = 49408
    """Of the text."""
    common: int = 1024
    """Width of the vectors that are compared."""


def describe(name: str, pairs: Sequence[tuple[Tower, Tower, int]], inputs: Inputs) -> MultitaskDescription:
    """Return the description of pairs of encoders, each with the samples of its batch."""
    tasks = [Task(name=f"{one.name}-{two.name}", batch=batch, stages=((one, two),)) for one, two, batch in pairs]
    return MultitaskDescription(name=name, operators=graph_of(tasks), modules=partial(_modules, tasks, inputs))


def multitask_clip(tasks: int) -> MultitaskDescription:
    """Return the first `tasks` of ten tasks."""
    if not 1 <= tasks <= len(PAIRS):
        raise InputError(f"multitask_clip: found {tasks} tasks; from 1 to {len(PAIRS)}")
    return describe(f"multitask-clip-{tasks}", PAIRS[:tasks], Inputs())


def clip4() -> MultitaskDescription:
    """Return four tasks."""
    return multitask_clip(4)


def clip7() -> MultitaskDescription:
    """Return seven tasks."""
    return multitask_clip(7)


def clip10() -> MultitaskDescription:
    """Return ten tasks."""
    return multitask_clip(10)


def tiny() -> MultitaskDescription:
    """Return four tasks of small encoders, for tests."""

    def small(tower: Tower) -> Tower:
        return replace(tower, layers=2 + tower.layers // 24, hidden=16 + tower.hidden // 128 * 4, heads=2, tokens=6)

    pairs = [(small(one), small(two), 8) for one, two, _ in PAIRS[:4]]
    features = tuple((name, 8) for name, _ in Inputs().features)
    return describe("multitask-clip-tiny", pairs, Inputs(features, vocabulary=32, common=16))


def _modules(tasks: Sequence[Task], inputs: Inputs) -> object:
    from models.multitask_clip_modules import contrastive_pairs

    return contrastive_pairs(tasks, dict(inputs.features), inputs.vocabulary, inputs.common)
