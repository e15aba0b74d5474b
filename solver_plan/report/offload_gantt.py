"""An offload plan as a picture: four lanes (GPU, CPU, both directions of the link) over two periods, as SVG."""

from solver_plan.offload.plan import OffloadPlan, OperationName, ResourceName, TimedOperation
from solver_plan.offload.problem import OffloadProblem
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
OTHER_COLOUR, OTHER_MICRO_STEPS = "#bab0ac", "other micro-steps"
EDGE = 0.35
"""Share of a bar's colour that neighbours differ by, so that equal operations in a row can be told apart."""
MOST_PERIODS = 1e15
"""An operation that ends later than so many periods is not drawn: where it lies in one is lost to rounding."""
LABEL_FROM = 34.0
"""Bars at least this wide carry their layer's name."""


def offload_gantt_svg(plan: OffloadPlan, problem: OffloadProblem | None = None) -> str:
    """Return the plan's timeline over two periods as a self-contained SVG; a tip over each bar says what it is.

    With the problem also the device's other micro-steps, which are not in the timeline.
    """
    period_ms = plan.predicted.period_ms
    span_ms = PERIODS * period_ms if period_ms > 0 else 1.0
    scale = (WIDTH - LEFT - 20) / span_ms
    height = TOP + LANE * len(LANES) + 46
    parts = [text(LEFT, 20, f"period {period_ms:.3f} ms, two of them", size=14)]
    other_ms = 0.0 if problem is None else problem.other_micro_steps_ms
    parts += _legend(plan, other_ms > 0)
    for number, (resource, words) in enumerate(LANES):
        top = TOP + number * LANE
        parts.append(text(8, top + BAR / 2 + 8, words, size=13))
        parts.append(line(LEFT, top + BAR + 8, WIDTH - 20, top + BAR + 8, colour="#ddd"))
        items = sorted((item for item in plan.timeline if item.resource == resource), key=lambda item: item.start_ms)
        for index, item in enumerate(items):
            tip, colour = _tip(item), _shade(COLOURS[item.operation], index)
            parts += _bars(item.start_ms, item.end_ms, colour, tip, item.layer, top, period_ms, scale)
        if resource == "gpu" and other_ms > 0:
            start_ms = max(item.end_ms for item in items if item.operation == "forward")
            tip = f"other micro-steps: {other_ms:.3f} ms"
            parts += _bars(start_ms, start_ms + other_ms, OTHER_COLOUR, tip, OTHER_MICRO_STEPS, top, period_ms, scale)
    bottom = TOP + LANE * len(LANES)
    for value in steps(span_ms, 12):
        parts.append(text(LEFT + value * scale, bottom + 18, f"{value:g}", size=11, anchor="middle", colour="#555"))
    parts.append(text(LEFT, bottom + 36, "milliseconds", size=11, colour="#555"))
    for turn in range(PERIODS + 1):
        x = LEFT + turn * period_ms * scale
        parts.append(line(x, TOP - 8, x, bottom, colour="#222", dashed=True))
    return picture(WIDTH, height, parts)


def _legend(plan: OffloadPlan, others: bool) -> list[str]:
    used = {item.operation for item in plan.timeline}
    entries = [(operation.replace("_", " "), colour) for operation, colour in COLOURS.items() if operation in used]
    if others:
        entries.append((OTHER_MICRO_STEPS, OTHER_COLOUR))
    parts: list[str] = []
    x = float(LEFT)
    for words, colour in entries:
        parts.append(rectangle(x, 30, 12, 12, colour, words))
        parts.append(text(x + 16, 40, words, size=11))
        x += 34 + 6 * len(words)
    return parts


def _tip(item: TimedOperation) -> str:
    chunk = f", chunk {item.chunk}" if item.chunk else ""
    return f"{item.operation} of {item.layer}{chunk}: {item.start_ms:.3f} to {item.end_ms:.3f} ms"


def _bars(
    begins_ms: float,
    ends_ms: float,
    colour: str,
    tip: str,
    label: str,
    top: float,
    period_ms: float,
    scale: float,
) -> list[str]:
    """Draw what runs in every iteration as far as it is seen."""
    if ends_ms <= begins_ms or period_ms <= 0 or ends_ms / period_ms > MOST_PERIODS:
        return []
    parts: list[str] = []
    # only turns that are seen; what is longer than a period, which no valid plan has, is seen once, all over
    last = PERIODS - int(begins_ms // period_ms)
    first = max(-int(ends_ms // period_ms) - 1, last - PERIODS - 2)
    for turn in range(first, last + 1):
        start_ms, end_ms = begins_ms + turn * period_ms, ends_ms + turn * period_ms
        seen_from, seen_to = max(0.0, start_ms), min(PERIODS * period_ms, end_ms)
        if seen_from >= seen_to:
            continue
        x, width = LEFT + seen_from * scale, (seen_to - seen_from) * scale
        parts.append(rectangle(x, top, width, BAR, colour, tip))
        if width >= LABEL_FROM:
            fitting = label[: int(width / 7)]
            parts.append(text(x + width / 2, top + BAR / 2 + 4, fitting, size=11, anchor="middle", colour="white"))
    return parts


def _shade(colour: str, index: int) -> str:
    """Every second bar a little darker."""
    if index % 2 == 0:
        return colour
    values = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(value * (1 - EDGE / 2)):02x}" for value in values)
