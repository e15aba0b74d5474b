"""What binds a plan: the memory of stages, the links between them, and what a larger machine would bring."""

from dataclasses import replace

import pytest

from solver_plan.parallelism.check import check
from solver_plan.parallelism.kind import PARALLELISM
from solver_plan.parallelism.plan import ParallelismPlan
from solver_plan.parallelism.planner import Planner
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.parallelism.what_binds import (
    GIBIBYTE,
    describe_what_binds,
    edge_reliefs,
    larger_problems,
    stage_reliefs,
)
from solver_plan.solving import Budget
from tests.parallelism.problems import PER_MS, chain_of, plan_of, profile, random_problem, stage

BUDGET = Budget(deterministic=True)


def _planned(problem: ParallelismProblem) -> ParallelismPlan:
    return Planner(problem, BUDGET).run(None).plan


def _tight() -> ParallelismProblem:
    """Three operators on two devices; recomputing the first two saves the activations of one."""
    big = profile(input_bytes=2, output_bytes=2, activation_bytes=GIBIBYTE)
    return chain_of([[big], [big], [big]], devices=2, memory_bytes=7 * GIBIBYTE // 2, intra=PER_MS)


def test_a_gibibyte_on_one_stage_saves_its_recomputation() -> None:
    problem = _tight()
    plan = plan_of(stage((0, 2), [0], recompute=[(0, 2)]), stage((2, 3), [1]))
    assert check(problem, plan) == ()
    relieved, other = stage_reliefs(problem, plan)
    # two in flight hold 2 x 2 GiB, half a GiB too much; recomputing both operators takes 2 ms
    assert relieved.free_bytes == pytest.approx(0.5 * GIBIBYTE, abs=16)
    assert (relieved.recompute_ms, relieved.saved_ms) == pytest.approx((2.0, 2.0))
    # the slowest of 4 micro-batches: 4 x 2 ms less
    assert relieved.iteration_ms == pytest.approx(PARALLELISM.objective(problem, plan) - 8.0)
    assert (other.recompute_ms, other.saved_ms) == (0.0, 0.0)
    assert other.iteration_ms == PARALLELISM.objective(problem, plan)
    assert "memory of stage 0 (1 GiB: " in describe_what_binds(problem, plan)


def test_an_edge_costs_what_both_stages_move() -> None:
    problem = _tight()
    plan = plan_of(stage((0, 2), [0], recompute=[(0, 2)]), stage((2, 3), [1]))
    (edge,) = edge_reliefs(problem, plan)
    # 2 bytes at a byte a ms, sent by the one and received by the other
    assert edge.transfer_ms == pytest.approx(4.0)
    assert not edge.between_nodes
    # 4 micro-batches of the slower stage and one of the other
    assert edge.iteration_ms == pytest.approx(PARALLELISM.objective(problem, plan) - 4 * 2.0 - 2.0)
    assert "link between 0 and 1" in describe_what_binds(problem, plan)


def test_where_nothing_binds_that_is_said() -> None:
    problem = chain_of([[profile()], [profile()]], devices=2)
    text = describe_what_binds(problem, plan_of(stage((0, 1), [0]), stage((1, 2), [1])))
    assert "memory of no stage alone; no link alone" in text


def test_one_stage_has_no_edges() -> None:
    problem = chain_of([[profile()], [profile()]])
    plan = plan_of(stage((0, 2), [0]))
    assert edge_reliefs(problem, plan) == []
    assert "link" not in describe_what_binds(problem, plan)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_a_plan_stays_valid_on_every_larger_machine(seed: int, nodes: int) -> None:
    problem = random_problem(seed, nodes=nodes)
    plan = _planned(problem)
    asked = larger_problems(problem)
    assert len(asked) == 2
    for one in asked:
        assert check(one.problem, replace(plan, problem_digest=None, certificate=None)) == ()
    more = asked[1].problem.cluster
    assert (more.nodes, more.devices_per_node) == (
        (1, problem.cluster.devices_per_node + 1) if nodes == 1 else (3, problem.cluster.devices_per_node)
    )


@pytest.mark.parametrize("seed", range(4))
def test_what_more_brings_is_what_planning_anew_brings(seed: int) -> None:
    problem = random_problem(seed)
    plan = _planned(problem)
    text = PARALLELISM.what_if(problem, plan, BUDGET)
    for one in larger_problems(problem):
        best = _planned(one.problem).certificate
        assert best is not None
        assert best.status == "optimal"
        row = next(line for line in text.splitlines() if line.startswith(one.change))
        assert row.removeprefix(one.change).split()[0] == f"{best.objective:.3f}"
        assert row.endswith("is possible")


def test_a_plan_without_proof_is_searched_on() -> None:
    problem = random_problem(3)
    plan = replace(_planned(problem), certificate=None)
    assert "nothing but more search" in PARALLELISM.what_if(problem, plan, BUDGET)
