"""HiGHS through PuLP behind one function: starts, bounds, constants, statuses, interruption."""

import subprocess
import sys
import threading

import highspy
import pulp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solver_plan.errors import SolverError
from solver_plan.solving import Budget, Clock, solve_milp
from solver_plan.solving.lp_bound import dual_bound
from tests.solving.programs import best_load, milp_assignment

ITEMS, MACHINES = 8, 3


def _clock(time_limit_s: float = 60.0, **budget: float | bool) -> Clock:
    return Clock(Budget(time_limit_s=time_limit_s, **budget))  # type: ignore[arg-type]


@pytest.mark.parametrize("constant", [0.0, 1000.0, -1e6])
def test_the_optimum_is_that_of_exhaustive_search_and_the_constant_counts(constant: float) -> None:
    milp = milp_assignment(ITEMS, MACHINES, constant=constant)
    outcome = solve_milp(milp.program, _clock())
    best = best_load(milp.weights) + constant
    assert outcome.status == "optimal"
    assert outcome.objective == pytest.approx(best, abs=1e-6)
    assert outcome.bound == pytest.approx(best, abs=1e-3)
    assert [sum(variable.varValue for variable in row) for row in milp.on] == [1.0] * ITEMS


def test_a_start_is_used() -> None:
    milp = milp_assignment(ITEMS, MACHINES, constant=7.0)
    start = milp.start([item % MACHINES for item in range(ITEMS)])
    outcome = solve_milp(milp.program, _clock(), start=start)
    assert outcome.start_was_used
    assert f"objective value is {start[milp.largest] + 7:.6g}"[:24] in outcome.log
    assert not solve_milp(milp.program, _clock()).start_was_used


def test_a_start_that_breaks_a_constraint_is_not_used() -> None:
    milp = milp_assignment(ITEMS, MACHINES)
    start = dict.fromkeys(milp.start([0] * ITEMS), 0.0)
    outcome = solve_milp(milp.program, _clock(), start=start)
    assert not outcome.start_was_used
    assert outcome.status == "optimal"


def test_a_start_is_the_worst_that_comes_back() -> None:
    milp = milp_assignment(60, 6)
    start = milp.start([0] * 60)
    outcome = solve_milp(milp.program, _clock(gap_limit=0.99), start=start)
    assert outcome.objective is not None
    assert outcome.objective <= start[milp.largest] + 1e-6


def test_a_gap_that_was_reached_is_not_optimal() -> None:
    milp = milp_assignment(60, 6)
    outcome = solve_milp(milp.program, _clock(gap_limit=0.9), start=milp.start([0] * 60))
    assert outcome.status == "feasible"
    assert outcome.objective is not None
    assert outcome.bound is not None
    assert 0 < outcome.objective - outcome.bound <= 0.9 * outcome.objective


def test_a_time_limit_is_not_optimal() -> None:
    milp = milp_assignment(60, 6)
    outcome = solve_milp(milp.program, _clock(), limit=0.2, start=milp.start([item % 6 for item in range(60)]))
    assert outcome.status == "feasible"
    assert outcome.objective is not None
    assert outcome.bound is None or outcome.bound < outcome.objective
    assert "Time limit reached" in outcome.log


def test_infeasible_leaves_no_values() -> None:
    program = pulp.LpProblem("none", pulp.LpMinimize)
    x = pulp.LpVariable("x", 0, 3, cat="Integer")
    program += x + 5
    program += 2 * x == 5
    outcome = solve_milp(program, _clock())
    assert (outcome.status, outcome.objective, outcome.bound, x.varValue) == ("infeasible", None, None, None)


def test_unbounded_is_not_called_infeasible() -> None:
    program = pulp.LpProblem("endless", pulp.LpMinimize)
    x, y = pulp.LpVariable("x", cat="Integer"), pulp.LpVariable("y", 0)
    program += x + y
    program += x - y <= 3
    with pytest.raises(SolverError, match="no lower bound"):
        solve_milp(program, _clock())


def test_a_program_without_objective() -> None:
    program = pulp.LpProblem("any", pulp.LpMinimize)
    x = pulp.LpVariable("x", 0, 3, cat="Integer")
    program += 2 * x == 4
    outcome = solve_milp(program, _clock())
    assert (outcome.status, outcome.objective, x.varValue) == ("optimal", 0.0, 2.0)


def test_maximisation_is_refused() -> None:
    with pytest.raises(SolverError, match="negate"):
        solve_milp(pulp.LpProblem("most", pulp.LpMaximize), _clock())


def test_no_time_left_is_unknown_at_once() -> None:
    clock = _clock()
    clock.interrupt()
    assert solve_milp(milp_assignment(3, 2).program, clock).status == "unknown"


def test_the_number_of_threads_may_change_within_a_process() -> None:
    for workers in (1, 2, 1):
        assert solve_milp(milp_assignment(ITEMS, MACHINES).program, _clock(workers=workers)).status == "optimal"


def test_another_thread_interrupts() -> None:
    milp = milp_assignment(80, 7)
    clock = _clock(3600.0)
    timer = threading.Timer(0.3, clock.interrupt)
    timer.start()
    outcome = solve_milp(milp.program, clock, start=milp.start([item % 7 for item in range(80)]))
    timer.join()
    assert outcome.status == "feasible"
    assert clock.limit_reached == "interrupt"


def test_the_relaxation_bounds_the_program() -> None:
    milp = milp_assignment(ITEMS, MACHINES, constant=50.0)
    relaxed = solve_milp(milp.program, _clock(), integrality=False)
    assert relaxed.status == "optimal"
    assert relaxed.objective is not None
    assert relaxed.bound is not None
    assert relaxed.bound <= relaxed.objective
    assert relaxed.bound == pytest.approx(relaxed.objective, rel=1e-8)
    assert relaxed.bound <= best_load(milp.weights) + 50


coefficients = st.integers(-9, 9)


@given(
    costs=st.lists(coefficients, min_size=3, max_size=3),
    rows=st.lists(st.tuples(st.lists(coefficients, min_size=3, max_size=3), st.integers(0, 20)), max_size=4),
    equal=st.booleans(),
    constant=st.integers(-50, 50),
    upper=st.integers(1, 9),
)
@settings(max_examples=60)
def test_a_bound_by_duals_is_below_every_point(
    costs: list[int], rows: list[tuple[list[int], int]], equal: bool, constant: int, upper: int
) -> None:
    program = pulp.LpProblem("any", pulp.LpMinimize)
    x = [pulp.LpVariable(f"x{index}", -2, upper) for index in range(3)]
    program += pulp.lpDot(costs, x) + constant
    for index, (row, right) in enumerate(rows):
        left = pulp.lpDot(row, x)
        program += (left == 0) if equal and index == 0 else (left <= right) if index % 2 else (left >= -right)
    outcome = solve_milp(program, _clock(workers=1), integrality=False)
    assert outcome.status == "optimal"  # x = 0 satisfies every row
    assert outcome.objective is not None
    assert outcome.bound is not None
    assert outcome.bound <= outcome.objective
    assert outcome.objective - outcome.bound <= 1e-6 * max(1.0, abs(outcome.objective))


def test_duals_that_are_not_optimal_give_a_lower_bound() -> None:
    program = pulp.LpProblem("two", pulp.LpMinimize)
    x, y = pulp.LpVariable("x", 0, 10), pulp.LpVariable("y", 0, 10)
    program += 2 * x + 3 * y + 100
    program += x + y >= 4
    solve_milp(program, _clock(), integrality=False)
    highs: highspy.Highs = program.solverModel
    assert dual_bound(highs) == pytest.approx(108.0)
    solution = highs.getSolution()
    for dual, bound in ((1.0, 104.0), (0.0, 100.0), (-1.0, 100.0), (2.5, 105.0)):
        solution.row_dual = [dual]
        highs.setSolution(solution)
        if highs.getSolution().dual_valid:
            assert dual_bound(highs) == pytest.approx(bound)


def test_the_first_solve_of_a_process_writes_nothing_to_standard_output() -> None:
    code = (
        "import pulp\n"
        "from solver_plan.solving import Budget, Clock, solve_milp\n"
        "program = pulp.LpProblem('p', pulp.LpMinimize)\n"
        "x = pulp.LpVariable('x', 0, 5, cat='Integer')\n"
        "program += x\n"
        "program += x >= 2.5\n"
        "solve_milp(program, Clock(Budget()))\n"
        "print(x.value())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "3.0\n"
