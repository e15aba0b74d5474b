"""What a run was predicted to cost, beside what was measured; and one trace file of all ranks. No torch."""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from solver_plan.documents import write_text
from solver_plan.execution.actions import COMPUTATIONS, parse_action
from solver_plan.execution.orders import Durations, Timed, play
from solver_plan.execution.program import Program


@dataclass(frozen=True)
class Executed:
    """An action as a rank ran it, in seconds since its step began there."""

    action: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Step:
    """One step as a rank saw it."""

    loss: float
    """Mean loss of the samples of the global batch, the same on every rank."""
    began_s: float
    """Seconds since the epoch."""
    seconds: float
    actions: tuple[Executed, ...]
    losses: Mapping[str, float] | None = None
    """Of each task that took part; None: there are no tasks."""


@dataclass(frozen=True)
class RankReport:
    """What one rank measured."""

    rank: int
    steps: tuple[Step, ...]
    state_bytes: int
    """Weights, gradients and optimizer state."""
    activation_bytes: int
    """Kept for the backward; 0 where the allocator tells the sum only."""
    peak_bytes: int


@dataclass(frozen=True)
class StageComparison:
    """A stage's predicted and measured costs."""

    stage: int
    predicted_ms: float | None
    """Forward and backward of one micro-batch, as the plan says, communication within the stage included."""
    measured_ms: float
    """The same: on the slowest rank, the middle one of the steps behind the first."""
    predicted_bytes: int | None
    measured_bytes: int
    """On the fullest rank; of all stages of the rank where it runs several."""


def compare(program: Program, reports: Sequence[RankReport]) -> tuple[StageComparison, ...]:
    """Return predicted beside measured for each stage.

    Parameters
    ----------
    program
        What was run.
    reports
        Of all ranks, in any order.
    """
    by_rank = {report.rank: report for report in reports}
    found: list[StageComparison] = []
    for stage, described in enumerate(program.stages):
        ranks = [by_rank[rank] for rank in described.devices if rank in by_rank]
        found.append(
            StageComparison(
                stage=stage,
                predicted_ms=None if program.predicted_stage_ms is None else program.predicted_stage_ms[stage],
                measured_ms=max(_stage_ms(program, report, stage) for report in ranks),
                predicted_bytes=_predicted_bytes(program, described.team),
                measured_bytes=max(report.peak_bytes for report in ranks),
            )
        )
    return tuple(found)


def _predicted_bytes(program: Program, team: int) -> int | None:
    if program.predicted_memory_bytes is None:
        return None
    return sum(program.predicted_memory_bytes[stage] for stage in program.teams[team].stages)


def _stage_ms(program: Program, report: RankReport, stage: int) -> float:
    steps = report.steps[1:] or report.steps
    sums = []
    for step in steps:
        computed = [x for x in step.actions if (a := parse_action(x.action)).stage == stage and a.kind in COMPUTATIONS]
        sums.append(sum(x.end_s - x.start_s for x in computed) * 1e3 / program.micro_batches)
    return statistics.median(sums)


def comparison_table(comparisons: Sequence[StageComparison]) -> str:
    """Return the comparison as a table for a terminal."""
    lines = ["stage   predicted ms   measured ms   predicted MB   measured MB"]
    for row in comparisons:
        predicted_ms = "-" if row.predicted_ms is None else f"{row.predicted_ms:.3f}"
        predicted_mb = "-" if row.predicted_bytes is None else f"{row.predicted_bytes / 2**20:.2f}"
        lines.append(
            f"{row.stage:5d}   {predicted_ms:>12}   {row.measured_ms:11.3f}   {predicted_mb:>12}   "
            f"{row.measured_bytes / 2**20:11.2f}"
        )
    return "\n".join(lines)


def planned_timeline(program: Program) -> tuple[tuple[Timed, ...], ...]:
    """Return the computations of each team in planned time, from the profiled durations."""
    orders = [[action for action in actions if action.kind in COMPUTATIONS] for actions in program.team_actions]
    return play(orders, [Durations(stage.forward_ms, stage.backward_ms) for stage in program.stages]).timeline


@dataclass(frozen=True)
class Lane:
    """What a rank was planned to do in each step, for a trace."""

    title: str
    planned: tuple[tuple[str, float, float], ...]
    """(action, start, end) in ms since the step began."""


def write_trace(path: str | Path, program: Program, reports: Sequence[RankReport]) -> None:
    """Write one Chrome trace of all ranks: each rank is a process with a planned and an executed lane.

    Raises
    ------
    OutputError
        If the file cannot be written.
    """
    planned = planned_timeline(program)
    lanes: dict[int, Lane] = {}
    for rank in range(program.world_size):
        team = program.team_of_rank.get(rank)
        stages = "idle" if team is None else f"stages {', '.join(map(str, program.teams[team].stages))}"
        spans = () if team is None else planned[team]
        lanes[rank] = Lane(stages, tuple((str(timed.action), timed.start_ms, timed.end_ms) for timed in spans))
    write_lanes(path, lanes, reports)


def write_lanes(path: str | Path, lanes: Mapping[int, Lane], reports: Sequence[RankReport]) -> None:
    """Write one Chrome trace of what each rank was planned to do and did. Raises `OutputError`."""
    write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": list(_events(lanes, reports))}), path)


def _events(lanes: Mapping[int, Lane], reports: Sequence[RankReport]) -> Iterator[dict[str, object]]:
    origin = min((step.began_s for report in reports for step in report.steps), default=0.0)
    for report in reports:
        lane = lanes[report.rank]
        yield _name("process_name", report.rank, 0, f"rank {report.rank}: {lane.title}")
        for number, name in enumerate(("planned", "executed")):
            yield _name("thread_name", report.rank, number, name)
        for step in report.steps:
            start_us = (step.began_s - origin) * 1e6
            for action, start_ms, end_ms in lane.planned:
                yield _span(report.rank, 0, action, start_us + start_ms * 1e3, (end_ms - start_ms) * 1e3)
            for ran in step.actions:
                length_us = (ran.end_s - ran.start_s) * 1e6
                yield _span(report.rank, 1, ran.action, start_us + ran.start_s * 1e6, length_us)


def _name(kind: str, rank: int, lane: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": lane, "args": {"name": name}}


def _span(rank: int, lane: int, name: str, start_us: float, length_us: float) -> dict[str, object]:
    return {"ph": "X", "name": name, "pid": rank, "tid": lane, "ts": start_us, "dur": length_us}
