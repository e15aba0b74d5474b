"""Running a solver so that Ctrl-C and `Clock.interrupt` reach it.

While a solver runs in the main thread no Python signal handler runs, and a solver that catches the signal itself ends
alone, with the rest of the search none the wiser. So the solver works in a thread and the caller's thread waits.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

from solver_plan.solving.budget import Clock

T = TypeVar("T")
LOOK_EVERY_S = 0.05


def run_interruptibly(work: Callable[[], T], stop: Callable[[], None], clock: Clock) -> T:
    """Return what `work` returns, or raise what it raises; it runs in a thread of its own.

    Parameters
    ----------
    work
        Calls the solver.
    stop
        Asks the solver to end soon; safe from another thread, at any time, any number of times.
    clock
        When it is interrupted, `stop` is called, and `work` is still waited for.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=run, name="solver", daemon=True)
    thread.start()
    try:
        while not done.wait(LOOK_EVERY_S):
            if clock.interrupted:
                stop()
    finally:
        # left by a second Ctrl-C, too: the solver must not outlive its model
        while not done.wait(LOOK_EVERY_S):
            stop()
        thread.join()
    if errors:
        raise errors[0]
    return results[0]
