"""Processes: started here by fork for `--local`, or by torchrun elsewhere; joined into one process group.

Forking from a parent that has imported torch gives eight ranks in half a second. Every process is bounded in time and
ended by its own id.
"""

import datetime
import multiprocessing
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from solver_plan.errors import NotExecutableError, RunFailedError, SolverPlanError

Result = TypeVar("Result")

LOOPBACK = "127.0.0.1"
_LONGEST_WAIT_S = 3600.0
"""The system's `poll` counts milliseconds in 32 bit."""


@dataclass(frozen=True)
class _Failure:
    """What ended a process early."""

    at_s: float
    """On the clock of the machine, to tell the first failure from those that follow from it."""
    error: SolverPlanError | None
    message: str
    traceback: str


def require_world_size(planned: int, found: int) -> None:
    """Raise `NotExecutableError` if there are not as many processes as the program has ranks."""
    if planned != found:
        raise NotExecutableError(
            f"world size: the plan has {planned} ranks, {found} processes were started; start {planned}"
        )


def torchrun_world_size() -> int | None:
    """Return how many processes torchrun started; None outside of it."""
    text = os.environ.get("WORLD_SIZE")
    return int(text) if text is not None and text.isdigit() else None


@contextmanager
def joined(backend: str, timeout_s: float) -> Iterator[None]:
    """Join the processes that torchrun started.

    After a restart by torchrun the store is prefixed by the attempt: peers would read addresses of the dead one else.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group(
        backend,
        store=PrefixStore(f"attempt{attempt}", store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_local(
    function: Callable[[int], Result], processes: int, *, timeout_s: float = 600.0, group_timeout_s: float = 120.0
) -> list[Result]:
    """Run a function of the rank in forked processes joined by gloo over the loopback, and return what each returned.

    Parameters
    ----------
    function
        Called with the rank once the processes have joined; its result must pickle.
    processes
        How many.
    timeout_s
        After which all are ended.
    group_timeout_s
        After which a collective gives up.

    Raises
    ------
    RunFailedError
        If a process fails or the time is over; the others are ended, by their ids.
    SolverPlanError
        What a process raised, if it was one of these.
    """
    context = multiprocessing.get_context("fork")
    port = _free_port()
    connections: list[Connection] = []
    workers = []
    sys.stdout.flush()
    sys.stderr.flush()
    for rank in range(processes):
        ours, theirs = context.Pipe(duplex=False)
        worker = context.Process(target=_work, args=(rank, processes, port, function, theirs, group_timeout_s))
        worker.start()
        theirs.close()
        connections.append(ours)
        workers.append(worker)
    try:
        answers = _collect(connections, time.monotonic() + timeout_s)
    finally:
        for worker in workers:
            worker.join(5.0 if worker.is_alive() and sys.exc_info()[0] is None else 0.0)
            if worker.is_alive():
                worker.kill()
            worker.join()
        for connection in connections:
            connection.close()
    return [pickle.loads(answer) for answer in answers]


def _collect(connections: list[Connection], end: float) -> list[bytes]:
    answers: dict[int, bytes] = {}
    waiting = {id(connection): rank for rank, connection in enumerate(connections)}
    while waiting:
        left_s = end - time.monotonic()
        if left_s <= 0:
            raise RunFailedError(f"ranks {sorted(waiting.values())} did not end in time; all were ended")
        failures: list[tuple[float, int, _Failure | None]] = []
        for connection in wait([connections[rank] for rank in waiting.values()], timeout=min(left_s, _LONGEST_WAIT_S)):
            rank = waiting.pop(id(connection))
            try:
                answer = connections[rank].recv()
            except EOFError:
                # killed from outside: what the others complain of follows from it
                failures.append((0.0, rank, None))
                continue
            if isinstance(answer, _Failure):
                failures.append((answer.at_s, rank, answer))
            else:
                answers[rank] = answer
        if failures:
            _, rank, failure = min(failures, key=lambda found: found[:2])
            raise _error_of(rank, failure)
    return [answers[rank] for rank in range(len(connections))]


def _error_of(rank: int, failure: _Failure | None) -> SolverPlanError:
    if failure is None:
        return RunFailedError(f"rank {rank} was killed or crashed; all were ended: look at memory, and run again")
    if failure.error is not None and not isinstance(failure.error, RunFailedError):
        return failure.error
    error = RunFailedError(f"rank {rank} failed: {failure.message}; all were ended, --verbose shows where")
    error.add_note(failure.traceback)
    return error


def _work(
    rank: int, processes: int, port: int, function: Callable[[int], object], answer: Connection, timeout_s: float
) -> None:
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{LOOPBACK}:{port}",
            rank=rank,
            world_size=processes,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        result = pickle.dumps(function(rank))
        # rank 0 keeps the store: none leaves before all have ended
        dist.barrier()
        answer.send(result)
        dist.destroy_process_group()
    except Exception as error:
        known = error if isinstance(error, SolverPlanError) else None
        message = str(error) if known is not None else f"{type(error).__name__}: {error}"
        answer.send(_Failure(time.monotonic(), known, message, traceback.format_exc()))
    finally:
        answer.close()
        sys.stdout.flush()
        sys.stderr.flush()
        # a forked child runs none of the parent's exit handlers
        os._exit(0)


def _end_with_parent(parent: int) -> None:
    """End this process when the one that started it is gone, however that ended."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
