"""An offload plan as a picture: four lanes (GPU, CPU, both directions of the link) over two periods, as SVG or HTML."""

from html import escape

from solver_plan.offload.plan import OffloadPlan, OperationName, ResourceName, TimedOperation
from solver_plan.report.svg import line, picture, rectangle, steps, text

WIDTH = 1400
LEFT = 110
LANE = 56
BAR = 40
TOP = 60
PERIODS = 2
LANES: tuple[tuple[ResourceName, str], ...] = (
    ("gpu", "GPU"),
    ("cpu", "CPU"),
    ("d2h", "to host"),
    ("h2d", "to device"),
)
COLOURS: dict[OperationName, str] = {
    "forward": "#4c78a8",
    "backward": "#72b7b2",
    "update": "#e45756",
    "gradient_copy": "#f2cf5b",
    "weight_copy": "#54a24b",
    "state_copy_in": "#b279a2",
    "state_copy_out": "#9d755d",
}
EDGE = 0.35
"""Share of a bar's colour that neighbours differ by, so that equal operations in a row can be told apart."""
LABEL_FROM = 34.0
"""Bars at least this wide carry their layer's name."""


def offload_gantt_svg(plan: OffloadPlan) -> str:
    """Return the plan's timeline over two periods as a self-contained SVG; a tip over each bar says what it is."""
    period_ms = plan.predicted.period_ms
    span_ms = PERIODS * period_ms if period_ms > 0 else 1.0
    scale = (WIDTH - LEFT - 20) / span_ms
    height = TOP + LANE * len(LANES) + 46
    parts = [text(LEFT, 20, f"period {period_ms:.3f} ms, two of them", size=14)]
    parts += _legend(plan)
    for number, (resource, words) in enumerate(LANES):
        top = TOP + number * LANE
        parts.append(text(8, top + BAR / 2 + 8, words, size=13))
        parts.append(line(LEFT, top + BAR + 8, WIDTH - 20, top + BAR + 8, colour="#ddd"))
        items = sorted((item for item in plan.timeline if item.resource == resource), key=lambda item: item.start_ms)
        for index, item in enumerate(items):
            parts += _bars(item, index, top, period_ms, scale)
    bottom = TOP + LANE * len(LANES)
    for value in steps(span_ms, 12):
        parts.append(text(LEFT + value * scale, bottom + 18, f"{value:g}", size=11, anchor="middle", colour="#555"))
    parts.append(text(LEFT, bottom + 36, "milliseconds", size=11, colour="#555"))
    for turn in range(PERIODS + 1):
        x = LEFT + turn * period_ms * scale
        parts.append(line(x, TOP - 8, x, bottom, colour="#222", dashed=True))
    return picture(WIDTH, height, parts)


def offload_gantt_html(plan: OffloadPlan, description: str) -> str:
    """Return a self-contained page with the timeline and the plan in words (`offload.describe.describe`)."""
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>Offload plan</title></head>\n"
        f"<body>\n{offload_gantt_svg(plan)}<pre>{escape(description)}</pre>\n</body></html>\n"
    )


def _legend(plan: OffloadPlan) -> list[str]:
    used = {item.operation for item in plan.timeline}
    parts: list[str] = []
    x = float(LEFT)
    for operation, colour in COLOURS.items():
        if operation in used:
            parts.append(rectangle(x, 30, 12, 12, colour, operation))
            parts.append(text(x + 16, 40, operation.replace("_", " "), size=11))
            x += 30 + 7 * len(operation)
    return parts


def _bars(item: TimedOperation, index: int, top: float, period_ms: float, scale: float) -> list[str]:
    """Draw an operation of every iteration that is seen."""
    length_ms = item.end_ms - item.start_ms
    if length_ms <= 0 or period_ms <= 0:
        return []
    parts: list[str] = []
    first = -int(item.end_ms // period_ms) - 1
    for turn in range(first, PERIODS + 1):
        start_ms, end_ms = item.start_ms + turn * period_ms, item.end_ms + turn * period_ms
        seen_from, seen_to = max(0.0, start_ms), min(PERIODS * period_ms, end_ms)
        if seen_from >= seen_to:
            continue
        chunk = f", chunk {item.chunk}" if item.chunk else ""
        tip = f"{item.operation} of {item.layer}{chunk}: {item.start_ms:.3f} to {item.end_ms:.3f} ms"
        x, width = LEFT + seen_from * scale, (seen_to - seen_from) * scale
        parts.append(rectangle(x, top, width, BAR, _shade(COLOURS[item.operation], index), tip))
        if width >= LABEL_FROM:
            fitting = item.layer[: int(width / 7)]
            parts.append(text(x + width / 2, top + BAR / 2 + 4, fitting, size=11, anchor="middle", colour="white"))
    return parts


def _shade(colour: str, index: int) -> str:
    """Every second bar a little darker."""
    if index % 2 == 0:
        return colour
    values = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(value * (1 - EDGE / 2)):02x}" for value in values)
