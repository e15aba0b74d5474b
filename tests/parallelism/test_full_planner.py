"""The planner under the `full` cost model, against every valid plan."""

from dataclasses import dataclass, replace

import pytest

from solver_plan.errors import InfeasibleProblemError, InputError
from solver_plan.parallelism.check import check
from solver_plan.parallelism.choices import micro_batches
from solver_plan.parallelism.costs import evaluate
from solver_plan.parallelism.plan import ParallelismPlan
from solver_plan.parallelism.planner import Planner
from solver_plan.parallelism.problem import ParallelismProblem, Space
from solver_plan.solving import Budget, Planned
from tests.parallelism.full_problems import FULL_SPACE, every_plan, random_full_problem


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
