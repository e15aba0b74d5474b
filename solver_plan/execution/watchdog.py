"""Finds out which rank ended a run, and ends it on all of them.

Every rank has a thread that writes, a few times a second, what its main thread is doing to the store that the ranks
share (its beat). When a rank fails by itself it says so there. When a rank loses its peers, or has waited until the
timeout, it looks for the cause: a rank whose beats have stopped is dead or stopped; one that computes while others wait
is stalled. The first verdict in the store holds for all, and the thread of each rank ends it where its main thread
hangs. Who gave the verdict tells it, so that it is told once.
"""

import base64
import logging
import os
import pickle
import re
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from solver_plan.errors import RunFailedError, SolverPlanError
from solver_plan.execution.activity import ACTIVITY

_logger = logging.getLogger(__name__)

BEAT_S = 0.25
PATIENCE_S = 3.0
"""How long a beat may be late, and how long a main thread may take to end by itself."""
BEHIND_TIMEOUT_S = 1.5
"""How much later than a collective's timeout a rank that does nothing is taken for stalled."""
_VERDICT = "verdict"
_LOST = re.compile(r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe|[Ss]ocket|TCPStore|store->get")
_TIMED_OUT = re.compile(r"[Tt]imed out|[Tt]imeout")


@dataclass(frozen=True)
class Verdict:
    """What ended a run."""

    rank: int | None
    """Whose fault it was; None: nobody's alone."""
    message: str
    traceback: str = ""
    error: SolverPlanError | None = None
    """What the rank raised, if it was one of ours."""
    judge: int = 0
    """The rank that says so."""

    def raised(self) -> SolverPlanError:
        """Return the error to raise for it."""
        if self.error is not None and not isinstance(self.error, RunFailedError):
            return self.error
        error = RunFailedError(self.message)
        if self.traceback:
            error.add_note(self.traceback)
        return error


@dataclass(frozen=True)
class Beat:
    """What a rank last said of itself."""

    number: int
    state: str
    """``computes``, ``backward`` (may do either) or ``waits``."""
    lasts_s: float
    """How long it has been doing what it does."""
    activity: str


def read_beat(store: Store, rank: int) -> Beat | None:
    """Return what a rank last said of itself; None: nothing yet."""
    key = f"beat/{rank}"
    if not store.check([key]):
        return None
    number, state, lasts_s, activity = store.get(key).decode().split(" ", 3)
    return Beat(int(number), state, float(lasts_s), activity)


def own_failure(rank: int, error: BaseException) -> Verdict:
    """Return the verdict of a rank that failed by itself."""
    known = error if isinstance(error, SolverPlanError) else None
    said = str(error) if known is not None else f"{type(error).__name__}: {error}"
    where = said if isinstance(error, RunFailedError) else f"{ACTIVITY}: {said}"
    message = f"rank {rank} failed at {where}; all were ended, --verbose shows where"
    return Verdict(rank, message, "".join(traceback.format_exception(error)), known)


def is_of_peers(error: BaseException) -> bool:
    """Whether an error says that communication failed: the cause may lie with another rank."""
    return any(
        isinstance(each, dist.DistError) or (isinstance(each, RuntimeError) and bool(_LOST.search(str(each))))
        for each in _chain(error)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    at: BaseException | None = error
    while at is not None:
        yield at
        at = at.__cause__


class Watchdog:
    """Watches the ranks of a run from one of them.

    Parameters
    ----------
    store
        That the ranks share; used by this object alone.
    rank, world_size
        Of this rank.
    timeout_s
        Of collectives.
    end
        Ends the process, called from the watchdog's thread where the main thread hangs.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout_s: float, end: Callable[[], None]) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.end = end
        # the store takes some 10000 requests a second
        self.beat_s = max(BEAT_S, world_size / 2048)
        self.patience_s = max(PATIENCE_S, 4 * self.beat_s)
        self.is_speaker = False
        """Whether the verdict was given here: then it is told here."""
        self._main = threading.get_ident()
        self._beats = 0
        self._judging = threading.Lock()
        self._verdict: Verdict | None = None
        self._failed = threading.Event()
        self._left = threading.Event()
        self._signals, self._wakeup = os.pipe()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")

    def start(self) -> None:
        """Begin to watch; `leave` ends it."""
        self._beat()
        self._thread.start()

    def leave(self) -> None:
        """Say that this rank ends on purpose: nobody looks for it."""
        self._left.set()
        self._thread.join(PATIENCE_S)
        if not self._thread.is_alive():
            os.close(self._signals)
            os.close(self._wakeup)
        try:
            self.store.set(f"left/{self.rank}", "1")
        except RuntimeError:
            _logger.debug("the store is gone already")

    @contextmanager
    def ending_on_signals(self) -> Iterator[None]:
        """Let SIGTERM and SIGINT end the process, even where the main thread hangs in a collective.

        Where something else than the main thread trains, signals are left to the main thread.
        """

        def leave(number: int, frame: FrameType | None) -> None:
            del frame
            # what has failed ends by itself: it looks for the cause, and must tell it
            if not self._failed.is_set():
                raise SystemExit(128 + number)

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        os.set_blocking(self._wakeup, False)
        descriptor = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(descriptor)

    def verdict(self, error: BaseException | None) -> Verdict | None:
        """Return what ended the run, the same on all ranks.

        Parameters
        ----------
        error
            What this rank's main thread raised; None: it waits for longer than the timeout.

        Returns
        -------
        Verdict or None
            None: the peers left on purpose, as after a signal.
        """
        if error is not None:
            # the main thread is here: it ends by itself
            self._failed.set()
        with self._judging:
            if self._verdict is None:
                self._verdict = self._judge(error)
            return self._verdict

    def _judge(self, error: BaseException | None) -> Verdict | None:
        known = read_verdict(self.store)
        if known is not None:
            return known
        is_own = error is not None and not is_of_peers(error)
        found = own_failure(self.rank, error) if is_own and error is not None else self._search(error)
        if found is None:
            return None
        said = _loaded(self.store.compare_set(_VERDICT, "", _dumped(replace(found, judge=self.rank))))
        self.is_speaker = said.judge == self.rank
        return said

    def _search(self, error: BaseException | None) -> Verdict | None:
        """Look for the rank that others wait for, or that is gone."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        before = {rank: read_beat(self.store, rank) for rank in others}
        silent, left = set(others), set[int]()
        end = time.monotonic() + self.patience_s
        while silent and time.monotonic() < end:
            time.sleep(self.beat_s / 2)
            self._beat()
            known = read_verdict(self.store)
            if known is not None:
                return known
            left |= {rank for rank in silent if self.store.check([f"left/{rank}"])}
            beats = {rank: read_beat(self.store, rank) for rank in silent - left}
            silent = {rank for rank, beat in beats.items() if beat is None or beat == before[rank]}
        if silent:
            return self._gone(sorted(silent))
        if left:
            return None
        if error is None or any(_TIMED_OUT.search(str(each)) for each in _chain(error)):
            return self._stalled({rank: read_beat(self.store, rank) for rank in others})
        said = str(error).splitlines()[0]
        return Verdict(self.rank, f"rank {self.rank} lost a connection at {ACTIVITY}: {said}; all were ended")

    def _gone(self, ranks: Sequence[int]) -> Verdict:
        beat = read_beat(self.store, ranks[0])
        seen = "never heard of" if beat is None else f"last seen at {beat.activity}"
        more = f" (nor do {len(ranks) - 1} others)" if len(ranks) > 1 else ""
        message = f"rank {ranks[0]} does not answer{more}: it died, is stopped or cannot be reached; {seen}"
        return Verdict(ranks[0], f"{message}; all were ended")

    def _stalled(self, beats: Mapping[int, Beat | None]) -> Verdict:
        known = {rank: beat for rank, beat in beats.items() if beat is not None}
        # while this thread asks, the main thread waits; or its collective has given up
        state = "waits" if threading.get_ident() == self._main else self._state()
        everybody = {**known, self.rank: Beat(0, state, ACTIVITY.lasts_s, str(ACTIVITY))}
        long_s = self.timeout_s / 2
        limit = f"timeout {self.timeout_s:.0f} s; all were ended"
        for state in ("computes", "backward"):
            found = [(b.lasts_s, rank) for rank, b in everybody.items() if b.state == state and b.lasts_s > long_s]
            if found:
                lasts_s, rank = max(found)
                return Verdict(rank, f"rank {rank} stalled: for {lasts_s:.0f} s at {everybody[rank].activity}, {limit}")
        if any(beat.lasts_s <= long_s for beat in known.values()):
            return Verdict(
                None, f"rank {self.rank} waited at {ACTIVITY} for others that work; raise the timeout: {limit}"
            )
        some = "; ".join(f"rank {rank} at {beat.activity}" for rank, beat in sorted(everybody.items())[:4])
        return Verdict(None, f"the ranks wait for each other ({some}), {limit}")

    # The thread.

    def _watch(self) -> None:
        ends_at = float("inf")
        while not self._left.is_set():
            ready, _, _ = select.select([self._signals], [], [], self.beat_s)
            now = time.monotonic()
            if ready:
                os.read(self._signals, 64)
                ends_at = min(ends_at, now + PATIENCE_S)
            try:
                self._beat()
                if read_verdict(self.store) is not None:
                    ends_at = min(ends_at, now + PATIENCE_S / 2)
                if ACTIVITY.step is not None and ACTIVITY.lasts_s > self.timeout_s + BEHIND_TIMEOUT_S:
                    self._tell(self.verdict(None))
                    ends_at = now
            except RuntimeError:
                # who kept the store is gone, and with it the run
                ends_at = min(ends_at, now + PATIENCE_S)
                time.sleep(self.beat_s)
            if now >= ends_at and not self._failed.is_set():
                self.end()

    def _tell(self, verdict: Verdict | None) -> None:
        """Tell what no main thread can."""
        if self.is_speaker and verdict is not None:
            _logger.error("%s", verdict.message)

    def _beat(self) -> None:
        self._beats += 1
        said = f"{self._beats} {self._state()} {ACTIVITY.lasts_s:.3f} {ACTIVITY}"
        self.store.set(f"beat/{self.rank}", said)

    def _state(self) -> str:
        frames = sys._current_frames()  # noqa: SLF001 (documented, for this purpose)
        return state_of(frames.get(self._main))


_TORCH = os.path.dirname(torch.__file__)
_HERE = os.path.dirname(__file__)
_GLUE = tuple(f"{_TORCH}/{part}" for part in ("_ops.py", "utils/_contextlib.py", "_tensor.py", "overrides.py"))
_WRITING = (f"{_TORCH}/distributed/checkpoint/", f"{_HERE}/checkpoint_folder.py")
_WAITING = (f"{_TORCH}/distributed/", f"{_TORCH}/cuda/", f"{_HERE}/")


def state_of(frame: FrameType | None) -> str:
    """Return what a thread does, by the code it is in: ``waits`` for peers, ``computes``, or ``backward``.

    In a backward the innermost Python code is autograd's, whatever the engine does.
    """
    while frame is not None and frame.f_code.co_filename in _GLUE:
        frame = frame.f_back
    if frame is None:
        return "computes"
    file = frame.f_code.co_filename
    if file.startswith(_WRITING):
        return "computes"
    if file.startswith(f"{_TORCH}/autograd/"):
        return "backward"
    return "waits" if file.startswith(_WAITING) else "computes"


def read_verdict(store: Store) -> Verdict | None:
    """Return what ended the run; None: nothing so far."""
    return _loaded(store.get(_VERDICT)) if store.check([_VERDICT]) else None


def _dumped(verdict: Verdict) -> str:
    try:
        data = pickle.dumps(verdict)
    except Exception:
        # an error of the user's may hold what does not pickle
        data = pickle.dumps(replace(verdict, error=None))
    return base64.b64encode(data).decode()


def _loaded(text: bytes) -> Verdict:
    found = pickle.loads(base64.b64decode(text))
    assert isinstance(found, Verdict)
    return found
