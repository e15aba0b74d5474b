"""What a wavefront run was predicted to cost, beside what was measured, slice by slice. No torch."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from solver_plan.execution.comparison import Lane, RankReport, write_lanes
from solver_plan.execution.program import ranges
from solver_plan.execution.waves.actions import WaveAction, WaveActionKind
from solver_plan.execution.waves.order import play_in_time
from solver_plan.execution.waves.program import WaveProgram


@dataclass(frozen=True)
class SliceComparison:
    """A slice's predicted and measured costs."""

    slice: int
    name: str
    """Component and layers."""
    devices: tuple[int, ...]
    predicted_ms: float
    """Forward and backward, as the problem says."""
    measured_ms: float | None
    """The same: on the slowest rank, the middle one of the steps behind the first; None: its task was always absent."""
    predicted_bytes: int | None
    """Of the fullest of its devices, all that it holds."""
    measured_bytes: int
    """The same."""


def compare_slices(program: WaveProgram, reports: Sequence[RankReport]) -> tuple[SliceComparison, ...]:
    """Return predicted beside measured for each slice.

    Parameters
    ----------
    program
        What was run.
    reports
        Of all ranks, in any order.
    """
    by_rank = {report.rank: report for report in reports}
    found: list[SliceComparison] = []
    for index, piece in enumerate(program.slices):
        component = program.components[piece.component]
        measured = [ms for rank in piece.devices if (ms := _slice_ms(by_rank[rank], index)) is not None]
        held = program.predicted_memory_bytes
        found.append(
            SliceComparison(
                slice=index,
                name=f"{component.name} {piece.layers[0]}-{piece.layers[1] - 1}",
                devices=piece.devices,
                predicted_ms=piece.forward_ms + piece.backward_ms,
                measured_ms=max(measured, default=None),
                predicted_bytes=None if held is None else max(held[device] for device in piece.devices),
                measured_bytes=max(by_rank[rank].peak_bytes for rank in piece.devices),
            )
        )
    return tuple(found)


def _slice_ms(report: RankReport, index: int) -> float | None:
    names = {str(WaveAction(kind, index)) for kind in (WaveActionKind.FORWARD, WaveActionKind.BACKWARD)}
    of_steps = [[ran for ran in step.actions if ran.action in names] for step in report.steps]
    there = [actions for actions in of_steps if actions]
    if not there:
        return None
    return statistics.median(sum(ran.end_s - ran.start_s for ran in actions) * 1e3 for actions in there[1:] or there)


def slice_table(program: WaveProgram, reports: Sequence[RankReport]) -> str:
    """Return the comparison as a table for a terminal, with the whole iteration in the last line."""
    rows = compare_slices(program, reports)
    width = max(len("component, layers"), *(len(row.name) for row in rows))
    spread = max(len("devices"), *(len(ranges(row.devices)) for row in rows))
    numbers = "   predicted ms   measured ms   predicted MB   measured MB"
    lines = [f"slice   {'component, layers':{width}}   {'devices':{spread}}{numbers}"]
    for row in rows:
        measured_ms = "-" if row.measured_ms is None else f"{row.measured_ms:.3f}"
        predicted_mb = "-" if row.predicted_bytes is None else f"{row.predicted_bytes / 2**20:.2f}"
        lines.append(
            f"{row.slice:5d}   {row.name:{width}}   {ranges(row.devices):{spread}}   {row.predicted_ms:12.3f}   "
            f"{measured_ms:>11}   {predicted_mb:>12}   {row.measured_bytes / 2**20:11.2f}"
        )
    makespan = "-" if program.predicted_makespan_ms is None else f"{program.predicted_makespan_ms:.3f}"
    steps = reports[0].steps[1:] or reports[0].steps
    measured = statistics.median(step.seconds for step in steps) * 1e3
    lines.append(f"{'iteration':{width + spread + 11}}   {makespan:>12}   {measured:11.3f}")
    return "\n".join(lines)


def write_wave_trace(path: str | Path, program: WaveProgram, reports: Sequence[RankReport]) -> None:
    """Write one Chrome trace of all ranks: each rank is a process with a planned and an executed lane.

    Planned is the executed order, each action as long as the problem says. Raises `OutputError`.
    """
    timed = play_in_time(program)
    lanes: dict[int, Lane] = {}
    for rank in range(program.world_size):
        mine = [work for work in timed if rank in program.slices[work.action.number].devices]
        names = [str(index) for index, piece in enumerate(program.slices) if rank in piece.devices]
        title = f"slices {', '.join(names)}" if names else "idle"
        lanes[rank] = Lane(title, tuple((str(work.action), work.start_ms, work.end_ms) for work in mine))
    write_lanes(path, lanes, reports)
