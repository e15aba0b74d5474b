"""Bound, constraint programs and exhaustive search agree on small problems; the bound holds for every plan."""

import itertools
import random

import pytest

from solver_plan.offload.bounds import inequalities, placement_bound, relaxed_period_ms
from solver_plan.offload.cyclic_model import cyclic_model
from solver_plan.offload.flow import Rule, run_orders, run_rule
from solver_plan.offload.model import flow_model
from solver_plan.offload.operations import Placement, all_on, iteration_of, precedences_of, resident_bytes
from solver_plan.offload.plan import PLACES
from solver_plan.offload.problem import OffloadProblem
from solver_plan.offload.retiming import retime
from solver_plan.offload.streaming import at_once, best_layout
from solver_plan.solving.budget import Budget, Clock
from solver_plan.solving.cp_sat import solve_cp_sat
from tests.offload.disjunctive_milp import least_period_ms
from tests.offload.offload_cases import make_plan, make_problem, needs_data, reference_problem


def random_problem(draws: random.Random, layers: int, *, staging: bool = False, chunks: int = 1) -> OffloadProblem:
    sizes = [draws.choice((0, 5, 10, 20, 40, 80)) for _ in range(layers)]
    sizes[draws.randrange(layers)] = 20
    largest = 12 * max(sizes)
    return make_problem(
        [(size, draws.uniform(1, 10), draws.uniform(2, 20)) for size in sizes],
        room=draws.choice((0, 4 * sum(sizes), 7 * sum(sizes))),
        staging=draws.choice((largest, 2 * largest)) if staging else 0,
        chunks=chunks,
        clip=draws.random() < 0.4,
        accumulation=draws.choice((1, 1, 2)),
        rates=(draws.choice((700.0, 2e3, 5e3)), 6e4, draws.choice((1e4, 3e4)), draws.choice((1e4, 3e4))),
    )


def placements(problem: OffloadProblem, *, streaming: bool = False) -> list[Placement]:
    choices = PLACES if streaming else PLACES[:2]
    return [
        placement
        for placement in itertools.product(choices, repeat=len(problem.layers))
        if resident_bytes(problem, placement) <= problem.gpu_state_bytes
    ]


def exact_ms(problem: OffloadProblem, fixed: Placement | None) -> float:
    """The least period by CP-SAT, recomputed from its orders; its proof must agree."""
    clock = Clock(Budget(time_limit_s=30.0, deterministic=True))
    start = fixed or all_on("cpu", len(problem.layers))
    timing = run_rule(problem, start, Rule())[1]
    model = flow_model(problem, inequalities(problem), longest_ms=timing.period_ms, bound_ms=None, fixed=fixed)
    hint = model.hint(start, iteration_of(problem, start), timing)
    assert solve_cp_sat(model.model, clock, hint=hint, fix_to_hint=True).values is not None
    outcome = solve_cp_sat(model.model, clock, hint=hint)
    assert outcome.status == "optimal"
    assert outcome.values is not None
    assert outcome.bound is not None
    placement, orders = model.solution(outcome.values)
    period_ms = run_orders(problem, placement, orders).period_ms
    assert outcome.bound * model.tick_ms == pytest.approx(period_ms, rel=1e-6)
    return period_ms


@pytest.mark.parametrize("seed", range(12))
def test_the_relaxed_period_never_exceeds_a_real_one(seed: int) -> None:
    draws = random.Random(seed)
    problem = random_problem(draws, 5, chunks=draws.choice((1, 2)))
    rows = inequalities(problem)
    everything = placements(problem)
    for placement in draws.sample(everything, min(6, len(everything))):
        assert relaxed_period_ms(rows, placement) <= exact_ms(problem, placement) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_the_program_finds_the_least_relaxed_period(seed: int) -> None:
    draws = random.Random(100 + seed)
    problem = random_problem(draws, 5, staging=seed % 2 == 1)
    rows = inequalities(problem)
    found = placement_bound(problem, Clock(Budget(workers=1)))
    streaming = [
        placement
        for placement in placements(problem, streaming=problem.staging_bytes > 0)
        if all(place != "gpu_streamed" or problem.may_stream(layer) for layer, place in enumerate(placement))
    ]
    least = min(relaxed_period_ms(rows, placement) for placement in streaming)
    assert found.optimal
    assert found.placement in streaming
    assert found.bound_ms == pytest.approx(least, rel=1e-6)
    assert found.bound_ms is not None
    assert found.bound_ms <= least


@pytest.mark.parametrize("seed", range(8))
def test_cp_sat_exhaustive_search_and_milp_agree(seed: int) -> None:
    draws = random.Random(200 + seed)
    layers, chunks = (3, 2) if seed % 4 == 3 else (4, 1)
    problem = random_problem(draws, layers, chunks=chunks)
    free_ms = exact_ms(problem, None)
    assert free_ms == pytest.approx(min(exact_ms(problem, placement) for placement in placements(problem)), rel=1e-9)
    longest_ms = run_rule(problem, all_on("cpu", layers), Rule())[1].period_ms
    assert free_ms == pytest.approx(least_period_ms(problem, longest_ms), rel=1e-5)


def test_an_absent_chain_binds_nothing() -> None:
    # the large layer is on the device; its copies and update, if they counted, would take 300 ms
    problem = make_problem([(10, 10.0, 20.0), (1000, 10.0, 20.0)], room=12_000)
    assert exact_ms(problem, None) == pytest.approx(72)  # l0: copies 1, update 10
    assert exact_ms(problem, ("gpu", "cpu")) > 1000


@pytest.mark.parametrize("seed", range(10))
def test_streamed_layouts_are_no_shorter_than_the_bound_and_fit_the_cyclic_program(seed: int) -> None:
    draws = random.Random(300 + seed)
    problem = random_problem(draws, 4, staging=True)
    rows = inequalities(problem)
    placement: Placement = tuple(
        draws.choice(("cpu", "gpu_streamed") if problem.may_stream(layer) else ("cpu",)) for layer in range(4)
    )
    found = best_layout(problem, placement, at_once(placement), 0.0)
    assert found is not None
    period_ms = found.timing.period_ms
    assert relaxed_period_ms(rows, placement) <= period_ms * (1 + 1e-9)
    model = cyclic_model(problem, rows, longest_ms=period_ms, bound_ms=None, fixed=placement)
    hint = model.hint(placement, found.timing)
    assert hint is not None
    clock = Clock(Budget(time_limit_s=0.02, deterministic=True))
    outcome = solve_cp_sat(model.model, clock, hint=hint, fix_to_hint=True)
    assert outcome.values is not None
    outcome = solve_cp_sat(model.model, clock, hint=hint)
    if outcome.values is not None:
        found_placement, iteration, rounded = model.timing_of(outcome.values)
        assert found_placement == placement
        exact = retime(problem, iteration, precedences_of(problem, iteration), rounded)
        assert exact is not None
        assert exact[0].period_ms <= period_ms * (1 + 1e-2)


@pytest.mark.parametrize("seed", range(6))
def test_both_constraint_programs_agree_where_nothing_is_streamed(seed: int) -> None:
    draws = random.Random(400 + seed)
    problem = random_problem(draws, 3)
    placement = draws.choice(placements(problem))
    flow_ms = exact_ms(problem, placement)
    start = run_rule(problem, placement, Rule())[1]
    model = cyclic_model(problem, inequalities(problem), longest_ms=start.period_ms, bound_ms=None, fixed=placement)
    outcome = solve_cp_sat(model.model, Clock(Budget(time_limit_s=20.0, deterministic=True)))
    assert outcome.status == "optimal"
    assert outcome.objective is not None
    assert outcome.objective * model.tick_ms == pytest.approx(flow_ms, rel=1e-3)


def test_clipping_never_shortens_and_room_never_lengthens_the_bound() -> None:
    def bound_ms(**what: int) -> float:
        found = placement_bound(make_problem(**what), Clock(Budget(workers=1))).bound_ms
        assert found is not None
        return found

    assert bound_ms(clip=True) >= bound_ms()
    assert bound_ms(room=360) <= bound_ms(room=240) <= bound_ms(room=120) <= bound_ms()
    assert bound_ms(accumulation=2) > bound_ms()


@needs_data
@pytest.mark.parametrize(
    "name", ["small00_6l_k1", "small02_8l_k1", "small04_6l_k2", "small06_9l_k2", "small08_8l_k1", "small10_7l_k1"]
)
def test_the_small_instances_equal_exhaustive_search(name: str) -> None:
    problem = reference_problem(name)
    rows = inequalities(problem)
    free_ms = exact_ms(problem, None)
    for placement in placements(problem):
        if relaxed_period_ms(rows, placement) < free_ms * (1 - 1e-9):  # all others are longer in any case
            assert exact_ms(problem, placement) >= free_ms * (1 - 1e-9)


def test_a_plan_by_earliest_deadline_is_never_below_its_relaxed_period() -> None:
    problem = make_problem(room=360, chunks=3)
    for placement in placements(problem):
        plan = make_plan(problem, placement)
        assert plan.predicted.period_ms >= relaxed_period_ms(inequalities(problem), placement) * (1 - 1e-12)
