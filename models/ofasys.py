"""OFASys: one encoder-decoder for tasks of many modalities (Bai et al. 2022), as in Spindle (ASPLOS 2025, table 1b).

Width and depth are OFA-large's (12 + 12 layers of 1024, a ViT-like adaptor for images); sequence lengths and batch
sizes are not published and made up here. Encoder and decoder weights are shared by all tasks.
"""

import networkx as nx

from models.multitask import Task, Tower, graph_of
from solver_plan.wavefront.contraction import OperatorNode

IMAGE = Tower(name="image-adaptor", layers=24, hidden=1024, tokens=256)
AUDIO = Tower(name="audio-adaptor", layers=12, hidden=1024, tokens=512)
STRUCTURE = Tower(name="structure-adaptor", layers=6, hidden=1024, tokens=128)
ENCODER = Tower(name="encoder", layers=12, hidden=1024, tokens=256)
DECODER = Tower(name="decoder", layers=12, hidden=1024, tokens=64)

TASKS = (
    ("caption", 128, IMAGE, (256, 288, 32)),
    ("grounding", 96, IMAGE, (256, 320, 16)),
    ("speech", 64, AUDIO, (512, 512, 96)),
    ("summary", 64, None, (512, 64)),
    ("text-to-sql", 64, STRUCTURE, (128, 256, 96)),
    ("motion", 64, STRUCTURE, (256, 256, 64)),
    ("question", 96, IMAGE, (256, 288, 16)),
)


def ofasys(tasks: int) -> "nx.DiGraph[OperatorNode]":
    """Return the operator graph of the first `tasks` of seven tasks."""
    made = []
    for name, batch, adaptor, tokens in TASKS[:tasks]:
        towers = (ENCODER, DECODER) if adaptor is None else (adaptor, ENCODER, DECODER)
        made.append(Task(name=name, batch=batch, stages=tuple((tower,) for tower in towers), tokens=tokens))
    return graph_of(made)


def ofasys4() -> "nx.DiGraph[OperatorNode]":
    """Return four tasks."""
    return ofasys(4)


def ofasys7() -> "nx.DiGraph[OperatorNode]":
    """Return seven tasks."""
    return ofasys(7)
