"""Results as a table for terminals, Markdown, JSON and CSV."""

import csv
import io
import json
from collections.abc import Sequence

from benchmarks.case import Case, Reference
from benchmarks.outcome import PLANNER, Outcome, versions
from solver_plan.report.tables import Cell, table

HEADERS = (
    "case",
    "method",
    "ending",
    "objective (s)",
    "bound (s)",
    "gap",
    "first plan (s)",
    "wall (s)",
    "CPU (s)",
    "solver (s)",
    "memory (MiB)",
    "beside (s)",
)


def rows(cases: Sequence[Case], outcomes: Sequence[Outcome]) -> list[list[Cell]]:
    """Return a row for each outcome; figures to compare with stand in the planner's."""
    return [_row(next(case for case in cases if case.name == outcome.case), outcome) for outcome in outcomes]


def terminal_table(cases: Sequence[Case], outcomes: Sequence[Outcome]) -> str:
    """Return the results as plain text, the reasons of missing plans below."""
    reasons = [f"{outcome.case} {outcome.method}: {outcome.reason}" for outcome in outcomes if outcome.reason]
    return "\n".join([table(HEADERS, rows(cases, outcomes)), *reasons]) + "\n"


def markdown(group: str, cases: Sequence[Case], outcomes: Sequence[Outcome]) -> str:
    """Return the results as a Markdown page with the versions they depend on."""
    lines = [f"# Benchmark: {group}", "", "| " + " | ".join(HEADERS) + " |", "|" + "---|" * len(HEADERS)]
    for row in rows(cases, outcomes):
        lines.append("| " + " | ".join("–" if cell is None else str(cell).replace("|", "/") for cell in row) + " |")
    lines += ["", *(f"* {item.case}, {item.method}: {item.reason}" for item in outcomes if item.reason)]
    lines += ["", "Versions: " + ", ".join(f"{name} {version}" for name, version in versions().items()) + ".", ""]
    return "\n".join(lines)


def json_text(group: str, cases: Sequence[Case], outcomes: Sequence[Outcome]) -> str:
    """Return the results with everything that was measured."""
    references = {
        case.name: {reference.source: reference.objective_ms for reference in case.references} for case in cases
    }
    facts = {
        "group": group,
        "versions": versions(),
        "references_ms": references,
        "outcomes": [outcome.as_dict() for outcome in outcomes],
    }
    return json.dumps(facts, indent=1) + "\n"


def csv_text(outcomes: Sequence[Outcome]) -> str:
    """Return the results as CSV, one line for each outcome."""
    out = io.StringIO()
    names = list(Outcome(case="", method="", ending="failed").as_dict())
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(outcome.as_dict() for outcome in outcomes)
    return out.getvalue()


def _row(case: Case, outcome: Outcome) -> list[Cell]:
    references = case.references if outcome.method == PLANNER else ()
    ending = outcome.status if outcome.ending == "planned" else outcome.ending
    return [
        outcome.case,
        outcome.method,
        ending,
        _fixed(outcome.objective_ms, 1e-3, 4),
        _fixed(outcome.bound_ms, 1e-3, 4),
        None if outcome.gap is None else f"{outcome.gap:.3%}",
        _fixed(outcome.first_plan_s, 1, 2),
        _fixed(outcome.wall_s, 1, 2),
        _fixed(outcome.cpu_s, 1, 2),
        _fixed(outcome.deterministic_s, 1, 2),
        _fixed(outcome.peak_memory_bytes, 2**-20, 0),
        ", ".join(_beside(reference, outcome.objective_ms) for reference in references),
    ]


def _beside(reference: Reference, objective_ms: float | None) -> str:
    difference = "" if objective_ms is None else f" ({objective_ms / reference.objective_ms - 1:+.2%})"
    return f"{reference.source} {reference.objective_ms / 1000:.3f}{difference}"


def _fixed(value: float | None, scale: float, digits: int) -> str | None:
    return None if value is None else f"{value * scale:.{digits}f}"
