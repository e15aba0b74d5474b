"""What this process is doing, as text for people: executors tell it, the watchdog's thread reads it. No torch."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


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

    def begins(self, what: str, *, step: int | None = None) -> None:
        """Say what begins; the step stays as it was where none is given."""
        if step is not None:
            self.step = step
        self.what = what
        self.since_s = time.monotonic()

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
