"""OFASys: one encoder-decoder for tasks of many modalities (Bai et al. 2022), as in Spindle (ASPLOS 2025, table 1b).

Width and depth are OFA-large's (12 + 12 layers of 1024, a ViT-like adaptor for images); sequence lengths and batch
sizes are not published and made up here. Encoder and decoder weights are shared by all tasks.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from models.multitask import Task, Tower, graph_of
from solver_plan.errors import InputError
from solver_plan.profiles.multitask import MultitaskDescription

IMAGE = Tower(name="image-adaptor", layers=24, hidden=1024, heads=16, tokens=256)
AUDIO = Tower(name="audio-adaptor", layers=12, hidden=1024, heads=16, tokens=512)
STRUCTURE = Tower(name="structure-adaptor", layers=6, hidden=1024, heads=16, tokens=128)
ENCODER = Tower(name="encoder", layers=12, hidden=1024, heads=16, tokens=256)
DECODER = Tower(name="decoder", layers=12, hidden=1024, heads=16, tokens=64)

TASKS = (
    ("caption", 128, IMAGE, (256, 288, 32)),
    ("grounding", 96, IMAGE, (256, 320, 16)),
    ("speech", 64, AUDIO, (512, 512, 96)),
    ("summary", 64, None, (512, 64)),
    ("text-to-sql", 64, STRUCTURE, (128, 256, 96)),
    ("motion", 64, STRUCTURE, (256, 256, 64)),
    ("question", 96, IMAGE, (256, 288, 16)),
)
"""Name, batch, adaptor, tokens of adaptor, encoder and decoder; the encoder takes a prompt behind what is adapted."""
FEATURES = 768
"""Numbers of a patch: 16 x 16 pixels of three colours."""
VOCABULARY = 50265
"""Of BART's tokens, which OFA uses."""


def describe(name: str, tasks: Sequence[Task], features: int, vocabulary: int) -> MultitaskDescription:
    """Return the description of tasks of an adaptor (or none), the encoder and the decoder."""
    return MultitaskDescription(
        name=name, operators=graph_of(tasks), modules=partial(_modules, tasks, features, vocabulary)
    )


def ofasys(tasks: int) -> MultitaskDescription:
    """Return the first `tasks` of seven tasks."""
    if not 1 <= tasks <= len(TASKS):
        raise InputError(f"ofasys: found {tasks} tasks; from 1 to {len(TASKS)}")
    made = []
    for name, batch, adaptor, tokens in TASKS[:tasks]:
        towers = (ENCODER, DECODER) if adaptor is None else (adaptor, ENCODER, DECODER)
        made.append(Task(name=name, batch=batch, stages=tuple((tower,) for tower in towers), tokens=tokens))
    return describe(f"ofasys-{tasks}", made, FEATURES, VOCABULARY)


def ofasys4() -> MultitaskDescription:
    """Return four tasks."""
    return ofasys(4)


def ofasys7() -> MultitaskDescription:
    """Return seven tasks."""
    return ofasys(7)


def tiny() -> MultitaskDescription:
    """Return three small tasks, one of them without an adaptor, for tests."""
    image, audio, encoder, decoder = (
        replace(tower, layers=layers, hidden=24, heads=2, feed_forward=48)
        for tower, layers in ((IMAGE, 3), (AUDIO, 2), (ENCODER, 2), (DECODER, 2))
    )
    tasks = [
        Task(name="caption", batch=8, stages=((image,), (encoder,), (decoder,)), tokens=(5, 8, 4)),
        Task(name="speech", batch=8, stages=((audio,), (encoder,), (decoder,)), tokens=(6, 6, 5)),
        Task(name="summary", batch=8, stages=((encoder,), (decoder,)), tokens=(9, 3)),
    ]
    return describe("ofasys-tiny", tasks, 12, 32)


def _modules(tasks: Sequence[Task], features: int, vocabulary: int) -> object:
    from models.ofasys_modules import encoder_decoder_tasks

    return encoder_decoder_tasks(tasks, features, vocabulary)
