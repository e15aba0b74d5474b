"""Limits make sense, the clock counts them, and Ctrl-C ends a search with the best plan so far."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from solver_plan.errors import InputError
from solver_plan.solving import Budget, Clock
from solver_plan.solving.background import run_interruptibly
from tests.conftest import PROJECT

SEARCH = Path(__file__).parent / "endless_search.py"


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"time_limit_s": 0.0}, "time limit: found 0 s; it must be greater than 0 and finite"),
        ({"time_limit_s": -1.0}, "time limit"),
        ({"time_limit_s": float("nan")}, "time limit"),
        ({"time_limit_s": float("inf")}, "time limit"),
        ({"gap_limit": 1.0}, "gap"),
        ({"gap_limit": -0.1}, "gap"),
        ({"gap_limit": float("nan")}, "gap"),
        ({"workers": 0}, "workers"),
        ({"workers": 1001}, "workers"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**31}, "seed"),
    ],
)
def test_a_limit_without_sense_is_refused(limits: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Budget(**limits)  # type: ignore[arg-type]


def test_workers() -> None:
    assert Budget(workers=3).worker_count == 3
    assert Budget(deterministic=True).worker_count == 1
    assert Budget().worker_count == len(os.sched_getaffinity(0))


def test_a_deterministic_clock_counts_what_is_declared_alone() -> None:
    clock = Clock(Budget(time_limit_s=2.0, deterministic=True))
    assert clock.remaining == 2.0
    clock.spend(1.5)
    assert (clock.remaining, clock.expired) == (0.5, False)
    clock.spend(1.0)
    assert (clock.remaining, clock.expired, clock.limit_reached) == (0.0, True, "deterministic_time")


def test_a_wall_clock_does_not_count_what_is_declared() -> None:
    clock = Clock(Budget(time_limit_s=1e6))
    clock.spend(1e7)
    assert clock.remaining > 0
    assert clock.deterministic_seconds == 1e7
    assert clock.limit_reached == "time"


def test_an_interrupted_clock_has_nothing_left() -> None:
    clock = Clock(Budget(time_limit_s=1e6))
    threading.Thread(target=clock.interrupt).start()
    while not clock.interrupted:
        pass
    assert (clock.remaining, clock.expired, clock.limit_reached) == (0.0, True, "interrupt")


@pytest.fixture
def ctrl_c_raises() -> Iterator[None]:
    """Give Ctrl-C its usual meaning: a job in the background of a shell inherits that it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_raises")
def test_the_first_ctrl_c_interrupts_and_the_second_is_as_usual() -> None:
    clock = Clock(Budget())
    before = signal.getsignal(signal.SIGINT)
    with clock.interruptible():
        signal.raise_signal(signal.SIGINT)
        assert clock.interrupted
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    seen: list[object] = []

    def search() -> None:
        with Clock(Budget()).interruptible():
            seen.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=search)
    thread.start()
    thread.join()
    assert seen == [before]


def test_stop_is_called_until_work_ends_and_results_and_exceptions_come_back() -> None:
    clock = Clock(Budget())
    stopped = threading.Event()
    clock.interrupt()
    assert run_interruptibly(lambda: stopped.wait() and "done", stopped.set, clock) == "done"
    with pytest.raises(ZeroDivisionError):
        run_interruptibly(lambda: 1 / 0, stopped.set, clock)


@pytest.mark.parametrize("solver", ["cp-sat", "milp"])
@pytest.mark.parametrize(("signals", "code"), [(1, 0), (2, 1)])
def test_ctrl_c_during_a_solve(solver: str, signals: int, code: int) -> None:
    """One signal: the certificate of the best plan so far. Two: the program ends as usual, and soon."""
    command = [sys.executable, str(SEARCH), solver, str(signals)]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    shown = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if signals == 1:
        assert shown.stdout.splitlines()[-1] == "feasible interrupt True True", shown.stderr
    else:
        assert "KeyboardInterrupt" in shown.stderr.splitlines()[-1]
    assert (shown.returncode != 0) is (code != 0)
