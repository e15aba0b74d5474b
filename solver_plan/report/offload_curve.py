"""The period over the device's room as a picture: what more of resident optimizer state buys."""

from collections.abc import Sequence

from solver_plan.offload.curve import CurvePoint
from solver_plan.report.svg import line, picture, polyline, rectangle, steps, text
from solver_plan.report.tables import table
from solver_plan.report.units import SizeUnit, size_unit

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 80, 20, 40, 60
PLAN_COLOUR, BOUND_COLOUR = "#4c78a8", "#e45756"


def curve_table(points: Sequence[CurvePoint]) -> str:
    """Return the curve as a table for a terminal."""
    unit = _unit(points)
    return table(
        [f"room ({unit.name})", f"resident ({unit.name})", "period (ms)", "bound (ms)", "gap"],
        [
            [
                unit.of(point.gpu_state_bytes),
                unit.of(point.plan.predicted.gpu_state_bytes),
                point.period_ms,
                point.bound_ms,
                None if point.bound_ms is None else f"{max(0.0, 1 - point.bound_ms / point.period_ms):.4%}",
            ]
            for point in points
        ],
    )


def curve_csv(points: Sequence[CurvePoint]) -> str:
    """Return the curve as CSV with a header, numbers in full; what is not known is empty."""
    lines = ["gpu_state_bytes,resident_bytes,period_ms,bound_ms"]
    for point in points:
        bound = "" if point.bound_ms is None else repr(point.bound_ms)
        resident = point.plan.predicted.gpu_state_bytes
        lines.append(f"{point.gpu_state_bytes},{resident},{point.period_ms!r},{bound}")
    return "\n".join(lines) + "\n"


def curve_svg(points: Sequence[CurvePoint]) -> str:
    """Return the curve as a self-contained SVG: periods of plans, and the bound below which none can be."""
    most_bytes = max(1, *(point.gpu_state_bytes for point in points))
    unit = _unit(points)
    most_ms = max(1e-9, *(point.period_ms for point in points)) * 1.05

    def at(room: float, period: float) -> tuple[float, float]:
        x = LEFT + room / most_bytes * (WIDTH - LEFT - RIGHT)
        return x, HEIGHT - BOTTOM - period / most_ms * (HEIGHT - TOP - BOTTOM)

    parts = [
        text(LEFT, 22, "period over the room for resident optimizer state", size=14),
        line(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM),
        line(LEFT, TOP, LEFT, HEIGHT - BOTTOM),
        text(WIDTH / 2, HEIGHT - 16, f"gpu_state_bytes ({unit.name})", anchor="middle"),
        text(WIDTH - RIGHT, 22, "plan", anchor="end", colour=PLAN_COLOUR),
        text(WIDTH - RIGHT - 40, 22, "bound", anchor="end", colour=BOUND_COLOUR),
    ]
    for value in steps(unit.of(most_bytes)):
        x, y = at(value * unit.size_bytes, 0.0)
        parts.append(text(x, y + 18, f"{value:g}", size=11, anchor="middle", colour="#555"))
    for value in steps(most_ms):
        x, y = at(0.0, value)
        parts.append(text(x - 6, y + 4, f"{value:g} ms", size=11, anchor="end", colour="#555"))
        parts.append(line(x, y, WIDTH - RIGHT, y, colour="#eee"))
    bounds = [(point.gpu_state_bytes, point.bound_ms) for point in points if point.bound_ms is not None]
    parts.append(polyline([at(room, bound) for room, bound in bounds], BOUND_COLOUR, dashed=True))
    parts.append(polyline([at(point.gpu_state_bytes, point.period_ms) for point in points], PLAN_COLOUR))
    for point in points:
        x, y = at(point.gpu_state_bytes, point.period_ms)
        tip = f"{point.gpu_state_bytes} bytes: {point.period_ms:.3f} ms"
        parts.append(rectangle(x - 3, y - 3, 6, 6, PLAN_COLOUR, tip))
    return picture(WIDTH, HEIGHT, parts)


def _unit(points: Sequence[CurvePoint]) -> SizeUnit:
    return size_unit(max(point.gpu_state_bytes for point in points))
