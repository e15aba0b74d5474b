"""The picture of a parallelism plan."""

import re
from dataclasses import replace
from xml.etree import ElementTree

from solver_plan.parallelism.describe import describe, describe_simulation
from solver_plan.parallelism.plan import ParallelismPlan, Schedule
from solver_plan.parallelism.planner import Planner
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.parallelism.simulate import simulate
from solver_plan.parallelism.what_binds import describe_what_binds
from solver_plan.report.parallelism_picture import parallelism_picture
from solver_plan.solving import Budget
from tests.parallelism.problems import chain_of, plan_of, profile, random_problem, stage


def _planned(seed: int) -> tuple[ParallelismProblem, ParallelismPlan]:
    problem = random_problem(seed)
    return problem, Planner(problem, Budget(deterministic=True)).run(None).plan


def _texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")]


def test_every_stage_and_the_search_are_drawn() -> None:
    problem, plan = _planned(3)
    texts = _texts(parallelism_picture(plan, problem))
    for index in range(len(plan.stages)):
        assert any(text.startswith(f"stage {index}:") for text in texts)
    assert any(text.startswith("Pipeline, ") for text in texts)
    assert plan.certificate is not None
    assert any(text.startswith("Best plan and bound") for text in texts) == (len(plan.certificate.trace) > 1)


def test_of_many_micro_batches_the_first_are_drawn() -> None:
    problem, plan = _planned(3)
    more = replace(problem, global_batch=100 * plan.micro_batch_size)
    drawn = parallelism_picture(replace(plan, micro_batches=100, certificate=None), more)
    assert any(re.match(r"Pipeline, \d of 100 micro-batches", text) for text in _texts(drawn))


def test_what_takes_no_time_is_shown_like_any_other_plan() -> None:
    problem = chain_of([[profile(forward_ms=0.0, backward_ms=0.0)]] * 2, devices=2)
    found = Planner(problem, Budget(deterministic=True)).run(None).plan
    assert found.certificate is not None
    assert found.certificate.objective == 0
    plan = plan_of(stage((0, 1), [0]), stage((1, 2), [1]))
    plan = replace(plan, certificate=found.certificate)
    ElementTree.fromstring(parallelism_picture(plan, problem))
    assert "(0.0% above the mean)" in describe(plan, problem)
    assert "0.00%" in describe_simulation(simulate(problem, plan))
    assert "memory of no stage alone; no link alone" in describe_what_binds(problem, plan)


def test_an_order_of_its_own_is_drawn_as_a_whole() -> None:
    problem, plan = _planned(3)
    orders = tuple(
        tuple(f"{stage}{kind}{number}" for kind in "FB" for number in range(plan.micro_batches))
        for stage in range(len(plan.stages))
    )
    drawn = parallelism_picture(replace(plan, schedule=Schedule(orders=orders)), problem)
    assert f"Pipeline, {plan.micro_batches} of {plan.micro_batches} micro-batches (ms)" in _texts(drawn)
