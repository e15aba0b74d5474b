"""Progress of a search: who is told, and the line on a terminal."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

from solver_plan.documents.certificate import Incumbency

Progress = Callable[[Incumbency], None]
"""Called with each better plan or bound, by the thread that found it; an exception ends the search."""


def silent(step: Incumbency) -> None:
    """Tell nobody."""


def terminal_progress(stream: TextIO | None = None, unit: str = "ms") -> Progress:
    """Return a listener that writes a line a step to a terminal, at most ten a second, and nothing into a pipe."""
    out = stream if stream is not None else sys.stderr
    if not out.isatty():
        return silent
    last = 0.0

    def show(step: Incumbency) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < 0.1:
            return
        last = now
        objective = "no plan yet" if step.objective is None else f"plan {step.objective:.2f} {unit}"
        bound = "no bound yet" if step.bound is None else f"bound {step.bound:.2f} {unit}"
        gap = ""
        if step.bound is not None and step.objective is not None and step.objective > 0:
            gap = f"  gap {max(0.0, 1 - step.bound / step.objective):.2%}"
        print(f"{step.seconds:7.1f} s  {objective}  {bound}{gap}  {step.source}", file=out, flush=True)

    return show
