"""A Gantt chart of a wavefront plan over devices, coloured by task, as self-contained SVG."""

from collections.abc import Sequence
from html import escape

from solver_plan.report.svg import steps
from solver_plan.wavefront.plan import Slice, WavefrontPlan
from solver_plan.wavefront.problem import WavefrontProblem

COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#edc948", "#ff9da7", "#9c755f", "#bab0ac")
WIDTH = 1200
LEFT = 70
RIGHT = 30
ROW_HEIGHT = 18
MOST_ROWS = 2048
"""Devices beyond them are counted, not drawn."""
LEAST_MS = 1e-9
"""A plan that ends before is drawn as one that takes no time."""


def gantt_svg(plan: WavefrontPlan, problem: WavefrontProblem | None = None) -> str:
    """Return the plan as SVG text: a row for each device, a rectangle for each slice, darker for its backward.

    Of more than `MOST_ROWS` devices the first ones are drawn.
    Without the problem tasks are not known, and the part of a component's name before the first ``/`` stands for them.
    """
    task_of = {} if problem is None else {component.name: component.task for component in problem.components}
    tasks = sorted({_task(piece, task_of) for piece in plan.slices})
    colour_of = {task: COLOURS[at % len(COLOURS)] for at, task in enumerate(tasks)}
    used = max(max(piece.devices) for piece in plan.slices) + 1
    devices = used if problem is None else problem.cluster.devices
    end = max(max(piece.end_ms, piece.backward_end_ms or 0.0) for piece in plan.slices)
    reduction = 0.0 if plan.predicted is None else plan.predicted.reduction_ms
    total = end + reduction
    scale = (WIDTH - LEFT - RIGHT) / total if total > LEAST_MS else 0.0
    drawn = min(devices, MOST_ROWS)
    top = 30
    bottom = top + drawn * ROW_HEIGHT
    height = bottom + 30 + 20 * -(-len(tasks) // 6)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for device in range(drawn):
        y = top + device * ROW_HEIGHT
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{ROW_HEIGHT - 1}" fill="#f4f4f4"/>'
        )
        parts.append(f'<text x="{LEFT - 6}" y="{y + 12}" text-anchor="end">device {device}</text>')
    for piece in plan.slices:
        colour = colour_of[_task(piece, task_of)]
        spans = [(piece.start_ms, piece.end_ms, 1.0, "")]
        if piece.backward_start_ms is not None and piece.backward_end_ms is not None:
            spans.append((piece.backward_start_ms, piece.backward_end_ms, 0.65, " backward"))
        for start_ms, end_ms, opacity, phase in spans:
            if end_ms <= start_ms:
                continue
            x, width = LEFT + start_ms * scale, (end_ms - start_ms) * scale
            says = escape(
                f"{piece.component}{phase}, layers {piece.layers[0]} to {piece.layers[1] - 1}, "
                f"{len(piece.devices)} devices, {start_ms:.3f} to {end_ms:.3f} ms"
            )
            for first, last in _rows([device for device in piece.devices if device < drawn]):
                y = top + first * ROW_HEIGHT
                rows = (last - first + 1) * ROW_HEIGHT - 1
                parts.append(
                    f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{rows}" fill="{colour}" '
                    f'fill-opacity="{opacity}" stroke="white" stroke-width="0.5"><title>{says}</title></rect>'
                )
    if reduction > 0:
        parts.append(
            f'<rect x="{LEFT + end * scale:.2f}" y="{top}" width="{reduction * scale:.2f}" height="{bottom - top}" '
            f'fill="#999999" fill-opacity="0.5"><title>reduction, {reduction:.3f} ms</title></rect>'
        )
    for tick_ms in steps(total, 10) if scale > 0 else [0.0]:
        unit = " ms" if tick_ms == 0 else ""
        parts.append(f'<text x="{LEFT + tick_ms * scale:.1f}" y="20" text-anchor="middle">{tick_ms:g}{unit}</text>')
    if devices > drawn:
        more = f"… and {devices - drawn} more devices"
        parts.append(f'<text x="{WIDTH - RIGHT}" y="{bottom + 12}" text-anchor="end">{more}</text>')
    for at, task in enumerate(tasks):
        x, y = LEFT + 180 * (at % 6), bottom + 16 + 20 * (at // 6)
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour_of[task]}"/>')
        parts.append(f'<text x="{x + 17}" y="{y + 10}">{escape(task)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _task(piece: Slice, task_of: dict[str, str]) -> str:
    return task_of.get(piece.component, piece.component.split("/", 1)[0])


def _rows(devices: Sequence[int]) -> list[tuple[int, int]]:
    """Return runs of neighbouring devices as (first, last)."""
    found: list[tuple[int, int]] = []
    for device in sorted(devices):
        if found and device == found[-1][1] + 1:
            found[-1] = found[-1][0], device
        else:
            found.append((device, device))
    return found
