"""What this process is doing, as text for people: executors tell it, the watchdog's thread reads it. No torch."""

import mmap
import time
from collections.abc import Iterator
from contextlib import contextmanager

_ROOM_BYTES = 128


class Board:
    """Memory that a process shares with those that it forks: what each was doing can be read when it is dead."""

    def __init__(self, processes: int) -> None:
        self._memory = mmap.mmap(-1, _ROOM_BYTES * processes)

    def write(self, rank: int, text: str) -> None:
        """Write the text of a rank, cut where it is long."""
        data = text.encode()[: _ROOM_BYTES - 1]
        self._memory[rank * _ROOM_BYTES : rank * _ROOM_BYTES + len(data) + 1] = data + b"\0"

    def read(self, rank: int) -> str:
        """Return the text of a rank; empty: none so far."""
        return self._memory[rank * _ROOM_BYTES : (rank + 1) * _ROOM_BYTES].split(b"\0")[0].decode(errors="replace")


class Activity:
    """What the main thread is doing."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget what was before: a forked process starts anew."""
        self.step: int | None = None
        """Number of the step, from 1; None: outside of training."""
        self.what = "starting"
        self.since_s = time.monotonic()
        """When that began."""
        self.board: Board | None = None
        """Where it is written for the process that started this one."""
        self.rank = 0

    def begins(self, what: str, *, step: int | None = None) -> None:
        """Say what begins; the step stays as it was where none is given."""
        if step is not None:
            self.step = step
        self.what = what
        self.since_s = time.monotonic()
        if self.board is not None:
            self.board.write(self.rank, str(self))

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Say what is being done; behind it something else may have to be waited for. A failure stays where it was."""
        self.begins(what)
        yield
        self.begins(f"behind {what}")

    def __str__(self) -> str:
        return self.what if self.step is None else f"step {self.step}, {self.what}"

    @property
    def lasts_s(self) -> float:
        """For how long it has been going on."""
        return time.monotonic() - self.since_s


ACTIVITY = Activity()
"""Of this process: it has one main thread."""
