"""When the actions of a step ran on this rank.

On the CPU an action runs when it is called. On CUDA it is queued: events tell when the device began and ended it, and
are read when the step is over.
"""

import time
from dataclasses import dataclass, field

import torch

from solver_plan.execution.comparison import Executed

Mark = float | torch.cuda.Event


@dataclass
class StepClock:
    """Times of the actions of one step after the other."""

    device: torch.device
    _began: Mark = 0.0
    _actions: list[tuple[object, Mark, Mark]] = field(default_factory=list)

    def begin(self) -> None:
        """Start a step."""
        self._actions.clear()
        self._began = self.mark()

    def mark(self) -> Mark:
        """Return the moment that this rank's device is at."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def record(self, action: object, start: Mark) -> None:
        """Say that an action which began at `start` has ended; it is told by its text."""
        self._actions.append((action, start, self.mark()))

    def end(self) -> tuple[Executed, ...]:
        """End the step and return its actions."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return tuple(
            Executed(str(action), self._seconds(start), self._seconds(stop)) for action, start, stop in self._actions
        )

    def _seconds(self, mark: Mark) -> float:
        """Return the seconds from the start of the step to a mark."""
        if isinstance(mark, torch.cuda.Event):
            assert isinstance(self._began, torch.cuda.Event)
            return float(self._began.elapsed_time(mark)) / 1e3
        assert isinstance(self._began, float)
        return mark - self._began
