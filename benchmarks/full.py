"""Parallelism cases under the `full` cost model: GPT and Llama models on clusters that come along, priced analytically.

Where weights are not sharded (`REPLICATED`) memory asks for pipelines; *few* has as few micro-batches as stages or
hardly more. On several nodes all stages have one layout, but for *mixed*: Aceso's search, which changes single stages,
has no say there, and the grid is the baseline.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.case import Case
from models.gpt import deep, gpt3_1_3b, gpt3_2_6b, gpt3_6_7b, gpt3_13b, tiny
from models.llama import llama3_8b, llama3_70b
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.profiles.analytic import default_space, profile
from solver_plan.profiles.cluster import read_cluster
from solver_plan.profiles.description import ModelDescription
from solver_plan.solving import Budget


def _problem(
    data: Path,
    *,
    describe: Callable[[], ModelDescription],
    cluster: str,
    global_batch: int,
    sharding: tuple[int, ...],
    virtual_stages: tuple[int, ...],
    mixed: bool,
) -> ParallelismProblem:
    machine = read_cluster(cluster)
    space = default_space(machine)
    space = replace(
        space, sharding=sharding, virtual_stages=virtual_stages, same_layout=space.same_layout and not mixed
    )
    return profile(describe(), machine, global_batch, space=space)


def _case(
    name: str,
    describe: Callable[[], ModelDescription],
    cluster: str,
    global_batch: int,
    *,
    sharding: tuple[int, ...] = (0, 1, 3),
    virtual_stages: tuple[int, ...] = (1,),
    time_limit_s: float = 60,
    mixed: bool = False,
    smoke: bool = False,
) -> Case:
    return Case(
        name=name,
        build=lambda data: _problem(
            data,
            describe=describe,
            cluster=cluster,
            global_batch=global_batch,
            sharding=sharding,
            virtual_stages=virtual_stages,
            mixed=mixed,
        ),
        budget=Budget(time_limit_s=time_limit_s),
        baselines=("grid", "aceso") if mixed or read_cluster(cluster).nodes == 1 else ("grid",),
        smoke=smoke,
    )


REPLICATED = (0, 1)
"""Weights and gradients are not sharded: pipelines have to make them fit."""

CASES = (
    _case("tiny-gpt-4-v100", tiny, "v100_4x32gb", 8, time_limit_s=10, smoke=True),
    _case("gpt-1.3b-4-v100", gpt3_1_3b, "v100_4x32gb", 64),
    _case("gpt-2.6b-8-v100", gpt3_2_6b, "v100_8x32gb", 256),
    _case("gpt-2.6b-8-v100-pipeline", gpt3_2_6b, "v100_8x32gb", 64, sharding=REPLICATED),
    _case("gpt-2.6b-8-v100-few", gpt3_2_6b, "v100_8x32gb", 8, sharding=REPLICATED),
    _case("gpt-6.7b-8-a100", gpt3_6_7b, "a100_8x80gb", 64, sharding=REPLICATED),
    _case("gpt-13b-32-v100", gpt3_13b, "v100_4nodes_8x32gb", 128),
    _case("gpt-13b-32-v100-pipeline", gpt3_13b, "v100_4nodes_8x32gb", 128, sharding=REPLICATED),
    _case(
        "gpt-13b-32-v100-mixed",
        gpt3_13b,
        "v100_4nodes_8x32gb",
        128,
        sharding=REPLICATED,
        time_limit_s=90,
        mixed=True,
    ),
    _case("gpt-13b-32-v100-few", gpt3_13b, "v100_4nodes_8x32gb", 16, sharding=REPLICATED),
    _case(
        "gpt-13b-32-v100-interleaved",
        gpt3_13b,
        "v100_4nodes_8x32gb",
        32,
        sharding=REPLICATED,
        virtual_stages=(1, 2, 5),
    ),
    _case("llama-8b-8-h100", llama3_8b, "h100_8x80gb", 64),
    _case("llama-8b-8-a100-pipeline", llama3_8b, "a100_8x80gb", 64, sharding=REPLICATED),
    _case("llama-8b-8-a100-few", llama3_8b, "a100_8x80gb", 8, sharding=REPLICATED),
    _case("llama-70b-64-a100", llama3_70b, "a100_8nodes_8x80gb", 128),
    _case(
        "llama-70b-64-a100-pipeline",
        llama3_70b,
        "a100_8nodes_8x80gb",
        128,
        sharding=REPLICATED,
        virtual_stages=(1, 2, 5, 10),
    ),
    _case("llama-70b-1024-h100", llama3_70b, "h100_128nodes_8x80gb", 2048),
    _case(
        "llama-70b-1024-h100-pipeline",
        llama3_70b,
        "h100_128nodes_8x80gb",
        2048,
        sharding=REPLICATED,
        virtual_stages=(1, 2, 5, 10),
    ),
    _case("gpt-1024-layers-64-a100", deep, "a100_8nodes_8x80gb", 512),
)
