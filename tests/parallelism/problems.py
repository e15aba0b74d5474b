"""Tiny made-up problems of kind parallelism: chains of a few operators whose optimum can be found by counting."""

import random
from collections.abc import Sequence
from dataclasses import replace

from solver_plan.parallelism.plan import Layout, ParallelismPlan, Stage
from solver_plan.parallelism.problem import (
    Cluster,
    LatencyLink,
    Link,
    Operator,
    ParallelismProblem,
    Profile,
    Space,
    TableLink,
)

FREE = LatencyLink(bytes_per_s=1e18)
"""A link that costs next to nothing."""
PER_MS = LatencyLink(bytes_per_s=1000.0)
"""A link that moves one byte in a millisecond."""
ANY_SPACE = Space(
    layout="stage",
    max_stages=None,
    device_counts=None,
    cross_node_stages=False,
    micro_batch_sizes=None,
    use_all_devices=True,
    recompute="operator",
)


def profile(**changes: float | str) -> Profile:
    """Return a profile of one sample on one device: 1 ms forward, 2 ms backward, sizes of 0 but for what is given."""
    plain = Profile(
        batch=1,
        tensor_parallel=1,
        partition=0,
        forward_ms=1.0,
        backward_ms=2.0,
        input_bytes=0,
        output_bytes=0,
        weight_bytes=0,
        activation_bytes=0,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def chain_of(
    profiles: Sequence[Sequence[Profile]],
    *,
    blocks: Sequence[int] = (),
    shared: Sequence[int] = (),
    devices: int = 1,
    nodes: int = 1,
    memory_bytes: int = 10**12,
    global_batch: int = 4,
    space: Space = ANY_SPACE,
    intra: Link = FREE,
    inter: Link = FREE,
    state: float = 8.0,
) -> ParallelismProblem:
    """Return the problem of a chain with these profiles; `devices` of each node.

    Operators listed in `blocks` start a block, those in `shared` hold 1.5 times their activations in a shared buffer.
    """
    return ParallelismProblem(
        cost_model="aceso",
        global_batch=global_batch,
        cluster=Cluster(
            nodes=nodes,
            devices_per_node=devices,
            memory_bytes_per_device=memory_bytes,
            intra_node=intra,
            inter_node=inter,
        ),
        operators=tuple(
            Operator(
                name=f"operator {index}",
                profile=f"profile {index}",
                block_start=index in blocks,
                activation_factor=1.5 if index in shared else 1.0,
            )
            for index in range(len(profiles))
        ),
        profiles={f"profile {index}": tuple(entries) for index, entries in enumerate(profiles)},
        space=space,
        state_bytes_per_weight_byte=state,
    )


def stage(
    operators: tuple[int, int],
    devices: Sequence[int],
    *,
    tensor_parallel: int | None = None,
    data_parallel: int = 1,
    partition: int = 0,
    recompute: Sequence[tuple[int, int]] = (),
) -> Stage:
    """Return a stage with one layout; tensor parallel over all its devices unless told otherwise."""
    degree = len(devices) // data_parallel if tensor_parallel is None else tensor_parallel
    layout = Layout(operators=operators, tensor_parallel=degree, data_parallel=data_parallel, partition=partition)
    return Stage(operators=operators, devices=tuple(devices), layout=(layout,), recompute=tuple(recompute))


def plan_of(*stages: Stage, micro_batch_size: int = 1, micro_batches: int = 4) -> ParallelismPlan:
    """Return a plan written by hand."""
    return ParallelismPlan(
        problem_digest=None, micro_batch_size=micro_batch_size, micro_batches=micro_batches, stages=stages
    )


SCALE = 1000
"""Bytes of one unit of the random sizes."""


def random_profiles(chance: random.Random, *, batches: Sequence[int], degrees: Sequence[int]) -> list[Profile]:
    """Return the profiles of one operator at some batches and tensor parallel degrees, a few of them missing."""
    forward, weight = chance.randint(1, 9), chance.randint(0, 4)
    activation, size = chance.randint(0, 9), chance.randint(1, 6)
    reserved = chance.randint(0, 3)
    entries = []
    for batch in batches:
        for degree in degrees:
            for partition in (0, 1) if degree > 1 and chance.random() < 0.2 else (0,):
                if entries and chance.random() < 0.06:
                    continue
                speed = batch**0.9 / degree**0.8 * chance.uniform(0.9, 1.1)
                entries.append(
                    Profile(
                        batch=batch,
                        tensor_parallel=degree,
                        partition=partition,
                        forward_ms=round(forward * speed, 3),
                        backward_ms=round(2 * forward * speed * chance.uniform(0.8, 1.2), 3),
                        input_bytes=size * batch * SCALE,
                        output_bytes=(size + 1) * batch * SCALE,
                        weight_bytes=weight * SCALE // degree,
                        activation_bytes=activation * batch * SCALE // degree + chance.randint(0, 3),
                        forward_reserved_bytes=reserved * SCALE,
                        backward_reserved_bytes=chance.randint(0, 3) * SCALE,
                    )
                )
    return entries


def random_problem(
    seed: int, *, space: Space | None = None, nodes: int | None = None, most_operators: int = 7
) -> ParallelismProblem:
    """Return a random problem whose memory often binds: 4 to 7 operators in blocks, at most 4 devices."""
    chance = random.Random(seed)
    count = chance.randint(4, most_operators)
    node_count = nodes if nodes is not None else 1
    devices = chance.randint(1, 4) if node_count == 1 else chance.randint(1, 3 if node_count == 2 else 2)
    blocks = [index for index in range(count) if chance.random() < 0.35]
    shared = [index for index in range(count) if chance.random() < 0.2]
    kinds = [random_profiles(chance, batches=(1, 2), degrees=(1, 2)) for _ in range(max(2, count - 2))]
    which = [chance.randrange(len(kinds)) for _ in range(count)]
    link = TableLink(table=((2**20, 4e5), (2**21, 6e5)))
    problem = chain_of(
        [kinds[number] for number in which],
        blocks=blocks,
        shared=shared,
        devices=devices,
        nodes=node_count,
        memory_bytes=chance.randint(20, 160) * SCALE,
        global_batch=chance.choice((4, 8, 12)),
        space=space if space is not None else ANY_SPACE,
        intra=LatencyLink(latency_ms=0.1, bytes_per_s=3e6) if chance.random() < 0.7 else link,
        inter=LatencyLink(latency_ms=1.0, bytes_per_s=3e5),
        state=chance.choice((2.0, 4.0)),
    )
    # equal operators share a profile, so that the planner's tables of equal blocks are put to the test
    operators = tuple(
        replace(operator, profile=f"kind {number}") for operator, number in zip(problem.operators, which, strict=True)
    )
    profiles = {f"kind {number}": tuple(kinds[number]) for number in sorted(set(which))}
    return replace(problem, operators=operators, profiles=profiles)
