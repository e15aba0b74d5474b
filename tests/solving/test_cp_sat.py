"""CP-SAT behind one function: hints, limits, statuses, interruption, repeatability."""

import threading
from collections.abc import Callable

import pytest
from ortools.sat.python import cp_model

from solver_plan.errors import SolverError
from solver_plan.solving import Budget, Clock, solve_cp_sat
from solver_plan.solving.cp_sat import HINT_IS_FEASIBLE
from tests.solving.programs import Assignment, assignment, best_load

ITEMS, MACHINES = 8, 3
SPREAD = [item % MACHINES for item in range(ITEMS)]


def _clock(time_limit_s: float = 60.0, **budget: float | bool) -> Clock:
    return Clock(Budget(time_limit_s=time_limit_s, **budget))  # type: ignore[arg-type]


@pytest.fixture
def small() -> Assignment:
    """A model that is solved at once."""
    return assignment(ITEMS, MACHINES)


@pytest.fixture
def endless() -> Assignment:
    """A model whose proof takes for ever."""
    return assignment(60, 6)


def test_the_optimum_is_that_of_exhaustive_search(small: Assignment) -> None:
    outcome = solve_cp_sat(small.model, _clock())
    best = best_load(small.weights)
    assert (outcome.status, outcome.objective, outcome.bound) == ("optimal", best, best)
    assert outcome.values is not None
    machine_of = [[outcome.values(variable) for variable in row].index(1) for row in small.on]
    assert small.load(machine_of) == outcome.values(small.largest) == best


@pytest.mark.parametrize("how", ["light", "for_proof"])
def test_other_ways_to_search_prove_the_same(small: Assignment, how: str) -> None:
    clock = _clock(workers=2)
    outcome = solve_cp_sat(small.model, clock, light=how == "light", for_proof=how == "for_proof")
    best = best_load(small.weights)
    assert (outcome.status, outcome.objective, outcome.bound) == ("optimal", best, best)


def test_for_a_proof_every_worker_searches_the_whole_tree(endless: Assignment) -> None:
    outcome = solve_cp_sat(endless.model, _clock(1.0, workers=2), for_proof=True)
    assert "2 full problem subsolvers: [max_lp, no_lp]" in outcome.log


def test_a_complete_hint_is_used_as_it_is(small: Assignment) -> None:
    hint = small.hint(SPREAD)
    assert len(hint) == len(small.model.proto.variables)
    outcome = solve_cp_sat(small.model, _clock(), hint=hint)
    assert HINT_IS_FEASIBLE in outcome.log
    assert f"Its objective value is {small.load(SPREAD)}" in outcome.log
    assert outcome.hint_was_feasible


def test_a_hint_can_be_tested_by_fixing_it(small: Assignment) -> None:
    outcome = solve_cp_sat(small.model, _clock(), hint=small.hint(SPREAD), fix_to_hint=True)
    assert outcome.objective == small.load(SPREAD)


def test_a_wrong_hint_is_told(small: Assignment) -> None:
    wrong = {**small.hint(SPREAD), small.largest: small.load(SPREAD) - 1}
    assert solve_cp_sat(small.model, _clock(), hint=wrong, fix_to_hint=True).status == "infeasible"
    outcome = solve_cp_sat(small.model, _clock(), hint=wrong)
    assert outcome.status == "optimal"
    assert not outcome.hint_was_feasible


def test_hints_of_the_call_before_are_forgotten(small: Assignment) -> None:
    solve_cp_sat(small.model, _clock(), hint=small.hint(SPREAD))
    assert solve_cp_sat(small.model, _clock(), hint=small.hint([0] * ITEMS)).hint_was_feasible
    assert not solve_cp_sat(small.model, _clock()).hint_was_feasible


def test_a_gap_that_was_reached_is_not_optimal(endless: Assignment) -> None:
    outcome = solve_cp_sat(endless.model, _clock(gap_limit=0.9), hint=endless.hint([0] * 60))
    assert outcome.status == "feasible"
    assert outcome.objective is not None
    assert outcome.bound is not None
    assert 0 < outcome.objective - outcome.bound <= 0.9 * outcome.objective


def test_infeasible() -> None:
    model = cp_model.CpModel()
    x = model.new_int_var(0, 3, "x")
    model.add(2 * x == 5)
    model.minimize(x)
    outcome = solve_cp_sat(model, _clock())
    assert (outcome.status, outcome.objective, outcome.bound, outcome.values) == ("infeasible", None, None, None)


def test_a_model_without_objective() -> None:
    model = cp_model.CpModel()
    x = model.new_int_var(0, 3, "x")
    model.add(2 * x == 4)
    outcome = solve_cp_sat(model, _clock())
    assert (outcome.status, outcome.objective, outcome.bound) == ("optimal", None, None)
    assert outcome.values is not None
    assert outcome.values(x) == 2


def test_no_bound_is_invented_when_time_ends_in_presolve() -> None:
    model = cp_model.CpModel()
    x = model.new_int_var(-100, -10, "x")
    model.minimize(x)
    outcome = solve_cp_sat(model, _clock(), limit=1e-9)
    assert (outcome.status, outcome.objective, outcome.values) == ("unknown", None, None)
    assert outcome.bound is None  # CP-SAT itself answers 0, above the optimum of -100


def test_a_negative_objective_keeps_its_sign() -> None:
    model = cp_model.CpModel()
    x = model.new_int_var(-100, -10, "x")
    model.minimize(2 * x + 5)
    outcome = solve_cp_sat(model, _clock())
    assert (outcome.status, outcome.objective, outcome.bound) == ("optimal", -195, -195)


def test_maximisation_is_refused() -> None:
    model = cp_model.CpModel()
    model.maximize(model.new_int_var(0, 3, "x"))
    with pytest.raises(SolverError, match="negate"):
        solve_cp_sat(model, _clock())


def test_an_invalid_model_is_refused_with_the_solvers_words() -> None:
    model = cp_model.CpModel()
    model.new_int_var(-(2**63) + 1, 2**63 - 1, "x")
    with pytest.raises(SolverError, match="CP-SAT refuses the model: var #0"):
        solve_cp_sat(model, _clock())


def test_an_invalid_parameter_is_refused_with_the_solvers_words(small: Assignment) -> None:
    with pytest.raises(SolverError, match="num_workers"):
        solve_cp_sat(small.model, _clock(), workers=-1)


def test_no_time_left_is_unknown_at_once(small: Assignment) -> None:
    clock = _clock()
    clock.interrupt()
    outcome = solve_cp_sat(small.model, clock)
    assert (outcome.status, outcome.values, outcome.log) == ("unknown", None, "")


def test_every_solution_and_bound_is_told(small: Assignment) -> None:
    solutions: list[int] = []
    bounds: list[float] = []
    outcome = solve_cp_sat(
        small.model,
        _clock(workers=1),
        hint=small.hint([0] * ITEMS),
        on_solution=lambda value: solutions.append(value(small.largest)),
        on_bound=bounds.append,
    )
    assert solutions[0] == small.load([0] * ITEMS)
    assert solutions == sorted(solutions, reverse=True)
    assert solutions[-1] == outcome.objective
    assert bounds == sorted(bounds)


@pytest.mark.parametrize("which", ["on_solution", "on_bound"])
@pytest.mark.parametrize("workers", [1, 2])
def test_an_exception_in_a_callback_reaches_the_caller(endless: Assignment, which: str, workers: int) -> None:
    def boom(argument: object) -> None:
        raise LookupError("boom")

    callbacks: dict[str, Callable[[object], None]] = {which: boom}
    with pytest.raises(LookupError, match="boom"):
        solve_cp_sat(endless.model, _clock(workers=workers), **callbacks)  # type: ignore[arg-type]


def test_another_thread_interrupts(endless: Assignment) -> None:
    clock = _clock(3600.0)
    found = threading.Event()
    stopper = threading.Thread(target=lambda: (found.wait(), clock.interrupt()))
    stopper.start()
    outcome = solve_cp_sat(endless.model, clock, on_solution=lambda value: found.set())
    stopper.join()
    assert outcome.status == "feasible"
    assert clock.limit_reached == "interrupt"


@pytest.mark.parametrize("workers", [1, 2])
def test_deterministic_is_the_same_twice(workers: int) -> None:
    def solve() -> tuple[object, ...]:
        model = assignment(30, 4)
        clock = _clock(0.3, deterministic=True, workers=workers)
        steps: list[float] = []
        outcome = solve_cp_sat(
            model.model, clock, on_solution=lambda value: steps.append(value(model.largest)), on_bound=steps.append
        )
        assert outcome.values is not None
        values = tuple(outcome.values(variable) for row in model.on for variable in row)
        return outcome.objective, outcome.bound, outcome.deterministic_s, values, tuple(steps)

    assert solve() == solve()


def test_deterministic_time_is_spent_and_runs_out() -> None:
    clock = _clock(0.05, deterministic=True)
    outcome = solve_cp_sat(assignment(40, 6).model, clock)
    assert outcome.status in ("feasible", "unknown")
    assert clock.deterministic_seconds == outcome.deterministic_s > 0
    clock.spend(0.05)
    assert clock.expired
    assert clock.limit_reached == "deterministic_time"
