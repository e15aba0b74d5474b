"""The planner: never worse than a rule, the same bytes twice, the best plan after Ctrl-C, the figures to reach."""

import dataclasses
import json
import signal

import pytest

from solver_plan.documents import digest_of, document_text
from solver_plan.documents.certificate import Incumbency
from solver_plan.kinds import kind_of
from solver_plan.offload.check import violations
from solver_plan.offload.heuristics import RULES, run_heuristic
from solver_plan.offload.plan import OffloadPlan
from solver_plan.offload.planner import plan_offload
from solver_plan.offload.problem import OffloadProblem
from solver_plan.solving.budget import Budget
from solver_plan.solving.progress import silent
from tests.offload.offload_cases import DATA, make_problem, needs_data, reference_problem

REFERENCES = json.loads((DATA / "references.json").read_text())["instances"] if DATA.is_dir() else {}
BEST_KNOWN: dict[str, float] = {name: item["best_known_ms"] for name, item in REFERENCES.items()}
LOGGED = sorted(name for name in BEST_KNOWN if name.startswith(("20b_", "7b_", "13b_")) and "stream" not in name)

UNEQUAL = [(40, 1.0, 3.0), (0, 2.0, 5.0), (10, 6.0, 14.0), (25, 3.0, 9.0), (5, 4.0, 8.0), (30, 2.0, 3.0)]


def planned(problem: OffloadProblem, time_limit_s: float = 2.0, *, seed: int = 0) -> OffloadPlan:
    return plan_offload(problem, Budget(time_limit_s=time_limit_s, deterministic=True, seed=seed)).plan


def without_seconds(plan: OffloadPlan) -> str:
    assert plan.certificate is not None
    trace = tuple(dataclasses.replace(step, seconds=0.0) for step in plan.certificate.trace)
    certificate = dataclasses.replace(plan.certificate, seconds=0.0, trace=trace)
    return document_text(dataclasses.replace(plan, certificate=certificate))


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(("staging", "chunks"), [(0, 1), (0, 2), (480, 1)])
def test_plans_are_valid_certified_and_no_worse_than_any_rule(clip: bool, staging: int, chunks: int) -> None:
    problem = make_problem(UNEQUAL, room=400, staging=staging, chunks=chunks, clip=clip)
    plan = planned(problem, 0.2)
    assert violations(problem, plan) == ()
    assert plan.problem_digest == digest_of(problem)
    certificate = plan.certificate
    assert certificate is not None
    assert certificate.objective == plan.predicted.period_ms
    assert certificate.bound is not None
    assert certificate.bound <= certificate.objective
    for rule in RULES:
        assert plan.predicted.period_ms <= run_heuristic(problem, rule).timing.period_ms * (1 + 1e-9), rule


@pytest.mark.parametrize("staging", [0, 480])
def test_deterministic_planning_gives_the_same_bytes(staging: int) -> None:
    problem = make_problem(UNEQUAL, room=300, staging=staging)
    first, second = (without_seconds(planned(problem, 0.1)) for _ in range(2))
    assert first == second


def test_ctrl_c_returns_the_best_plan_so_far() -> None:
    problem = make_problem(UNEQUAL, staging=480)
    steps: list[Incumbency] = []

    def interrupt_at_the_first_bound(step: Incumbency) -> None:
        steps.append(step)
        if step.bound is not None and sum(one.bound is not None for one in steps) == 1:
            signal.raise_signal(signal.SIGINT)

    plan = plan_offload(problem, Budget(time_limit_s=1000.0), None, interrupt_at_the_first_bound).plan
    assert violations(problem, plan) == ()
    assert plan.certificate is not None
    assert plan.certificate.stopped_by == "interrupt"


def test_a_gap_limit_ends_the_search_and_says_so() -> None:
    problem = make_problem(UNEQUAL, room=100, staging=480)
    found = plan_offload(problem, Budget(time_limit_s=1000.0, gap_limit=0.9, deterministic=True))
    assert found.plan.certificate is not None
    assert (found.plan.certificate.status, found.plan.certificate.stopped_by) == ("feasible", "gap")


def test_with_room_for_everything_the_device_never_waits_longer_than_its_work() -> None:
    problem = make_problem(UNEQUAL, room=10**6)
    plan = planned(problem)
    assert plan.certificate is not None
    assert plan.certificate.status == "optimal"
    assert plan.predicted.period_ms <= problem.compute_ms + sum(map(problem.gpu_update_ms, range(6))) + 1e-9


def test_streaming_helps_where_the_cpu_is_slow() -> None:
    slow = (200.0, 1e5, 2e4, 2e4)
    without = planned(make_problem(UNEQUAL, rates=slow), 0.1).predicted.period_ms
    with_streaming = planned(make_problem(UNEQUAL, staging=960, rates=slow), 0.1)
    assert with_streaming.predicted.period_ms < 0.8 * without
    assert any(item.update_on == "gpu_streamed" for item in with_streaming.placement)


def test_every_layer_that_does_not_fit_the_staging_room_stays_off_it() -> None:
    problem = make_problem(UNEQUAL, staging=120, rates=(200.0, 1e5, 2e4, 2e4))
    plan = planned(problem, 0.1)
    streamed = {item.layer for item in plan.placement if item.update_on == "gpu_streamed"}
    assert streamed <= {"l1", "l2", "l4"}
    assert violations(problem, plan) == ()


@needs_data
@pytest.mark.parametrize("name", LOGGED)
def test_logged_profiles_are_solved_to_the_bound(name: str) -> None:
    plan = planned(reference_problem(name), 5.0)
    assert plan.certificate is not None
    assert plan.certificate.status == "optimal"
    assert plan.predicted.period_ms <= BEST_KNOWN[name] * (1 + 1e-9)


@needs_data
@pytest.mark.parametrize("name", sorted(name for name in BEST_KNOWN if name.startswith("small") and "gpt" not in name))
def test_small_instances_reach_the_best_known(name: str) -> None:
    plan = planned(reference_problem(name), 0.6)
    assert plan.certificate is not None
    assert plan.predicted.period_ms <= BEST_KNOWN[name] * (1 + (1e-2 if "stream" in name else 1e-9))
    assert plan.certificate.status == "optimal" or "stream" in name


@needs_data
@pytest.mark.parametrize("name", ["bighead_s25_free", "tiedhead_s20_free"])
def test_unequal_layers_reach_the_best_known(name: str) -> None:
    plan = planned(reference_problem(name), 3.0)
    assert plan.certificate is not None
    assert plan.certificate.gap is not None
    assert plan.predicted.period_ms <= BEST_KNOWN[name] * 1.005
    assert plan.certificate.gap <= 0.03


def test_the_kind_answers_with_tables_and_a_replay() -> None:
    problem = make_problem(UNEQUAL, room=300)
    found = kind_of(problem).plan(problem, Budget(time_limit_s=1.0, deterministic=True), on_progress=silent)
    described = kind_of(problem).describe(found.plan, problem)
    assert "binds" in described
    assert "room" in described
    assert "period" in kind_of(problem).describe(found.plan, None)
    assert "jitter" in kind_of(problem).simulate(problem, found.plan)
    assert kind_of(problem).objective(problem, found.plan) == found.plan.certificate.objective  # type: ignore[union-attr]
