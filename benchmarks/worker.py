"""One case with one method, in a process of its own, so that peak memory and CPU seconds are its own.

`python -m benchmarks.worker GROUP CASE METHOD FOLDER` writes `outcome.json`, and `plan.json` where there is one.
"""

import json
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.case import Case, data_folder
from benchmarks.outcome import PLANNER, Ending, Outcome
from benchmarks.registry import case_named
from solver_plan.documents import digest_of, write_document, write_text
from solver_plan.errors import InfeasibleProblemError, NoPlanFoundError, SolverPlanError
from solver_plan.kinds import kind_of
from solver_plan.solving import Budget


def solve(case: Case, method: str, budget: Budget, folder: Path) -> Outcome:
    """Plan a case and measure it; the plan is checked again, and written to the folder."""
    outcome = Outcome(
        case=case.name,
        method=method,
        ending="planned",
        time_limit_s=budget.time_limit_s,
        workers=budget.worker_count,
        seed=budget.seed,
        deterministic=budget.deterministic,
    )
    problem = case.build(data_folder())
    kind = kind_of(problem)
    wall, cpu = time.monotonic(), time.process_time()
    try:
        found = kind.plan(problem, budget, heuristic=None if method == PLANNER else method)
    except SolverPlanError as error:
        endings: dict[type[SolverPlanError], Ending] = {
            InfeasibleProblemError: "infeasible",
            NoPlanFoundError: "no plan",
        }
        return replace(outcome, ending=endings.get(type(error), "failed"), reason=str(error))
    measured = replace(
        outcome,
        first_plan_s=found.effort.first_plan_s,
        wall_s=time.monotonic() - wall,
        cpu_s=time.process_time() - cpu,
        deterministic_s=found.effort.deterministic_s,
        peak_memory_bytes=_peak_memory_bytes(),
    )
    write_document(found.plan, folder / "plan.json")
    violations = kind.check(problem, found.plan)
    certificate = found.plan.certificate
    if violations or certificate is None or found.plan.problem_digest != digest_of(problem):
        return replace(measured, ending="invalid", reason="; ".join(violations) or "no certificate of this problem")
    return replace(
        measured,
        status=certificate.status,
        objective_ms=kind.objective(problem, found.plan),
        bound_ms=certificate.bound,
        bound_from=certificate.bound_from,
        gap=certificate.gap,
        stopped_by=certificate.stopped_by,
        incumbent=certificate.incumbent,
    )


def _peak_memory_bytes() -> int:
    try:
        # unlike getrusage's figure, not inherited from the process that started this one
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main(group: str, name: str, method: str, folder: str, limits: str) -> None:
    """Run one case; `limits` is the budget as JSON."""
    outcome = solve(case_named(group, name), method, Budget(**json.loads(limits)), Path(folder))
    write_text(json.dumps(outcome.as_dict()) + "\n", Path(folder) / "outcome.json")


if __name__ == "__main__":
    main(*sys.argv[1:])
