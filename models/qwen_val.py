"""QWen-VAL: vision-language, audio-language and both, on one language model (Spindle, ASPLOS 2025, table 1b).

Encoders are Qwen-VL's ViT-bigG and Qwen-Audio's Whisper-large-v2. The language models are Qwen-7B, and shapes of about
30 and 70 billion parameters as in the paper's simulations. Batch sizes are not published and made up here.
"""

from dataclasses import dataclass, replace
from functools import partial

from models.multitask import Task, Tower, graph_of
from solver_plan.profiles.multitask import MultitaskDescription

VISION = Tower(name="vit", layers=48, hidden=1664, heads=16, tokens=1024, feed_forward=8192)
AUDIO = Tower(name="whisper", layers=32, hidden=1280, heads=20, tokens=1500)
LANGUAGE_7B = Tower(name="llm", layers=32, hidden=4096, heads=32, tokens=2048, feed_forward=11008, gated=True)
LANGUAGE_30B = Tower(name="llm", layers=48, hidden=7168, heads=56, tokens=2048, feed_forward=19456, gated=True)
LANGUAGE_70B = Tower(name="llm", layers=80, hidden=8192, heads=64, tokens=2048, feed_forward=22016, gated=True)


@dataclass(frozen=True)
class Inputs:
    """What the encoders and the language model take."""

    patch: int = 14 * 14 * 3
    """Numbers of a patch of an image."""
    frame: int = 2 * 80
    """Numbers of a frame of sound: two steps of 80 mel bands."""
    vocabulary: int = 151936
    """Of Qwen."""
    pooled: int = 4
    """Tokens of an encoder that become one of the language model: 1024 patches become Qwen-VL's 256."""


def describe(
    name: str, vision: Tower, audio: Tower, language: Tower, batches: tuple[int, int, int], inputs: Inputs
) -> MultitaskDescription:
    """Return the description of the three tasks, with the samples of each."""
    entering = ((vision,), (audio,), (vision, audio))
    tasks = [
        Task(name=task, batch=batch, stages=(encoders, (language,)))
        for task, batch, encoders in zip(("VL", "AL", "VAL"), batches, entering, strict=True)
    ]
    return MultitaskDescription(
        name=name,
        operators=graph_of(tasks),
        modules=partial(_modules, tasks, vision, audio, language, inputs),
    )


def qwen_val(language: Tower, frozen_encoders: bool = False) -> MultitaskDescription:
    """Return the three tasks; encoders may be frozen, as in the first stages of training."""
    vision, audio = (replace(tower, frozen=frozen_encoders) for tower in (VISION, AUDIO))
    return describe("qwen-val", vision, audio, language, (64, 64, 32), Inputs())


def qwen_val_7b() -> MultitaskDescription:
    """Return the tasks on the 7B model."""
    return qwen_val(LANGUAGE_7B)


def qwen_val_7b_frozen() -> MultitaskDescription:
    """Return the tasks on the 7B model with frozen encoders."""
    return qwen_val(LANGUAGE_7B, frozen_encoders=True)


def qwen_val_30b() -> MultitaskDescription:
    """Return the tasks on the 30B model; it needs tensor parallelism."""
    return qwen_val(LANGUAGE_30B)


def qwen_val_70b() -> MultitaskDescription:
    """Return the tasks on the 70B model; it needs tensor parallelism."""
    return qwen_val(LANGUAGE_70B)


def tiny(frozen_encoders: bool = False) -> MultitaskDescription:
    """Return the three tasks, small, for tests."""
    vision = replace(VISION, layers=3, hidden=16, heads=2, tokens=8, feed_forward=32, frozen=frozen_encoders)
    audio = replace(AUDIO, layers=2, hidden=24, heads=2, tokens=6, frozen=frozen_encoders)
    language = replace(LANGUAGE_7B, layers=3, hidden=32, heads=4, tokens=12, feed_forward=48)
    inputs = Inputs(patch=6, frame=5, vocabulary=32, pooled=2)
    return describe("qwen-val-tiny", vision, audio, language, (8, 8, 4), inputs)


def tiny_frozen() -> MultitaskDescription:
    """Return the small tasks with frozen encoders."""
    return tiny(frozen_encoders=True)


def _modules(tasks: list[Task], vision: Tower, audio: Tower, language: Tower, inputs: Inputs) -> object:
    from models.qwen_val_modules import vision_audio_language

    return vision_audio_language(tasks, vision, audio, language, inputs)
