"""QWen-VAL: vision-language, audio-language and both, on one language model (Spindle, ASPLOS 2025, table 1b).

Encoders are Qwen-VL's ViT-bigG and Qwen-Audio's Whisper-large-v2. The language models are Qwen-7B, and shapes of about
30 and 70 billion parameters as in the paper's simulations. Batch sizes are not published and made up here.
"""

import networkx as nx

from models.multitask import Task, Tower, graph_of
from solver_plan.wavefront.contraction import OperatorNode


def qwen_val(language: Tower, frozen_encoders: bool = False) -> "nx.DiGraph[OperatorNode]":
    """Return the operator graph of the three tasks; encoders may be frozen, as in the first stages of training."""
    vision = Tower(name="vit", layers=48, hidden=1664, tokens=1024, feed_forward=8192, frozen=frozen_encoders)
    audio = Tower(name="whisper", layers=32, hidden=1280, tokens=1500, frozen=frozen_encoders)
    return graph_of(
        [
            Task(name="VL", batch=64, stages=((vision,), (language,))),
            Task(name="AL", batch=64, stages=((audio,), (language,))),
            Task(name="VAL", batch=32, stages=((vision, audio), (language,))),
        ]
    )


LANGUAGE_7B = Tower(name="llm", layers=32, hidden=4096, tokens=2048, feed_forward=11008, gated=True)
LANGUAGE_30B = Tower(name="llm", layers=48, hidden=7168, tokens=2048, feed_forward=19456, gated=True)
LANGUAGE_70B = Tower(name="llm", layers=80, hidden=8192, tokens=2048, feed_forward=22016, gated=True)


def qwen_val_7b() -> "nx.DiGraph[OperatorNode]":
    """Return the tasks on the 7B model."""
    return qwen_val(LANGUAGE_7B)


def qwen_val_7b_frozen() -> "nx.DiGraph[OperatorNode]":
    """Return the tasks on the 7B model with frozen encoders."""
    return qwen_val(LANGUAGE_7B, frozen_encoders=True)


def qwen_val_30b() -> "nx.DiGraph[OperatorNode]":
    """Return the tasks on the 30B model; it needs tensor parallelism."""
    return qwen_val(LANGUAGE_30B)


def qwen_val_70b() -> "nx.DiGraph[OperatorNode]":
    """Return the tasks on the 70B model; it needs tensor parallelism."""
    return qwen_val(LANGUAGE_70B)
