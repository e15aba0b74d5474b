"""`python -m benchmarks GROUP`: run the cases of a group and write a table, Markdown, JSON and CSV.

Or a measurement, with options of its own: execution, faults, reality.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.case import PROJECT, Case
from benchmarks.outcome import Outcome
from benchmarks.registry import GROUPS, MEASUREMENTS, cases_of, chosen, measure
from benchmarks.results import csv_text, json_text, markdown, terminal_table
from benchmarks.runner import run
from solver_plan.documents import write_text
from solver_plan.errors import OutputError, SolverPlanError
from solver_plan.solving import Budget


def main(arguments: Sequence[str] | None = None) -> int:
    """Run benchmarks; 0 unless a case failed."""
    given = sys.argv[1:] if arguments is None else arguments
    if given and given[0] in MEASUREMENTS:
        return measure(given[0], given[1:])
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("--smoke", action="store_true", help="only the tiny cases")
    parser.add_argument("--cases", default="", metavar="A,B", help="only these cases")
    parser.add_argument("--out", metavar="DIR", help="where results go (default results/GROUP)")
    parser.add_argument("--list", action="store_true", help="name the cases and end")
    parser.add_argument("--time-limit", type=float, metavar="S", help="instead of each case's own")
    parser.add_argument("--workers", type=int, metavar="N", help="instead of the machine's cores")
    parser.add_argument("--seed", type=int, metavar="K")
    parser.add_argument(
        "--deterministic", action="store_true", help="limits count solver time; the same plans every time"
    )
    options = parser.parse_args(given)
    try:
        if options.list:
            for case in cases_of(options.group):
                print(case.name)
            return 0
        names = [name for name in options.cases.split(",") if name]
        cases = [_limited(case, options) for case in chosen(options.group, smoke=options.smoke, names=names)]
        return _run(options.group, cases, Path(options.out) if options.out else PROJECT / "results" / options.group)
    except SolverPlanError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return error.exit_code


def _limited(case: Case, options: argparse.Namespace) -> Case:
    budget = case.budget
    return replace(
        case,
        budget=Budget(
            time_limit_s=budget.time_limit_s if options.time_limit is None else options.time_limit,
            gap_limit=budget.gap_limit,
            workers=budget.workers if options.workers is None else options.workers,
            deterministic=budget.deterministic or options.deterministic,
            seed=budget.seed if options.seed is None else options.seed,
        ),
    )


def _run(group: str, cases: Sequence[Case], out: Path) -> int:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{out}: cannot make the folder ({error.strerror}); choose another place") from None
    outcomes: list[Outcome] = []
    try:
        for outcome in run(group, cases, out / "plans"):
            outcomes.append(outcome)
            print(f"{outcome.case} {outcome.method}: {outcome.ending}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted: the results so far follow", file=sys.stderr)
    write_text(markdown(group, cases, outcomes), out / "results.md")
    write_text(json_text(group, cases, outcomes), out / "results.json")
    write_text(csv_text(outcomes), out / "results.csv")
    sys.stdout.write(terminal_table(cases, outcomes))
    return 1 if any(outcome.ending in ("failed", "invalid") for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
