"""Annealing in processes of their own, beside the one that plans: rounds with other seeds on the machine's other cores.

A process is started with this file as its program and talks over its standard input and output: first the instance,
then rounds, one at a time. It is a child that reads nothing of the main program, so that planning from a script needs
no guard around its main part. Which round ends first depends on the machine: not for the deterministic search.
"""

import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Self

from solver_plan.solving import Budget, Clock
from solver_plan.wavefront.heuristics.annealing import anneal
from solver_plan.wavefront.heuristics.annealing_devices import anneal_devices
from solver_plan.wavefront.instance import Instance
from solver_plan.wavefront.schedule import Schedule, Segment

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Round:
    """One run of annealing; a list of segments is annealed without device sets, a schedule with them."""

    start: Schedule | Sequence[Segment]
    seconds: float
    seed: int
    heat: float
    area_weight: float


@dataclass(frozen=True, slots=True)
class Annealed:
    """What came of a round."""

    best: Schedule | list[Segment]
    objective: float
    excess_bytes: float


def run_round(instance: Instance, clock: Clock, each: Round) -> Annealed:
    """Anneal once, within the clock's budget."""
    if isinstance(each.start, Schedule):
        schedule, objective, excess = anneal_devices(
            instance, each.start, clock, each.seconds, each.seed, heat=each.heat
        )
        return Annealed(schedule, objective, excess)
    segments, makespan = anneal(
        instance, each.start, clock, each.seconds, each.seed, heat=each.heat, area_weight=each.area_weight
    )
    return Annealed(segments, makespan, 0.0)


class AnnealingProcesses:
    """Processes that anneal while the main one does the same. Ends them on leaving the `with` block."""

    def __init__(self, instance: Instance, count: int) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        for _ in range(count):
            process = subprocess.Popen(
                [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
            )
            self._processes.append(process)
            self._send(process, instance)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def begin(self, rounds: Sequence[Round]) -> None:
        """Give each process a round; those without one stay idle."""
        for process, each in zip(self._processes, rounds, strict=False):
            self._send(process, each)

    def results(self, clock: Clock) -> list[Annealed]:
        """Wait for the rounds that were begun; nothing after an interruption. A process that failed is left out."""
        found: list[Annealed] = []
        for process in self._processes:
            reader = threading.Thread(target=self._read, args=(process, found), daemon=True)
            reader.start()
            while reader.is_alive() and not clock.interrupted:
                reader.join(0.05)
        return [] if clock.interrupted else found

    def __len__(self) -> int:
        return len(self._processes)

    def _send(self, process: subprocess.Popen[bytes], what: Instance | Round) -> None:
        assert process.stdin is not None
        try:
            pickle.dump(what, process.stdin)
            process.stdin.flush()
        except BrokenPipeError:
            log.warning("a process for annealing ended early; planning goes on without it")

    def _read(self, process: subprocess.Popen[bytes], found: list[Annealed]) -> None:
        assert process.stdout is not None
        try:
            result = pickle.load(process.stdout)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):
            return
        assert isinstance(result, Annealed)
        found.append(result)


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Anneal round after round, until the requests end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends this one
    instance = pickle.load(requests)
    assert isinstance(instance, Instance)
    while True:
        try:
            each = pickle.load(requests)
        except EOFError:
            return
        assert isinstance(each, Round)
        clock = Clock(Budget(time_limit_s=each.seconds))
        pickle.dump(run_round(instance, clock, each), answers)
        answers.flush()


if __name__ == "__main__":
    # classes pickled here must be those of the module, not of the program
    from solver_plan.wavefront.heuristics import annealing_processes

    annealing_processes.serve(sys.stdin.buffer, sys.stdout.buffer)
