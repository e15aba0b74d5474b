"""Threads that carry operations out beside the training loop: one for each copy direction, some for updates.

An operation waits for the operations that it follows, and until it is admitted: there is room, a decision has been
made. Of those that may start, a thread takes the one with the lowest rank: the plan's order, without idling where the
plan's order would wait for something that is late. Room is given in that order: what finds none is not overtaken by
what needs the same, or large pieces would wait for ever.
"""

import bisect
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from solver_plan.errors import RunFailedError

Lane = Literal["cpu", "gpu", "d2h", "h2d"]
"""Updates on the host, updates with streamed state on the device, and the two directions of the link."""
Rank = tuple[int, float]
"""Iteration, and planned start in milliseconds."""


Admission = Literal["start", "wait", "wait_in_order"]
"""`wait`: others may go first; `wait_in_order`: none that needs the same room."""


def _at_once() -> Admission:
    return "start"


@dataclass(eq=False)
class Operation:
    """Something that a lane does once."""

    lane: Lane
    rank: Rank
    label: str
    """What and of which layer, for messages and the record of what ran."""
    run: Callable[[], None]
    """Does it; ends when it is done, on the device too."""
    admit: Callable[[], Admission] = _at_once
    """Asked with the lock held before it starts; takes the room that the operation needs."""
    needs: str = ""
    """Names that room."""
    finished: Callable[[], None] | None = None
    """Called with the lock held when it has ended."""
    waits_for: int = 0
    followers: list["Operation"] = field(default_factory=list)
    done: bool = False


class Lanes:
    """The threads, and what waits for them.

    Parameters
    ----------
    threads
        Number of threads of each lane.
    prepare
        Called in each thread as it starts.
    """

    def __init__(self, threads: Mapping[Lane, int], prepare: Callable[[], None] = lambda: None) -> None:
        self.lock = threading.RLock()
        self._waiting = threading.Condition(self.lock)
        """Of the training loop."""
        self._work_there = {lane: threading.Condition(self.lock) for lane in threads}
        self._ready: dict[Lane, list[tuple[Rank, int, Operation]]] = {lane: [] for lane in threads}
        self._serial = itertools.count()
        self._stopped = False
        self._prepare = prepare
        self.failure: BaseException | None = None
        self.failed_at = ""
        self.describe_damage: Callable[[], str] = str
        """Says what a failure leaves behind."""
        self.record: list[str] | None = None
        """Labels of what has started, in order, where somebody asked for it."""
        self._threads = [
            threading.Thread(target=self._work, args=(lane,), name=f"offload {lane} {number}", daemon=True)
            for lane, count in threads.items()
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, operation: Operation, after: Iterable[Operation] = ()) -> Operation:
        """Queue an operation behind others."""
        with self.lock:
            for earlier in after:
                if not earlier.done:
                    earlier.followers.append(operation)
                    operation.waits_for += 1
            if operation.waits_for == 0:
                self._queue(operation)
        return operation

    def changed(self) -> None:
        """Say that something which operations wait for has changed. Wakes only those that may have something to do."""
        with self.lock:
            for lane, ready in self._ready.items():
                if ready:
                    self._work_there[lane].notify_all()
            self._waiting.notify_all()

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait in the training loop's thread. Raises what went wrong in a lane."""
        with self.lock:
            self._waiting.wait_for(lambda: self.failure is not None or self._stopped or until())
            self.raise_failure()
            if self._stopped and not until():
                raise RunFailedError("the optimizer was closed while updates were under way; make a new one")

    def raise_failure(self) -> None:
        """Raise `RunFailedError` if an operation has failed."""
        if self.failure is not None:
            raise RunFailedError(
                f"{self.failed_at}: {type(self.failure).__name__}: {self.failure}; {self.describe_damage()}: load the "
                "last checkpoint into a new optimizer"
            ) from self.failure

    def stop(self) -> None:
        """End the threads; what is queued is dropped."""
        with self.lock:
            self._stopped = True
            for condition in (self._waiting, *self._work_there.values()):
                condition.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _queue(self, operation: Operation) -> None:
        bisect.insort(self._ready[operation.lane], (operation.rank, next(self._serial), operation))
        self._work_there[operation.lane].notify()

    def _work(self, lane: Lane) -> None:
        torch.set_num_threads(1)  # of this thread's kernels: threads of theirs would get in each other's way
        try:
            self._prepare()
            while (operation := self._next(lane)) is not None:
                self._carry_out(operation)
        except BaseException as error:  # to the training loop, which raises it
            self._fail(error, f"lane {lane}")

    def _next(self, lane: Lane) -> Operation | None:
        """Wait for an operation that may start; None: there is no more."""
        with self.lock:
            while not self._stopped:
                operation = None if self.failure is not None else self._admitted(self._ready[lane])
                if operation is not None:
                    return operation
                self._work_there[lane].wait()
            return None

    def _admitted(self, ready: list[tuple[Rank, int, Operation]]) -> Operation | None:
        full: set[str] = set()
        for index, (_, _, operation) in enumerate(ready):
            if operation.needs in full:
                continue
            admission = operation.admit()
            if admission == "start":
                del ready[index]
                if self.record is not None:
                    self.record.append(operation.label)
                return operation
            if admission == "wait_in_order":
                full.add(operation.needs)
        return None

    def _carry_out(self, operation: Operation) -> None:
        try:
            operation.run()
        except BaseException as error:
            self._fail(error, operation.label)
            return
        with self.lock:
            operation.done = True
            if operation.finished is not None:
                operation.finished()
            for follower in operation.followers:
                follower.waits_for -= 1
                if follower.waits_for == 0:
                    self._queue(follower)
            self.changed()

    def _fail(self, error: BaseException, at: str) -> None:
        with self.lock:
            if self.failure is None:
                self.failure, self.failed_at = error, at
            self._waiting.notify_all()
