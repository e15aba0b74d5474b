"""Transformer towers of multi-task models as operators: what the three multi-task families share."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx

from solver_plan.errors import InputError
from solver_plan.wavefront.contraction import OperatorNode, operator_graph

BYTES_PER_ELEMENT = 2


@dataclass(frozen=True, kw_only=True)
class Tower:
    """A stack of equal transformer layers."""

    name: str
    """Also the key of its weights: towers of one name share them."""
    layers: int
    hidden: int
    heads: int = 1
    tokens: int
    """Of a sample."""
    feed_forward: int | None = None
    """None: 4 hidden."""
    gated: bool = False
    frozen: bool = False

    def __post_init__(self) -> None:
        if self.layers < 1 or (self.feed_forward is not None and self.feed_forward < 1):
            raise InputError(
                f"tower {self.name}: found {self.layers} layers, width {self.feed_forward}; at least 1 each"
            )

    @property
    def wide(self) -> int:
        """Width of the feed-forward."""
        return self.feed_forward or 4 * self.hidden

    @property
    def parameters(self) -> int:
        """Of one layer: attention and feed-forward."""
        return 4 * self.hidden**2 + (3 if self.gated else 2) * self.hidden * self.wide

    def operators(self, task: str, batch: int, tokens: int | None = None) -> list[OperatorNode]:
        """Return the layers for a task's batch; work is 2 FLOPs a parameter and token, and the attention scores."""
        length = self.tokens if tokens is None else tokens
        stream = batch * length * self.hidden * BYTES_PER_ELEMENT
        return [
            OperatorNode(
                name=f"{task}/{self.name}.{layer}",
                task=task,
                kind=self.name,
                batch=batch,
                sequence=length,
                hidden=self.hidden,
                weights=f"{self.name}.{layer}",
                parameters=self.parameters,
                forward_flops=batch * (2 * length * self.parameters + 4 * length**2 * self.hidden),
                output_bytes=stream,
                # Korthikanti et al. 2023: 34 s b h bytes without the scores, which a fused kernel never writes
                activation_bytes=0 if self.frozen else 17 * stream,
                frozen=self.frozen,
            )
            for layer in range(self.layers)
        ]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task: towers that feed one another."""

    name: str
    batch: int
    stages: tuple[tuple[Tower, ...], ...]
    """Each tower of a stage feeds each of the next."""
    tokens: tuple[int, ...] | None = None
    """Tokens of each stage, where they are not the towers' own."""

    def __post_init__(self) -> None:
        if not self.stages or not all(self.stages):
            raise InputError(f"task {self.name}: found a stage without towers, or no stage; each needs one")
        if self.tokens is not None and len(self.tokens) != len(self.stages):
            raise InputError(
                f"task {self.name}: found {len(self.tokens)} tokens; one of each of {len(self.stages)} stages"
            )

    def component(self, tower: Tower) -> str:
        """Return the name of the component that a tower becomes."""
        return f"{self.name}/{tower.name}"


def graph_of(tasks: Sequence[Task]) -> "nx.DiGraph[OperatorNode]":
    """Return the operator graph of tasks."""
    operators: list[OperatorNode] = []
    edges: list[tuple[OperatorNode, OperatorNode]] = []
    for task in tasks:
        before: list[OperatorNode] = []
        for at, stage in enumerate(task.stages):
            last = []
            for tower in stage:
                layers = tower.operators(task.name, task.batch, None if task.tokens is None else task.tokens[at])
                operators += layers
                edges += list(itertools.pairwise(layers))
                edges += [(each, layers[0]) for each in before]
                last.append(layers[-1])
            before = last
    return operator_graph(operators, edges)
