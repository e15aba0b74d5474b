"""What other systems can be told of a pipeline: one layout for all stages, cuts between layers, one recomputation rule.

A `Configuration` is always expressible as a plan (`plan_of`), so that it is checked and priced like one.
"""

import itertools
from dataclasses import dataclass
from typing import Literal

from solver_plan.export.layers import LayerChain
from solver_plan.parallelism.drafts import ranges
from solver_plan.parallelism.plan import Layout, ParallelismPlan, Schedule, Stage
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.parallelism.schedule import interleaved

Rule = Literal["nothing", "core_attention", "first_layers", "every_layer"]


@dataclass(frozen=True, slots=True)
class Recomputation:
    """Which operators are recomputed, by one rule for all stages."""

    rule: Rule
    layers: int = 0
    """`first_layers`: of each stage, virtual ones counted apart."""

    def operators(self, chain: LayerChain, cuts: tuple[int, ...]) -> frozenset[int]:
        """Return the recomputed operators of stages that are cut there."""
        if self.rule == "nothing":
            return frozenset()
        if self.rule == "core_attention":
            return chain.core_attention
        chosen: list[tuple[int, int]] = []
        for first, end in itertools.pairwise(cuts):
            layers = chain.within(first, end)
            chosen += layers if self.rule == "every_layer" else layers[: self.layers]
        return frozenset(index for first, end in chosen for index in range(first, end))

    def __str__(self) -> str:
        words = {
            "nothing": "nothing is recomputed",
            "core_attention": "the core of the attention is recomputed in every layer",
            "first_layers": f"the first {self.layers} layers of each stage are recomputed",
            "every_layer": "every layer is recomputed",
        }
        return words[self.rule]


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A pipeline that other systems can be told of; ranks go by stage, then by replica, then by tensor rank."""

    groups: int
    """Of devices: the pipeline parallel degree. Stage j runs on group j modulo `groups`."""
    tensor_parallel: int
    data_parallel: int
    partition: int
    sharding: int
    """ZeRO stage."""
    micro_batch_size: int
    """Of all replicas together."""
    micro_batches: int
    cuts: tuple[int, ...]
    """Stage j has operators [cuts[j], cuts[j + 1])."""
    recomputation: Recomputation
    orders: tuple[tuple[str, ...], ...] | None = None
    """Actions of each group, where they are neither 1F1B nor interleaved 1F1B."""

    @property
    def stages(self) -> int:
        """Number of stages, virtual ones included."""
        return len(self.cuts) - 1

    @property
    def virtual_stages(self) -> int:
        """Stages of each group."""
        return self.stages // self.groups

    @property
    def replica_batch(self) -> int:
        """Samples of a micro-batch on one replica."""
        return self.micro_batch_size // self.data_parallel

    @property
    def devices(self) -> int:
        """Number of ranks."""
        return self.groups * self.tensor_parallel * self.data_parallel


def layers_of_stages(configuration: Configuration, chain: LayerChain) -> list[int]:
    """Return the number of layers of each stage."""
    cuts = configuration.cuts
    return [len(chain.within(first, end)) for first, end in itertools.pairwise(cuts)]


def plan_of(problem: ParallelismProblem, chain: LayerChain, configuration: Configuration) -> ParallelismPlan:
    """Return the plan that a configuration stands for, on the first ranks of the cluster; not checked."""
    recomputed = configuration.recomputation.operators(chain, configuration.cuts)
    each = configuration.tensor_parallel * configuration.data_parallel
    stages = []
    for number in range(configuration.stages):
        first, end = configuration.cuts[number], configuration.cuts[number + 1]
        rank = number % configuration.groups * each
        layout = Layout(
            operators=(first, end),
            tensor_parallel=configuration.tensor_parallel,
            data_parallel=configuration.data_parallel,
            partition=configuration.partition,
        )
        stages.append(
            Stage(
                operators=(first, end),
                devices=tuple(range(rank, rank + each)),
                layout=(layout,),
                recompute=ranges([index in recomputed for index in range(first, end)], first),
                sharding=configuration.sharding,
            )
        )
    return ParallelismPlan(
        problem_digest=None,
        micro_batch_size=configuration.micro_batch_size,
        micro_batches=configuration.micro_batches,
        stages=tuple(stages),
        schedule=_schedule(configuration),
    )


def _schedule(configuration: Configuration) -> Schedule | None:
    if configuration.orders is not None:
        return Schedule(orders=configuration.orders)
    if configuration.virtual_stages == 1:
        return None
    groups, virtual = configuration.groups, configuration.virtual_stages
    return Schedule(
        orders=tuple(
            tuple(
                f"{stage}{kind}{number}"
                for stage, kind, number in interleaved(groups, group, virtual, configuration.micro_batches)
            )
            for group in range(groups)
        )
    )
