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
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from solver_plan.errors import NotExecutableError, RunFailedError, SolverPlanError

Result = TypeVar("Result")

LOOPBACK = "127.0.0.1"


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
        ready = wait([connections[rank] for rank in waiting.values()], timeout=max(0.0, end - time.monotonic()))
        if not ready:
            raise RunFailedError(f"ranks {sorted(waiting.values())} did not end in time; all were ended")
        for connection in ready:
            rank = waiting.pop(id(connection))
            try:
                good, answer = connections[rank].recv()
            except EOFError:
                raise RunFailedError(f"rank {rank} ended early without a word; all were ended") from None
            if not good:
                _raise(rank, answer)
            answers[rank] = answer
    return [answers[rank] for rank in range(len(connections))]


def _raise(rank: int, answer: object) -> None:
    if isinstance(answer, SolverPlanError):
        raise answer
    raise RunFailedError(f"rank {rank} failed: {answer}")


def _work(
    rank: int, processes: int, port: int, function: Callable[[int], object], answer: Connection, timeout_s: float
) -> None:
    torch.set_num_threads(1)
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
        answer.send((True, result))
        dist.destroy_process_group()
    except SolverPlanError as error:
        answer.send((False, error))
    except Exception as error:
        answer.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    finally:
        answer.close()
        sys.stdout.flush()
        sys.stderr.flush()
        # a forked child runs none of the parent's exit handlers
        os._exit(0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
