"""Small problems and plans for the tests of execution: every layout profiled, room for everything."""

from collections.abc import Sequence
from typing import Literal, get_args

from solver_plan.documents import digest_of
from solver_plan.parallelism.plan import Layout, ParallelismPlan, Schedule, Stage
from solver_plan.parallelism.problem import (
    Cluster,
    CollectiveTimes,
    LatencyLink,
    Operator,
    ParallelismProblem,
    Profile,
    Resharding,
    Space,
)

DEGREES = (1, 2, 4)
Collective = Literal["all_gather", "all_reduce", "all_to_all", "reduce_scatter"]


def problem(
    names: Sequence[str],
    devices: int,
    *,
    global_batch: int = 8,
    block_starts: Sequence[int] = (),
    shared: dict[int, str] | None = None,
    model: str | None = None,
) -> ParallelismProblem:
    """A chain of operators that take 1 ms forward and 2 ms backward in every layout."""
    profiles = tuple(
        Profile(
            batch=batch,
            tensor_parallel=t,
            partition=partition,
            forward_ms=1.0,
            backward_ms=2.0,
            input_bytes=8,
            output_bytes=8,
            weight_bytes=8,
            activation_bytes=8,
        )
        for batch in (1, 2, 4, 8)
        for t in DEGREES
        for partition in (0, 1)
    )
    link = LatencyLink(bytes_per_s=1e9)
    return ParallelismProblem(
        cost_model="aceso",
        global_batch=global_batch,
        model=model,
        cluster=Cluster(
            nodes=1, devices_per_node=devices, memory_bytes_per_device=10**9, intra_node=link, inter_node=link
        ),
        operators=tuple(
            Operator(
                name=name,
                profile="any",
                block_start=index in block_starts,
                shares_weights_with=(shared or {}).get(index),
            )
            for index, name in enumerate(names)
        ),
        profiles={"any": profiles},
        space=Space(
            layout="operator",
            max_stages=None,
            device_counts=None,
            cross_node_stages=True,
            micro_batch_sizes=None,
            use_all_devices=False,
            virtual_stages=(1, 2),
            recompute="operator",
            sharding=(0, 1, 2, 3),
        ),
        resharding=Resharding(
            collectives=tuple(
                CollectiveTimes(collective=kind, devices=count, table=((0, 0.0),))
                for kind in get_args(Collective)
                for count in (2, 4, 8)
            )
        ),
    )


def stage(
    operators: tuple[int, int],
    devices: Sequence[int],
    t: int = 1,
    *,
    partition: int = 0,
    recompute: Sequence[tuple[int, int]] = (),
    sharding: int = 0,
    layout: Sequence[Layout] | None = None,
) -> Stage:
    """A stage with one layout, tensor parallel degree t; or with the layouts given."""
    whole = Layout(operators=operators, tensor_parallel=t, data_parallel=len(devices) // t, partition=partition)
    return Stage(
        operators=operators,
        devices=tuple(devices),
        layout=tuple(layout or (whole,)),
        recompute=tuple(recompute),
        sharding=sharding,
    )


def plan(
    made_for: ParallelismProblem,
    stages: Sequence[Stage],
    micro_batch_size: int,
    orders: Sequence[str] | None = None,
) -> ParallelismPlan:
    """A plan; orders are written as words of actions."""
    return ParallelismPlan(
        problem_digest=digest_of(made_for),
        micro_batch_size=micro_batch_size,
        micro_batches=made_for.global_batch // micro_batch_size,
        stages=tuple(stages),
        schedule=None if orders is None else Schedule(orders=tuple(tuple(order.split()) for order in orders)),
    )
