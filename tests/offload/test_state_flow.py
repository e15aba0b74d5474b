"""The flow of streamed states: staging is kept, updates follow copies, and what is laid out from it is valid."""

import random
from itertools import pairwise

import pytest

from solver_plan.offload.assemble import Candidate, plan_document
from solver_plan.offload.check import violations
from solver_plan.offload.operations import Placement
from solver_plan.offload.plan import PLACES, Place
from solver_plan.offload.problem import OffloadProblem
from solver_plan.offload.state_flow import state_flow
from solver_plan.offload.streaming import lay_out
from tests.offload.offload_cases import make_problem


def random_case(seed: int) -> tuple[OffloadProblem, Placement]:
    draws = random.Random(seed)
    layers = [(draws.randint(5, 40), draws.uniform(1, 20), draws.uniform(2, 40)) for _ in range(draws.randint(3, 7))]
    problem = make_problem(
        layers,
        room=10**6,
        staging=12 * max(size for size, _, _ in layers) * draws.choice((1, 2, 3)),
        chunks=draws.choice((1, 2)),
        clip=draws.random() < 0.5,
        accumulation=draws.choice((1, 2)),
    )
    places: list[Place] = [draws.choice(PLACES) for _ in layers]
    places[draws.randrange(len(places))] = "gpu_streamed"
    return problem, tuple(places)


@pytest.mark.parametrize("seed", range(12))
def test_states_follow_each_other_within_the_staging(seed: int) -> None:
    problem, placement = random_case(seed)
    flow = state_flow(problem, placement, 1.2 * problem.compute_ms * problem.accumulation_steps)
    stays = []
    for layer, copy_in_ms in flow.copy_in_ms.items():
        there_ms = copy_in_ms + problem.state_copy_in_ms(layer)
        assert flow.update_ms[layer] >= there_ms - 1e-9
        assert flow.copy_out_ms[layer] >= flow.update_ms[layer] + problem.gpu_update_ms(layer) - 1e-9
        assert -layer <= flow.program[layer] <= layer
        stays.append((copy_in_ms, flow.copy_out_ms[layer] + problem.state_copy_out_ms(layer), layer))
    for moment_ms, _, _ in stays:
        held = sum(problem.state_bytes(layer) for since, until, layer in stays if since <= moment_ms < until - 1e-9)
        assert held <= problem.staging_bytes
    times = sorted((start, start + problem.state_copy_in_ms(layer)) for layer, start in flow.copy_in_ms.items())
    assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(times))


@pytest.mark.parametrize("seed", range(12))
def test_a_timeline_from_the_flow_is_valid(seed: int) -> None:
    problem, placement = random_case(seed)
    found = lay_out(problem, placement, None, 1.2 * problem.compute_ms)
    if found is None:
        pytest.skip("the orders of this flow wait for each other")
    assert violations(problem, plan_document(problem, Candidate(placement, found.timing))) == ()


def test_two_states_are_prefetched_where_the_staging_holds_two() -> None:
    problem = make_problem(staging=12 * 60)
    flow = state_flow(problem, ("gpu_streamed", "cpu", "gpu_streamed"), 200.0)
    # layer 2's backward ends at 85 ms, its copy takes 18 ms, that of layer 0 6 ms; both are there at once
    assert flow.copy_in_ms == {2: pytest.approx(61.0), 0: pytest.approx(79.0)}
    assert flow.update_ms[2] == pytest.approx(85.0)
    assert flow.program == {2: 2, 0: 0}
    assert flow.update_ms[0] == pytest.approx(135.0)


def test_the_state_that_is_needed_first_goes_first() -> None:
    problem = make_problem([(10, 5.0, 5.0), (10, 5.0, 5.0), (10, 5.0, 5.0)], staging=120, clip=True)
    flow = state_flow(problem, ("gpu_streamed",) * 3, 100.0)
    assert sorted(flow.copy_in_ms, key=lambda layer: flow.copy_in_ms[layer]) == [0, 1, 2]
