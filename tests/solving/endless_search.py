"""A search that only Ctrl-C ends, as a program: `endless_search.py cp-sat|milp SIGNALS`.

It sends the signals to itself. It prints status, what stopped it, whether the plan is no worse than the first, and
whether Ctrl-C works as usual afterwards.
"""

import os
import signal
import sys
import threading
import time

from solver_plan.solving import Budget, Clock, Incumbent, solve_cp_sat, solve_milp
from tests.solving.programs import assignment, milp_assignment

ITEMS, MACHINES = 80, 7
SPREAD = [item % MACHINES for item in range(ITEMS)]


def main(solver: str, signals: int) -> None:
    """Search for ever."""
    before = signal.default_int_handler  # not what a job in the background inherits: to ignore it
    signal.signal(signal.SIGINT, before)
    clock = Clock(Budget(time_limit_s=3600.0))
    incumbent: Incumbent[int] = Incumbent(float, clock)
    model, milp = assignment(ITEMS, MACHINES), milp_assignment(ITEMS, MACHINES)
    incumbent.offer(model.load(SPREAD), "heuristic:spread")

    def press_ctrl_c() -> None:
        time.sleep(0.5)
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGINT)
            while not clock.interrupted:
                time.sleep(0.01)

    with clock.interruptible():
        threading.Thread(target=press_ctrl_c, daemon=True).start()
        if solver == "cp-sat":
            outcome = solve_cp_sat(
                model.model,
                clock,
                hint=model.hint(SPREAD),
                on_solution=lambda value: incumbent.offer(value(model.largest), "cp-sat") and None,
            )
            assert outcome.status in ("feasible", "unknown")
        else:
            found = solve_milp(milp.program, clock, start=milp.start(SPREAD))
            if found.objective is not None:
                incumbent.offer(round(found.objective), "milp")
        assert clock.expired
    certificate = incumbent.certificate(solver)
    no_worse = certificate.objective <= model.load(SPREAD)
    print(certificate.status, certificate.stopped_by, no_worse, signal.getsignal(signal.SIGINT) is before)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
