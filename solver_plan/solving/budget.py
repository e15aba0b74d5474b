"""How long a search may take, and the clock that counts it."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

from solver_plan.documents.certificate import StoppedBy
from solver_plan.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of a search.

    Raises
    ------
    InputError
        If a limit makes no sense.
    """

    time_limit_s: float = 60.0
    """Wall-clock seconds; with `deterministic`, deterministic seconds (see `Clock.spend`)."""
    gap_limit: float = 0.0
    """Stop when (objective - bound) / objective is at most this."""
    workers: int | None = None
    """Solver workers; None: the machine's cores."""
    deterministic: bool = False
    """The same answer every time: limits count deterministic time, solvers search in a fixed order."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.time_limit_s < float("inf"):
            raise InputError(f"time limit: found {self.time_limit_s:g} s; it must be greater than 0 and finite")
        if not 0 <= self.gap_limit < 1:
            raise InputError(f"gap: found {self.gap_limit:g}; it is a fraction, at least 0 and below 1")
        if self.workers is not None and not 1 <= self.workers <= 1000:
            raise InputError(f"workers: found {self.workers}; between 1 and 1000")
        if not 0 <= self.seed < 2**31:
            raise InputError(f"seed: found {self.seed}; between 0 and 2147483647")

    @property
    def worker_count(self) -> int:
        """Number of solver workers to use."""
        if self.workers is not None:
            return self.workers
        return 1 if self.deterministic else _usable_cores()


class OutOfTimeError(Exception):
    """Nothing is left of the budget; raised by `Clock.work` to leave deep computations, caught by the planner."""


class Clock:
    """Counts a budget down and knows whether the user interrupted.

    In deterministic mode only what is declared with `spend` counts, so that the same work ends at the same point
    however loaded the machine is.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._begin = time.monotonic()
        self._spent = 0.0
        self._spending = threading.Lock()
        self._interrupted = threading.Event()

    @property
    def seconds(self) -> float:
        """Wall-clock seconds since the search began."""
        return time.monotonic() - self._begin

    @property
    def deterministic_seconds(self) -> float:
        """Deterministic time declared so far."""
        return self._spent

    def spend(self, deterministic_seconds: float) -> None:
        """Declare work done, in CP-SAT's unit: roughly one second of a core. For heuristics, a fixed cost per step."""
        with self._spending:
            self._spent += deterministic_seconds

    def work(self, deterministic_seconds: float) -> None:
        """Declare work done and go on only if something is left. Raises `OutOfTimeError`."""
        self.spend(deterministic_seconds)
        if self.expired:
            raise OutOfTimeError

    @property
    def remaining(self) -> float:
        """What is left of the limit, in its own unit; never below 0. 0 after an interruption."""
        if self.interrupted:
            return 0.0
        used = self._spent if self.budget.deterministic else self.seconds
        return max(0.0, self.budget.time_limit_s - used)

    @property
    def expired(self) -> bool:
        """True when nothing is left."""
        return self.remaining <= 0

    @property
    def interrupted(self) -> bool:
        """True after `interrupt`, or after Ctrl-C within `interruptible`."""
        return self._interrupted.is_set()

    def interrupt(self) -> None:
        """End the search as soon as possible with the best plan so far. Safe from any thread."""
        self._interrupted.set()

    @property
    def limit_reached(self) -> StoppedBy:
        """Which limit ended a search that this clock ended."""
        if self.interrupted:
            return "interrupt"
        return "deterministic_time" if self.budget.deterministic else "time"

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Within the block the first Ctrl-C interrupts the search; the second one ends the program as usual."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.getsignal(signal.SIGINT)

        def on_interrupt(number: int, frame: FrameType | None) -> None:
            signal.signal(signal.SIGINT, previous)
            self.interrupt()

        signal.signal(signal.SIGINT, on_interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))  # a container may be given fewer than the machine has
    return os.cpu_count() or 1
