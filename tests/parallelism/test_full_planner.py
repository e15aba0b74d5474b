"""The planner under the `full` cost model, against every valid plan."""

from dataclasses import dataclass, replace

import pytest

from solver_plan.errors import InfeasibleProblemError, InputError, InvalidPlanError
from solver_plan.parallelism.blocks import block_ranges
from solver_plan.parallelism.check import check
from solver_plan.parallelism.choices import micro_batches
from solver_plan.parallelism.costs import evaluate
from solver_plan.parallelism.heuristics.interleaved import interleavings, least_ms
from solver_plan.parallelism.plan import ParallelismPlan, Schedule
from solver_plan.parallelism.planner import Planner
from solver_plan.parallelism.problem import BytesPerParameter, LatencyLink, ParallelismProblem, Space
from solver_plan.parallelism.recomputation.shape import chain_shape
from solver_plan.parallelism.schedule import interleaved
from solver_plan.parallelism.simulate import simulate
from solver_plan.solving import Budget, Planned
from tests.parallelism.full_problems import FULL_SPACE, every_plan, random_full_problem
from tests.parallelism.problems import chain_of, plan_of, profile, stage


def _planned(problem: ParallelismProblem, heuristic: str | None = None) -> Planned[ParallelismPlan]:
    return Planner(problem, Budget(deterministic=True)).run(heuristic)


@dataclass(frozen=True)
class Case:
    space: Space
    seeds: range
    nodes: int = 1


CASES = {
    "sharding": Case(FULL_SPACE, range(14)),
    "zero 2": Case(replace(FULL_SPACE, sharding=(2,)), range(20, 26)),
    "whole blocks": Case(replace(FULL_SPACE, recompute="block"), range(40, 46)),
    "no recomputation": Case(replace(FULL_SPACE, recompute="none"), range(50, 56)),
    "same layout": Case(replace(FULL_SPACE, same_layout=True), range(60, 68)),
    "interleaved": Case(replace(FULL_SPACE, virtual_stages=(1, 2)), range(70, 80)),
    "no blocks to interleave": Case(replace(FULL_SPACE, virtual_stages=(1, 2)), range(100, 104)),
    "two nodes": Case(FULL_SPACE, range(0, 5), nodes=2),
    "stages of two nodes": Case(replace(FULL_SPACE, cross_node_stages=True), range(0, 5), nodes=2),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bound_and_plan_enclose_the_best_of_all_plans(case: Case) -> None:
    planned = equal = 0
    for seed in case.seeds:
        problem = random_full_problem(seed, space=case.space, nodes=case.nodes)
        best = min((evaluate(problem, plan).iteration_ms for plan in every_plan(problem)), default=None)
        if best is None:
            with pytest.raises((InfeasibleProblemError, InputError)):
                _planned(problem)
            continue
        plan = _planned(problem).plan
        certificate = plan.certificate
        assert certificate is not None
        assert check(problem, plan) == ()
        assert certificate.bound is not None
        assert certificate.bound <= best * (1 + 1e-9), seed
        assert best * (1 - 1e-9) <= certificate.objective <= best * 1.1, seed
        planned += 1
        equal += certificate.objective <= best * (1 + 1e-9)
    assert planned >= len(case.seeds) / 4
    assert equal >= planned / 2


INTERLEAVED = replace(FULL_SPACE, sharding=(0,), recompute="none", virtual_stages=(1, 2))


def _blocks(count: int, *, devices: int, space: Space, nodes: int = 1, global_batch: int = 4) -> ParallelismProblem:
    """Return equal blocks of one operator, the last with the weights of the first."""
    each = [profile(weight_bytes=1000, input_bytes=10, output_bytes=10)]
    plain = chain_of(
        [each] * count,
        blocks=range(count),
        devices=devices,
        nodes=nodes,
        global_batch=global_batch,
        space=space,
        intra=LatencyLink(bytes_per_s=1e6),
        inter=LatencyLink(bytes_per_s=1e5),
    )
    tied = replace(plain.operators[-1], shares_weights_with=plain.operators[0].name)
    return replace(
        plain,
        cost_model="full",
        operators=(*plain.operators[:-1], tied),
        bytes_per_parameter=BytesPerParameter(weight=2, gradient=2, optimizer_state=12),
    )


def _interleaved_on(devices: tuple[int, ...], micro_batches: int) -> ParallelismPlan:
    """Return two stages of one block on each device, in this order."""
    count = len(devices)
    stages = (stage((at, at + 1), [devices[at % count]]) for at in range(2 * count))
    orders = tuple(
        tuple(f"{at}{kind}{number}" for at, kind, number in interleaved(count, group, 2, micro_batches))
        for group in range(count)
    )
    plan = plan_of(*stages, micro_batch_size=1, micro_batches=micro_batches)
    return replace(plan, schedule=Schedule(orders=orders))


@pytest.mark.parametrize(("micro_batches", "spent_s"), [(100, 0.002), (10_000, 10_000 * 4 * 2e-6)])
def test_playing_a_long_schedule_counts_in_proportion(micro_batches: int, spent_s: float) -> None:
    problem = _blocks(2, devices=2, space=FULL_SPACE, global_batch=micro_batches)
    plan = plan_of(stage((0, 1), [0]), stage((1, 2), [1]), micro_batch_size=1, micro_batches=micro_batches)
    planner = Planner(problem, Budget(deterministic=True))
    assert planner.incumbent.offer(plan, "heuristic:grid")
    assert planner.clock.deterministic_seconds == pytest.approx(spent_s)


def test_the_limit_holds_with_very_many_micro_batches() -> None:
    problem = _blocks(2, devices=2, space=replace(INTERLEAVED, micro_batch_sizes=(1,)), global_batch=20_000)
    planned = Planner(problem, Budget(deterministic=True, time_limit_s=0.1)).run(None)
    assert planned.plan.certificate is not None
    assert planned.plan.certificate.stopped_by == "deterministic_time"
    assert planned.effort.deterministic_s == pytest.approx(20_000 * 4 * 2e-6)  # the first plan uses the limit up


def test_what_would_take_forever_to_play_is_refused_not_played() -> None:
    problem = _blocks(2, devices=2, space=replace(INTERLEAVED, micro_batch_sizes=(1,)), global_batch=10**9)
    with pytest.raises(InputError, match="found 1000000000, which is 1000000000 micro-batches of 1, the largest size"):
        _planned(problem)
    plan = plan_of(stage((0, 1), [0]), stage((1, 2), [1]), micro_batch_size=1, micro_batches=10**9)
    (violation,) = check(problem, plan)
    assert violation == (
        "micro_batches: 1000000000 in 2 stages are 4000000000 actions of an iteration, at most 10000000 are played; "
        "take larger micro-batches"
    )
    priced_by_a_formula = replace(problem, cost_model="aceso")
    assert check(priced_by_a_formula, plan) == ()
    with pytest.raises(InvalidPlanError, match="at most 10000000 are played"):
        simulate(priced_by_a_formula, plan)


def test_a_chain_without_block_starts_does_not_interleave() -> None:
    problem = _blocks(4, devices=2, space=INTERLEAVED)
    plain = replace(problem, operators=tuple(replace(one, block_start=False) for one in problem.operators))
    certificate = _planned(plain).plan.certificate
    assert certificate is not None
    assert certificate.status == "optimal"


def test_fewer_groups_interleave_where_devices_may_idle() -> None:
    space = replace(INTERLEAVED, use_all_devices=False, micro_batch_sizes=(1,))
    problem = _blocks(6, devices=4, space=space, global_batch=3)
    other = _interleaved_on((0, 1, 2), 3)
    assert check(problem, other) == ()
    certificate = _planned(problem).plan.certificate
    assert certificate is not None
    assert certificate.objective <= evaluate(problem, other).iteration_ms * (1 + 1e-9)


def test_groups_that_interleave_lie_in_rank_order() -> None:
    problem = _blocks(8, devices=2, nodes=2, space=INTERLEAVED)
    assert check(problem, _interleaved_on((0, 1, 2, 3), 4)) == ()
    (violation,) = check(problem, _interleaved_on((1, 2, 3, 0), 4))
    assert "devices are in rank order" in violation


def test_the_bound_of_interleaving_holds_for_devices_in_any_order() -> None:
    space = replace(INTERLEAVED, device_order="any", micro_batch_sizes=(1,))
    problem = _blocks(8, devices=2, nodes=2, space=space)
    rotated = _interleaved_on((1, 2, 3, 0), 4)
    assert check(problem, rotated) == ()
    best_ms = evaluate(problem, rotated).iteration_ms
    shape = chain_shape(problem, block_ranges(problem))
    (one,) = interleavings(problem, micro_batches(problem), shape)
    assert least_ms(problem, shape, one, lambda spent: None, 1e9) <= best_ms


def test_tensor_parallel_groups_that_cross_nodes_are_not_looked_at() -> None:
    space = replace(INTERLEAVED, cross_node_stages=True)
    problem = _blocks(2, devices=3, nodes=2, space=space, global_batch=12)
    entries = {key: (replace(one[0], tensor_parallel=2),) for key, one in problem.profiles.items()}
    found = micro_batches(replace(problem, profiles=entries))
    assert {costs.choice.devices for batch in found for costs in batch.choices} == {2}


def test_no_choice_has_a_tensor_parallel_group_in_two_nodes() -> None:
    space = replace(FULL_SPACE, cross_node_stages=True)
    problem = random_full_problem(0, space=space, nodes=2)
    alone = replace(problem, cluster=replace(problem.cluster, nodes=4, devices_per_node=1))
    for each in (problem, alone):
        for batch in micro_batches(each):
            for costs in batch.choices:
                choice, per_node = costs.choice, each.cluster.devices_per_node
                assert choice.devices <= per_node or per_node % choice.tensor_parallel == 0
    assert any(costs.choice.data_parallel == 4 for batch in micro_batches(alone) for costs in batch.choices)
