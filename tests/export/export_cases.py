"""Small problems and plans to export: a GPT of eight layers on eight devices."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from models.gpt import describe, gpt
from solver_plan.parallelism.drafts import ranges
from solver_plan.parallelism.plan import Layout, ParallelismPlan, Schedule, Stage
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.parallelism.schedule import interleaved
from solver_plan.profiles.analytic import profile
from solver_plan.profiles.cluster import read_cluster

LAYERS = 8
EACH = 13
"""Operators of a layer; one before the layers, two behind them."""
OPERATORS = 1 + LAYERS * EACH + 2
CORE = ("attention_score", "attention_softmax", "attention_dropout", "attention_context")


@cache
def small_problem(
    *, cost_model: str = "full", nodes: int = 1, sequence_parallel: bool = False, tied: bool = False
) -> ParallelismProblem:
    """Return the problem; every plan is in its space."""
    shape = gpt("small", layers=LAYERS, hidden=64, heads=4, sequence=32, vocabulary=128)
    cluster = replace(read_cluster("v100_8x32gb"), nodes=nodes, devices_per_node=8 // nodes)
    made = profile(
        describe(replace(shape, tied_head=tied)),
        cluster,
        16,
        cost_model="full" if cost_model == "full" else "aceso",
        sequence_parallel=sequence_parallel,
    )
    space = replace(
        made.space,
        sharding=(0, 1, 2, 3) if cost_model == "full" else (0,),
        device_order="any",
        same_layout=False,
        virtual_stages=(1, 2),
    )
    return replace(made, space=space)


def start_of(layer: int) -> int:
    """Return the first operator of a layer; of what follows them for one more."""
    return 1 + EACH * layer


def pipeline(
    layers: Sequence[int],
    *,
    degrees: Sequence[tuple[int, int]] = ((1, 2),),
    recomputed: Sequence[tuple[int, int]] = (),
    sharding: Sequence[int] = (0,),
    micro_batch: int = 4,
    devices: Sequence[Sequence[int]] | None = None,
    shift: int = 0,
    orders: Sequence[Sequence[str]] | None = None,
    virtual: int = 1,
) -> ParallelismPlan:
    """Return a plan whose stages have so many layers.

    `degrees` (tensor, data parallel) and `sharding` are those of each stage, the last one counts for all that follow;
    `recomputed` are operator ranges; every cut lies `shift` operators behind the beginning of a layer.
    """
    starts = [sum(layers[:number]) for number in range(len(layers))]
    cuts = [0, *(start_of(layer) + shift for layer in starts[1:]), OPERATORS]
    groups = len(layers) // virtual
    marks = {index for first, end in recomputed for index in range(first, end)}
    stages, seats, rank = [], [], 0
    for number in range(len(layers)):
        first, end = cuts[number], cuts[number + 1]
        t, d = degrees[min(number, len(degrees) - 1)]
        if number < groups:
            seats.append(tuple(range(rank, rank + t * d)) if devices is None else tuple(devices[number]))
            rank += t * d
        stages.append(
            Stage(
                operators=(first, end),
                devices=seats[number % groups],
                layout=(Layout(operators=(first, end), tensor_parallel=t, data_parallel=d, partition=0),),
                recompute=ranges([index in marks for index in range(first, end)], first),
                sharding=sharding[min(number, len(sharding) - 1)],
            )
        )
    if virtual > 1:
        orders = [
            [f"{stage}{kind}{number}" for stage, kind, number in interleaved(groups, group, virtual, 16 // micro_batch)]
            for group in range(groups)
        ]
    return ParallelismPlan(
        problem_digest=None,
        micro_batch_size=micro_batch,
        micro_batches=16 // micro_batch,
        stages=tuple(stages),
        schedule=None if orders is None else Schedule(orders=tuple(tuple(order) for order in orders)),
    )


def whole(*layers: int) -> list[tuple[int, int]]:
    """Return the operator ranges of layers."""
    return [(start_of(layer), start_of(layer + 1)) for layer in layers]


def cores(problem: ParallelismProblem) -> list[tuple[int, int]]:
    """Return the core of the attention of every layer."""
    return [(index, index + 1) for index, one in enumerate(problem.operators) if one.name.endswith(CORE)]
