"""Processes: started here by fork for `--local`, or by torchrun elsewhere; joined into one process group.

Forking from a parent that has imported torch gives eight ranks in half a second. Every process is bounded in time and
ended by its own id. Each has a watchdog: see there for how a run ends when a rank does.
"""

import datetime
import itertools
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from types import FrameType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from solver_plan.errors import NotExecutableError, RunFailedError, SolverPlanError
from solver_plan.execution.activity import ACTIVITY, Board
from solver_plan.execution.watchdog import Watchdog, read_verdict

Result = TypeVar("Result")

LOOPBACK = "127.0.0.1"
_RUNS = itertools.count()
_LOOK_S = 0.5
"""How often the parent looks for processes whose pipe a process of theirs keeps open."""


def require_world_size(planned: int, found: int) -> None:
    """Raise `NotExecutableError` if there are not as many processes as the program has ranks."""
    if planned != found:
        raise NotExecutableError(f"world size: the plan has {planned} ranks, found {found} processes; start {planned}")


def torchrun_world_size() -> int | None:
    """Return how many processes torchrun started; None outside of it."""
    text = os.environ.get("WORLD_SIZE")
    return int(text) if text is not None and text.isdigit() else None


def attempt_store(timeout_s: float = 300.0) -> Store:
    """Return a new connection to the store of the processes that torchrun started.

    After a restart by torchrun the store is prefixed by the attempt: peers would read addresses of the dead one else.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    return PrefixStore(f"attempt{attempt}", store)


@contextmanager
def told_once() -> Iterator[None]:
    """Let what all ranks of torchrun refuse alike be told by the first of them; the others end with the same code."""
    try:
        yield
    except SolverPlanError as error:
        if "RANK" in os.environ and not _is_first_to_refuse():
            raise SystemExit(error.exit_code) from None
        raise


def _is_first_to_refuse() -> bool:
    rank = os.environ["RANK"]
    if "MASTER_PORT" in os.environ:
        with suppress(RuntimeError):
            return attempt_store(10.0).compare_set("refusal", "", rank) == rank.encode()
    return rank == "0"


@contextmanager
def joined(backend: str, timeout_s: float, *, when_told_to_end: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Join the processes that torchrun started, and end with them.

    What a rank raises comes out of that rank; the others raise `SystemExit`: a traceback of theirs would tell nothing.

    Parameters
    ----------
    backend
        Of the process group.
    timeout_s
        After which a collective gives up.
    when_told_to_end
        Called behind SIGTERM or SIGINT.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def end() -> None:
        when_told_to_end()
        sys.stderr.flush()
        os._exit(1)

    # each run of a process has keys of its own
    prefix = f"run{next(_RUNS)}"
    watchdog = Watchdog(PrefixStore(prefix, attempt_store()), rank, world_size, timeout_s, end)
    watchdog.start()
    try:
        with watchdog.ending_on_signals():
            try:
                dist.init_process_group(
                    backend,
                    store=PrefixStore(f"{prefix}/group", attempt_store()),
                    rank=rank,
                    world_size=world_size,
                    timeout=datetime.timedelta(seconds=timeout_s),
                )
                yield
                dist.destroy_process_group()
            except Exception as error:
                told = _told_of(error, watchdog)
                if told is error:
                    raise
                raise told from error
    except SystemExit:
        when_told_to_end()
        raise
    finally:
        watchdog.leave()


def _told_of(error: Exception, watchdog: Watchdog) -> BaseException:
    """Return what a rank raises for what ended it: the cause if it has to tell it, else the end."""
    verdict = watchdog.verdict(error)
    if verdict is None or not watchdog.is_speaker:
        return SystemExit(error.exit_code if isinstance(error, SolverPlanError) else 1)
    if isinstance(error, SolverPlanError) and not isinstance(error, RunFailedError):
        return error
    # where the failure is this rank's own, the traceback comes with the error
    return RunFailedError(verdict.message) if verdict.rank == watchdog.rank else verdict.raised()


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
    connections: list[Connection] = []
    workers: list[ForkProcess] = []
    ledger = _Ledger(processes)
    sys.stdout.flush()
    sys.stderr.flush()
    with socket.socket() as listening, _ending_on_sigterm():
        listening.bind((LOOPBACK, 0))
        listening.listen(processes + 8)
        try:
            for rank in range(processes):
                ours, theirs = context.Pipe(duplex=False)
                worker = context.Process(
                    target=_work, args=(rank, processes, listening, ledger.board, function, theirs, group_timeout_s)
                )
                worker.start()
                theirs.close()
                connections.append(ours)
                workers.append(worker)
            ledger.open(listening)
            answers = _collect(workers, connections, ledger, time.monotonic() + timeout_s)
            for worker in workers:
                worker.join(5.0)
        finally:
            with _deaf():
                for worker in workers:
                    _end(worker)
                for connection in connections:
                    connection.close()
                ledger.close()
    return [pickle.loads(answer) for answer in answers]


def _end(worker: ForkProcess) -> None:
    """End a process and those that it has started, such as the workers of a data loader."""
    if worker.is_alive():
        assert worker.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.kill()
    worker.join()


class _Ledger:
    """The store and the board of the processes, kept in the one that started them: they outlive each of them.

    The store's server is a thread. It is opened behind the forks and closed before there can be others: in a child the
    thread does not exist, and the child would crash when it drops the store.
    """

    def __init__(self, processes: int) -> None:
        self.board = Board(processes)
        self._server: Store | None = None

    def open(self, listening: socket.socket) -> None:
        """Serve on a socket that listens."""
        port = listening.getsockname()[1]
        self._server = TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )

    def close(self) -> None:
        """End the server's thread."""
        self._server = None

    def failure(self, rank: int, how: str) -> SolverPlanError:
        """Return the error to raise for a rank that has ended without an answer."""
        assert self._server is not None
        verdict = read_verdict(self._server)
        if verdict is not None:
            return verdict.raised()
        return RunFailedError(
            f"rank {rank} was killed or crashed{how} at {self.board.read(rank) or 'its start'}; all were ended: "
            "look at memory, and run again"
        )


def _collect(workers: list[ForkProcess], connections: list[Connection], ledger: _Ledger, end: float) -> list[bytes]:
    answers: dict[int, bytes] = {}
    waiting = dict(enumerate(connections))
    while waiting:
        if time.monotonic() >= end:
            raise RunFailedError(f"ranks {sorted(waiting)} did not end in time; all were ended")
        ready = wait(list(waiting.values()), timeout=_LOOK_S)
        for rank, connection in list(waiting.items()):
            if connection not in ready and workers[rank].is_alive():
                continue
            try:
                if not connection.poll():
                    raise EOFError
                answers[rank] = connection.recv()
            except EOFError:
                raise ledger.failure(rank, _how_it_ended(workers[rank])) from None
            del waiting[rank]
    return [answers[rank] for rank in range(len(connections))]


def _how_it_ended(worker: ForkProcess) -> str:
    worker.join(1.0)
    code = worker.exitcode
    if code is None:
        return ""
    return f" (exit code {code})" if code >= 0 else f" ({signal.Signals(-code).name})"


def _work(
    rank: int,
    processes: int,
    listening: socket.socket,
    board: Board,
    function: Callable[[int], object],
    answer: Connection,
    timeout_s: float,
) -> None:
    # out of reach of the terminal's Ctrl-C: the parent ends all; and a group of its own, to be ended as one
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    port = listening.getsockname()[1]
    listening.close()
    ACTIVITY.restart()
    ACTIVITY.board, ACTIVITY.rank = board, rank
    watchdog = Watchdog(_store(port), rank, processes, timeout_s, lambda: os._exit(1))
    code = 1
    try:
        watchdog.start()
        dist.init_process_group(
            "gloo",
            store=PrefixStore("group", _store(port)),
            rank=rank,
            world_size=processes,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        result = pickle.dumps(function(rank))
        dist.barrier()
        watchdog.leave()
        answer.send(result)
        dist.destroy_process_group()
        code = 0
    except Exception as error:
        watchdog.verdict(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # a forked child runs none of the parent's exit handlers
        os._exit(code)


def _store(port: int) -> Store:
    return TCPStore(LOOPBACK, port, is_master=False)


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end this process as Ctrl-C does: what was begun is ended first."""

    def leave(number: int, frame: FrameType | None) -> None:
        del frame
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _deaf() -> Iterator[None]:
    """Take no signal while processes are ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent(parent: int) -> None:
    """End this process when the one that started it is gone, however that ended."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
