"""Multitask-CLIP: contrastive pairs of ImageBind-huge's encoders (Spindle, ASPLOS 2025, table 1b).

Depth and width of the encoders are ImageBind-huge's. The paper names the pairs of the first four tasks; the other pairs
and all batch sizes are not published and made up here. The contrastive loss is left out: it costs next to nothing.
"""

import networkx as nx

from models.multitask import Task, Tower, graph_of
from solver_plan.wavefront.contraction import OperatorNode

VISION = Tower(name="vision", layers=32, hidden=1280, tokens=257)
TEXT = Tower(name="text", layers=24, hidden=1024, tokens=77)
AUDIO = Tower(name="audio", layers=12, hidden=768, tokens=3 * 229)
"""Three clips a sample."""
DEPTH = Tower(name="depth", layers=12, hidden=384, tokens=197)
THERMAL = Tower(name="thermal", layers=12, hidden=768, tokens=197)
MOTION = Tower(name="motion", layers=6, hidden=512, tokens=251)

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


def multitask_clip(tasks: int) -> "nx.DiGraph[OperatorNode]":
    """Return the operator graph of the first `tasks` of ten tasks."""
    return graph_of(
        [Task(name=f"{one.name}-{two.name}", batch=batch, stages=((one, two),)) for one, two, batch in PAIRS[:tasks]]
    )


def clip4() -> "nx.DiGraph[OperatorNode]":
    """Return four tasks."""
    return multitask_clip(4)


def clip7() -> "nx.DiGraph[OperatorNode]":
    """Return seven tasks."""
    return multitask_clip(7)


def clip10() -> "nx.DiGraph[OperatorNode]":
    """Return ten tasks."""
    return multitask_clip(10)
