"""Tiny made-up problems of the `full` cost model, and every valid plan of one."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

from solver_plan.parallelism.check import check
from solver_plan.parallelism.drafts import ranges
from solver_plan.parallelism.plan import Layout, ParallelismPlan, Schedule, Stage
from solver_plan.parallelism.problem import BytesPerParameter, Overlap, ParallelismProblem, RingRate, Space
from solver_plan.parallelism.schedule import interleaved
from tests.parallelism.problems import ANY_SPACE, SCALE, random_problem

FULL_SPACE = replace(ANY_SPACE, sharding=(0, 1, 3), device_order="rank")


def random_full_problem(
    seed: int, *, space: Space = FULL_SPACE, nodes: int = 1, most_operators: int = 5
) -> ParallelismProblem:
    """Return a random problem whose memory often binds: 4 or 5 operators in blocks, at most 4 devices."""
    chance = random.Random(seed)
    problem = random_problem(seed, space=space, nodes=nodes, most_operators=most_operators)
    operators = list(problem.operators)
    if chance.random() < 0.5:
        operators[-1] = replace(
            operators[-1], shares_weights_with=operators[0].name, profile=operators[0].profile, block_start=False
        )
    return replace(
        problem,
        cost_model="full",
        operators=tuple(operators),
        cluster=replace(
            problem.cluster,
            collectives=(RingRate(devices=2, latency_ms=0.2, bus_bytes_per_s=4e6),),
            node_bytes_per_s=6e5,
            device_memory_bytes_per_s=2e7,
            memory_bytes_per_device=chance.randint(30, 140) * SCALE,
        ),
        bytes_per_parameter=BytesPerParameter(weight=2, gradient=chance.choice((2, 4)), optimizer_state=12),
        sequence_parallel=chance.random() < 0.3,
        overlap=Overlap(
            tensor_parallel=chance.random() < 0.5, transfers=chance.random() < 0.5, reduction=chance.random() < 0.7
        ),
    )


def every_plan(problem: ParallelismProblem) -> Iterator[ParallelismPlan]:
    """Yield every valid plan without idle devices, devices in rank order: all that `check` lets through."""
    for size in range(1, problem.global_batch + 1):
        if problem.global_batch % size == 0:
            for virtual in problem.space.virtual_stages:
                for plan in _plans_of_size(problem, size, virtual):
                    if not check(problem, plan):
                        yield plan


def _plans_of_size(problem: ParallelismProblem, size: int, virtual: int) -> Iterator[ParallelismPlan]:
    operators, devices = len(problem.operators), problem.cluster.devices
    for count in range(1, operators + 1):
        groups, rest = divmod(count, virtual)
        if rest or (virtual > 1 and groups < 2):
            continue
        for inner in itertools.combinations(range(1, operators), count - 1):
            cuts = (0, *inner, operators)
            for sizes in _compositions(devices, groups):
                for layouts in itertools.product(*(_layouts(problem, size, number) for number in sizes)):
                    for marks in itertools.product((False, True), repeat=operators):
                        yield _plan(problem, size, cuts, sizes, layouts, marks, virtual)


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in _compositions(total - first, parts - 1):
            yield (first, *rest)


def _layouts(problem: ParallelismProblem, size: int, devices: int) -> list[tuple[int, int, int, int]]:
    entries = sorted({entry.key for profiles in problem.profiles.values() for entry in profiles})
    return [
        (degree, devices // degree, partition, sharding)
        for batch, degree, partition in entries
        for sharding in (problem.space.sharding if devices > degree else problem.space.sharding[:1])
        if devices % degree == 0 and batch * (devices // degree) == size
    ]


def _plan(
    problem: ParallelismProblem,
    size: int,
    cuts: tuple[int, ...],
    sizes: tuple[int, ...],
    layouts: tuple[tuple[int, int, int, int], ...],
    marks: tuple[bool, ...],
    virtual: int,
) -> ParallelismPlan:
    groups, count = len(sizes), problem.global_batch // size
    stages = []
    for number, (first, end) in enumerate(itertools.pairwise(cuts)):
        group = number % groups
        degree, replicas, partition, sharding = layouts[group]
        begin = sum(sizes[:group])
        layout = Layout(operators=(first, end), tensor_parallel=degree, data_parallel=replicas, partition=partition)
        stages.append(
            Stage(
                operators=(first, end),
                devices=tuple(range(begin, begin + sizes[group])),
                layout=(layout,),
                recompute=ranges(marks[first:end], first),
                sharding=sharding,
            )
        )
    schedule = None
    if virtual > 1 and count % groups == 0:
        orders = (interleaved(groups, group, virtual, count) for group in range(groups))
        schedule = Schedule(orders=tuple(tuple(f"{stage}{kind}{at}" for stage, kind, at in one) for one in orders))
    return ParallelismPlan(
        problem_digest=None, micro_batch_size=size, micro_batches=count, stages=tuple(stages), schedule=schedule
    )
