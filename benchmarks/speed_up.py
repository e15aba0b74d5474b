"""Planned speed-up over one task after another, from the results of `python -m benchmarks wavefront`.

`python -m benchmarks.speed_up RESULTS.json` prints a line for each model family and number of devices: what Spindle's
authors measured over DeepSpeed, what our Spindle heuristic is planned to gain, and what the planner gains.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.outcome import PLANNER
from benchmarks.wavefront import FROZEN, PUBLISHED_SPEED_UP, TWO_PHASES
from solver_plan.report.tables import Cell, table

HEADERS = ("model", "devices", "phases", "Spindle, published", "Spindle, planned", "solver_plan", "gap", "over Spindle")


def speed_ups(outcomes: list[dict[str, object]]) -> list[list[Cell]]:
    """Return the rows of the table; without a speed-up where one task after another breaks the memory."""
    objective: dict[tuple[str, str], float] = {}
    gap: dict[str, float] = {}
    for outcome in outcomes:
        name, method, found = str(outcome["case"]), str(outcome["method"]), outcome.get("objective_ms")
        if isinstance(found, float):
            objective[name, method] = found
        if method == PLANNER and isinstance(outcome.get("gap"), float):
            gap[name] = float(str(outcome["gap"]))
    rows: list[list[Cell]] = []
    for phases in ("", TWO_PHASES):
        for model, devices in (*PUBLISHED_SPEED_UP, *(FROZEN if phases else ())):
            name = f"{model}-{devices}{phases}"
            planned = objective.get((name, PLANNER))
            if planned is None:
                continue
            published = PUBLISHED_SPEED_UP.get((model, devices))
            rows.append(
                [
                    model,
                    devices,
                    "two, 80 GB" if phases else "fused",
                    None if published is None else f"{published:.2f}",
                    _ratio(objective, name, "sequential", "spindle"),
                    _ratio(objective, name, "sequential", PLANNER),
                    f"{gap[name]:.1%}" if name in gap else None,
                    _ratio(objective, name, "spindle", PLANNER),
                ]
            )
    return rows


def _ratio(objective: Mapping[tuple[str, str], float], name: str, slow: str, fast: str) -> str | None:
    if (name, slow) not in objective or (name, fast) not in objective:
        return None
    return f"{objective[name, slow] / objective[name, fast]:.2f}"


def main(results: str) -> None:
    """Print the table."""
    outcomes = json.loads(Path(results).read_text(encoding="utf-8"))["outcomes"]
    print(table(HEADERS, speed_ups(outcomes)))


if __name__ == "__main__":
    main(*sys.argv[1:])
