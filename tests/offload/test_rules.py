"""The rules of systems and people: by hand on a small problem, and against the figures of the reference data."""

import json

import pytest

from solver_plan.errors import InputError
from solver_plan.kinds import kind_named
from solver_plan.offload.assemble import Candidate, plan_document
from solver_plan.offload.check import violations
from solver_plan.offload.heuristics import RULES, run_heuristic
from solver_plan.solving.budget import Budget
from tests.offload.offload_cases import DATA, make_problem, needs_data, reference_problem

REFERENCES = json.loads((DATA / "references.json").read_text())["instances"] if DATA.is_dir() else {}


def period_ms(rule: str, **problem: int) -> float:
    return run_heuristic(make_problem(**problem), rule).timing.period_ms


def test_rules_by_hand() -> None:
    # forward 45, backward 90; updates on the CPU 10, 20, 30; copies 1, 2, 3 each way
    assert period_ms("zero_offload") == pytest.approx(45 + 90 + 60 + 1)  # the first layer's copy back comes last
    # l2 ready at 85+3, updated until 118; l1's gradient comes at 117, its update runs until 138, l0's until 148
    assert period_ms("coarse") == pytest.approx(148 + 1)
    # l2's weights are back at 121, l1's at 140, l0's at 149; nobody waits for more than its own layer
    assert period_ms("cpu_edf") == pytest.approx(149)
    # without l0's update on the CPU: l1's weights are back at 140, needed at T + 10; the device works 135 + 0.1
    assert period_ms("prefix", room=120) == pytest.approx(135.1)
    assert period_ms("twin_flow", room=120) == pytest.approx(45 + 90 + 50 + 2)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(("room", "staging"), [(0, 0), (360, 0), (120, 360), (720, 0)])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_every_rule_gives_a_valid_plan(rule: str, clip: bool, room: int, staging: int, accumulation: int) -> None:
    problem = make_problem(room=room, staging=staging, clip=clip, accumulation=accumulation, chunks=2)
    found = run_heuristic(problem, rule)
    assert violations(problem, plan_document(problem, Candidate(found.placement, found.timing))) == ()


def test_an_unknown_rule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="zero_offload"):
        kind_named("offload").plan(make_problem(), Budget(), heuristic="nonsense")


def test_a_rule_alone_claims_no_bound() -> None:
    found = kind_named("offload").plan(make_problem(), Budget(), heuristic="coarse")
    certificate = found.plan.certificate
    assert certificate is not None
    assert (certificate.bound, certificate.status, certificate.stopped_by) == (None, "feasible", "completed")
    assert certificate.incumbent == "heuristic:coarse"


@needs_data
@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_rules_reach_their_columns(name: str) -> None:
    problem = reference_problem(name)
    for rule, column in REFERENCES[name]["rules"].items():
        assert run_heuristic(problem, rule).timing.period_ms <= column * 1.005, rule
