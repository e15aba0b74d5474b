"""The picture of a parallelism plan."""

from dataclasses import replace
from xml.etree import ElementTree

from solver_plan.parallelism.plan import ParallelismPlan, Schedule
from solver_plan.parallelism.planner import Planner
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.report.parallelism_picture import parallelism_picture
from solver_plan.solving import Budget
from tests.parallelism.problems import random_problem


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


def test_only_the_first_of_many_micro_batches_are_drawn() -> None:
    problem, plan = _planned(3)
    times = 40
    many = replace(problem, global_batch=times * problem.global_batch)
    drawn = parallelism_picture(replace(plan, micro_batches=times * plan.micro_batches), many)
    shown = 3 * len(plan.stages) + 1
    assert f"Pipeline, {shown} of {times * plan.micro_batches} micro-batches (ms)" in _texts(drawn)


def test_an_order_of_its_own_is_drawn_as_a_whole() -> None:
    problem, plan = _planned(3)
    orders = tuple(
        tuple(f"{stage}{kind}{number}" for kind in "FB" for number in range(plan.micro_batches))
        for stage in range(len(plan.stages))
    )
    drawn = parallelism_picture(replace(plan, schedule=Schedule(orders=orders)), problem)
    assert f"Pipeline, {plan.micro_batches} of {plan.micro_batches} micro-batches (ms)" in _texts(drawn)
