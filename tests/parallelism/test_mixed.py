"""Stages with a layout for each operator: bounds and stages against every row of states, plans against every plan."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from solver_plan.parallelism.blocks import block_ranges
from solver_plan.parallelism.check import check
from solver_plan.parallelism.choices import Integers, MicroBatch, micro_batch, micro_batch_sizes
from solver_plan.parallelism.costs import evaluate
from solver_plan.parallelism.drafts import DraftStage, draft_plan
from solver_plan.parallelism.mixed import MixedBound, MixedStages, cheapest_choices, options
from solver_plan.parallelism.mixed_bound import StageBound
from solver_plan.parallelism.mixed_search import Options, StageSearch
from solver_plan.parallelism.planner import Planner
from solver_plan.parallelism.problem import CollectiveTimes, ParallelismProblem, Profile, Resharding, TensorLayout
from solver_plan.parallelism.recomputation.shape import ChainShape, chain_shape
from solver_plan.parallelism.stage_graph import INTER, INTRA
from solver_plan.parallelism.stage_table import spans
from solver_plan.solving import Budget
from tests.parallelism.problems import ANY_SPACE, FREE, random_problem

TABLES = Resharding(
    collectives=(
        CollectiveTimes(collective="all_gather", devices=2, table=((0, 0.7),)),
        CollectiveTimes(collective="all_to_all", devices=2, table=((0, 0.4),)),
        CollectiveTimes(collective="all_reduce", devices=2, table=((0, 1.1),)),
        CollectiveTimes(collective="reduce_scatter", devices=2, table=((0, 0.5),)),
    )
)
SPACE = replace(ANY_SPACE, layout="operator", device_order="rank")
LAYOUTS: tuple[TensorLayout, ...] = ("any", "replicated", "split_heads", "batch_first")


def mixed_problem(seed: int, *, most_operators: int = 4, recompute: str = "operator") -> ParallelismProblem:
    """Return a random problem on two devices, with tensor layouts to be changed within stages."""
    chance = random.Random(seed)
    problem = random_problem(seed, space=replace(SPACE, recompute=recompute), most_operators=most_operators)

    def laid_out(entry: Profile) -> Profile:
        return replace(entry, input_layout=chance.choice(LAYOUTS), output_layout=chance.choice(LAYOUTS))

    profiles = {key: tuple(laid_out(entry) for entry in entries) for key, entries in problem.profiles.items()}
    cluster = replace(problem.cluster, devices_per_node=2)
    return replace(problem, profiles=profiles, resharding=TABLES, cluster=cluster)


def searches(
    problem: ParallelismProblem, behind: int
) -> Iterator[tuple[MicroBatch, int, Options, ChainShape, tuple[int, int], StageSearch]]:
    """Yield the search for every stage of every micro-batch size that has more than one layout."""
    shape = chain_shape(problem, block_ranges(problem))
    for size in micro_batch_sizes(problem):
        batch = micro_batch(problem, size)
        for number, own in enumerate(options(problem, batch)):
            for first, end in itertools.combinations(range(len(problem.operators) + 1), 2):
                if len(own.choices) > 1:
                    place = (first, end, behind)
                    limit, state = problem.cluster.usable_bytes_per_device, problem.state_bytes_per_weight_byte
                    search = StageSearch(own, shape, limit, state, lambda seconds: None, place, (INTRA, INTER))
                    yield batch, number, own, shape, (first, end), search


def every_row(own: Options, shape: ChainShape, length: int) -> Integers:
    states = len(own.choices) * (2 if shape.allowed else 1)
    return np.array(list(itertools.product(range(states), repeat=length)))


@pytest.mark.parametrize("behind", [0, 2])
@pytest.mark.parametrize("seed", range(6))
def test_bounds_and_found_stages_against_every_row(seed: int, behind: int) -> None:
    problem = mixed_problem(seed)
    compared = best = closed = 0
    for batch, number, own, shape, (first, end), search in searches(problem, behind):
        rows = every_row(own, shape, end - first)
        fits = search.memory_bytes(rows) <= problem.cluster.usable_bytes_per_device
        least_ms = search.time_ms(rows[fits]).min(initial=1e9)
        costs = cheapest_choices(batch).choices[number]
        everywhere = np.ones(len(problem.operators) + 1, dtype=np.bool_)
        table = spans(costs, problem.state_bytes_per_weight_byte, np.inf, everywhere)
        (at,) = np.flatnonzero((table.first == first) & (table.end == end))[:1] if least_ms < 1e9 else (None,)
        row = search.best_row()
        found = None if row is None else search.stage(row)
        if at is None:
            assert found is None
            continue
        bound = MixedBound(table, MixedStages(problem, shape, own, lambda seconds: None))
        assert table.busy_ms[at] + bound.milliseconds(behind, np.array([at]))[0] <= least_ms + 1e-9
        if row is not None and found is not None:
            proven_ms, other = StageBound(search).least(row)
            assert proven_ms <= least_ms + 1e-9
            assert search.memory_bytes(other[None])[0] <= search.limit_bytes
            assert least_ms - 1e-9 <= search.time_ms(other[None])[0] <= found.time_ms
            closed += proven_ms >= least_ms - 1e-9
            best += found.time_ms <= least_ms + 1e-9
        compared += 1
    assert compared >= 6
    assert best >= compared - 1
    assert closed >= compared - 2


@pytest.mark.parametrize("seed", range(4))
def test_rows_cost_what_the_cost_model_says(seed: int) -> None:
    problem, chance = mixed_problem(seed), random.Random(seed)
    length = len(problem.operators)
    compared = 0
    for batch, _, own, shape, place, search in searches(problem, behind=0):
        if place != (0, length):
            continue
        for row in chance.sample(list(every_row(own, shape, length)), 40):
            time_ms, memory = float(search.time_ms(row[None])[0]), float(search.memory_bytes(row[None])[0])
            layouts = tuple(own.choices[state % len(own.choices)] for state in row)
            if time_ms >= 1e9 or layouts[0].tensor_parallel != layouts[-1].tensor_parallel:
                continue  # what the stage sends is read at the degree of its first operator
            draft = DraftStage(0, length, layouts, tuple(bool(state >= len(own.choices)) for state in row))
            cost = evaluate(problem, draft_plan(problem, batch.size, [draft])).stages[0]
            moved_ms = own.receive_ms[INTRA, :, 0].min() + own.send_ms[INTER, :, -1].min()
            assert cost.stage_ms == pytest.approx(time_ms + moved_ms)
            assert cost.memory_bytes == pytest.approx(memory)
            compared += 1
    assert compared >= 10


def every_plan(problem: ParallelismProblem) -> Iterator[tuple[int, list[DraftStage]]]:
    """Yield every plan of a problem on one or two devices."""
    count, devices = len(problem.operators), problem.cluster.devices
    assert devices <= 2
    for size in micro_batch_sizes(problem):
        by_devices = {own.choices[0].devices: own for own in options(problem, micro_batch(problem, size))}
        for cut in range(count) if devices == 2 else (0,):
            ranges = [(0, count)] if cut == 0 else [(0, cut), (cut, count)]
            own = by_devices.get(devices // len(ranges))
            if own is None:
                continue
            rows = itertools.product(itertools.product(own.choices, (False, True)), repeat=count)
            for row in rows:
                yield (
                    size,
                    [
                        DraftStage(a, e, tuple(choice for choice, _ in row[a:e]), tuple(mark for _, mark in row[a:e]))
                        for a, e in ranges
                    ],
                )


@pytest.mark.parametrize(
    ("seed", "recompute"), [(0, "operator"), (3, "operator"), (9, "operator"), (11, "operator"), (3, "block")]
)
def test_plans_are_valid_and_no_plan_is_below_the_bound(seed: int, recompute: str) -> None:
    problem = mixed_problem(seed, recompute=recompute)
    # what a stage sends depends on its first operator and its last: without transfers, stages are found one by one
    cluster = replace(problem.cluster, memory_bytes_per_device=60_000, intra_node=FREE, inter_node=FREE)
    problem = replace(problem, cluster=cluster, global_batch=4)
    plan = Planner(problem, Budget(deterministic=True)).run(None).plan
    assert check(problem, plan) == ()
    least_ms = np.inf
    for size, stages in every_plan(problem):
        other = draft_plan(problem, size, stages)
        if not check(problem, other):
            least_ms = min(least_ms, evaluate(problem, other).iteration_ms)
    assert plan.certificate is not None
    assert plan.certificate.bound is not None
    assert plan.certificate.bound <= least_ms * (1 + 1e-9)
    assert least_ms <= plan.certificate.objective * (1 + 1e-9)
    assert plan.certificate.objective <= 1.01 * least_ms
