"""Runs cases one after the other, each method of each in a child process."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.case import PROJECT, Case, data_folder
from benchmarks.outcome import PLANNER, Outcome
from solver_plan.solving import Budget


def run(group: str, cases: Sequence[Case], plans: Path | None) -> Iterator[Outcome]:
    """Yield the outcome of each baseline and of the planner for each case.

    Parameters
    ----------
    group, cases
        What to run.
    plans
        Folder where the plans are kept, as ``CASE.METHOD.json``; None: nowhere.
    """
    for case in cases:
        for method in (*case.baselines, PLANNER):
            missing = case.data is not None and not (data_folder() / case.data).exists()
            if missing:
                reason = f"needs {case.data} of the reference data; set SOLVER_PLAN_DATA"
                yield Outcome(case=case.name, method=method, ending="skipped", reason=reason)
            else:
                yield _run_child(group, case, method, case.budget, plans)


def _run_child(group: str, case: Case, method: str, budget: Budget, plans: Path | None) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        limits = json.dumps(asdict(budget))
        command = [sys.executable, "-m", "benchmarks.worker", group, case.name, method, folder, limits]
        path = os.pathsep.join([str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])])
        child = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            check=False,
        )
        result = Path(folder) / "outcome.json"
        if child.returncode != 0 or not result.exists():
            lines = child.stderr.decode(errors="replace").strip().splitlines()
            reason = f"exit code {child.returncode}: {lines[-1] if lines else 'no message'}"
            return Outcome(case=case.name, method=method, ending="failed", reason=reason)
        if plans is not None and (Path(folder) / "plan.json").exists():
            plans.mkdir(parents=True, exist_ok=True)
            (plans / f"{case.name}.{method}.json").write_bytes((Path(folder) / "plan.json").read_bytes())
        return replace(Outcome(case="", method="", ending="failed"), **json.loads(result.read_text()))
