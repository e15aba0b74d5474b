"""A parallelism plan as a picture: memory of the stages, first micro-batches, plans and bounds over time."""

from dataclasses import replace

from solver_plan.documents.certificate import Certificate
from solver_plan.parallelism.costs import Evaluation, evaluate
from solver_plan.parallelism.plan import ParallelismPlan
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.parallelism.simulate import simulate
from solver_plan.report.svg import line, picture, polyline, rectangle, steps, text

WIDTH = 1000.0
LEFT = 150.0
ROW = 22.0
GIGABYTE = 2**30
MOST_MICRO_BATCHES_PER_STAGE = 3
MEMORY_COLOURS = {
    "weights and optimizer": "#4e79a7",
    "activations": "#59a14f",
    "recomputed at a time": "#edc948",
    "reserved": "#bab0ac",
}
FORWARD_COLOURS = ("#4e79a7", "#76a5d0")
BACKWARD_COLOURS = ("#e15759", "#f1a09f")


def parallelism_picture(plan: ParallelismPlan, problem: ParallelismProblem) -> str:
    """Return the plan as a self-contained SVG. Raises `InvalidPlanError` for what was not profiled."""
    evaluation = evaluate(problem, plan)
    parts: list[str] = []
    y = _memory(parts, 30.0, plan, problem, evaluation)
    y = _pipeline(parts, y + 40.0, plan, problem)
    if plan.certificate is not None and len(plan.certificate.trace) > 1:
        y = _search(parts, y + 40.0, plan.certificate)
    return picture(WIDTH, y + 20.0, parts)


def _memory(
    parts: list[str], y: float, plan: ParallelismPlan, problem: ParallelismProblem, evaluation: Evaluation
) -> float:
    limit = problem.cluster.usable_bytes_per_device
    scale = (WIDTH - LEFT - 60) / max(1, limit, *(stage.memory_bytes for stage in evaluation.stages))
    parts.append(text(10, y - 12, "Memory of each device, by stage (GB)", size=14))
    for index, (stage, cost) in enumerate(zip(plan.stages, evaluation.stages, strict=True)):
        top = y + index * ROW
        degrees = "/".join(sorted({f"{one.tensor_parallel}x{one.data_parallel}" for one in stage.layout}))
        parts.append(text(10, top + 15, f"stage {index}: t x d {degrees}"))
        sizes = (cost.weight_state_bytes, cost.activation_bytes, cost.peak_bytes, cost.reserved_bytes)
        x = LEFT
        for (name, colour), size in zip(MEMORY_COLOURS.items(), sizes, strict=True):
            parts.append(rectangle(x, top + 2, size * scale, ROW - 4, colour, f"{name}: {size / GIGABYTE:.2f} GB"))
            x += size * scale
        parts.append(text(x + 4, top + 15, f"{cost.memory_bytes / GIGABYTE:.1f}", size=11))
    bottom = y + len(plan.stages) * ROW
    parts.append(line(LEFT + limit * scale, y - 4, LEFT + limit * scale, bottom + 4, colour="#e15759", dashed=True))
    parts.append(text(LEFT + limit * scale, bottom + 16, f"limit {limit / GIGABYTE:.1f}", size=11, anchor="end"))
    x = LEFT
    for name, colour in MEMORY_COLOURS.items():
        parts.append(rectangle(x, bottom + 22, 10, 10, colour, name))
        parts.append(text(x + 14, bottom + 31, name, size=11))
        x += 170
    return bottom + 36


def _pipeline(parts: list[str], y: float, plan: ParallelismPlan, problem: ParallelismProblem) -> float:
    """Draw the first micro-batches of a 1F1B plan, or the whole of a plan with an order of its own."""
    shown, played = plan, problem
    if plan.schedule is None:
        count = min(plan.micro_batches, MOST_MICRO_BATCHES_PER_STAGE * len(plan.stages) + 1)
        shown = replace(plan, micro_batches=count)
        played = replace(problem, global_batch=count * plan.micro_batch_size)
    simulation = simulate(played, shown)
    scale = (WIDTH - LEFT - 20) / (simulation.iteration_ms or 1.0)
    parts.append(
        text(10, y - 12, f"Pipeline, {shown.micro_batches} of {plan.micro_batches} micro-batches (ms)", size=14)
    )
    for group, devices in enumerate(simulation.groups):
        name = f"devices {devices[0]}-{devices[-1]}" if len(devices) > 1 else f"device {devices[0]}"
        parts.append(text(10, y + group * ROW + 15, name))
    for action in simulation.actions:
        colours = FORWARD_COLOURS if action.kind == "F" else BACKWARD_COLOURS
        width = (action.end_ms - action.start_ms) * scale
        top = y + action.group * ROW + 2
        tip = f"{action.stage}{action.kind}{action.micro_batch}: {action.start_ms:.3f} to {action.end_ms:.3f} ms"
        x = LEFT + action.start_ms * scale
        parts.append(rectangle(x, top, width - 0.4, ROW - 4, colours[action.micro_batch % 2], tip))
        if width > 16:
            label = str(action.micro_batch)
            parts.append(text(x + width / 2, top + 13, label, size=10, anchor="middle", colour="white"))
    bottom = y + len(simulation.groups) * ROW
    for value in steps(simulation.iteration_ms):
        x = LEFT + value * scale
        parts.append(line(x, y, x, bottom + 4, colour="#ddd"))
        parts.append(text(x, bottom + 16, f"{value:g}", size=11, anchor="middle"))
    return bottom + 20


def _search(parts: list[str], y: float, certificate: Certificate) -> float:
    """Draw the objective of the best plan and the bound over the seconds of the search."""
    height = 160.0
    plans = [(step.seconds, step.objective) for step in certificate.trace if step.objective is not None]
    bounds = [(step.seconds, step.bound) for step in certificate.trace if step.bound is not None]
    values = [value for _, value in (*plans, *bounds)]
    # the first plans of a search may be far off: show what lies within twice the best
    low, high = min(values), min(max(values), 2 * certificate.objective)
    last = max(certificate.seconds, certificate.trace[-1].seconds, 1e-3)
    span = max(high - low, 1e-9 * high) or 1.0

    def point(seconds: float, value: float) -> tuple[float, float]:
        return LEFT + seconds / last * (WIDTH - LEFT - 20), y + height * (1 - (min(value, high) - low) / span)

    def staircase(found: list[tuple[float, float]]) -> list[tuple[float, float]]:
        points: list[tuple[float, float]] = []
        for seconds, value in found:
            if points:
                points.append((point(seconds, value)[0], points[-1][1]))
            points.append(point(seconds, value))
        return [*points, (point(last, 0)[0], points[-1][1])] if points else []

    parts.append(text(10, y - 12, "Best plan and bound over the seconds of the search (ms)", size=14))
    for value in steps(last):
        x = point(value, low)[0]
        parts.append(line(x, y, x, y + height, colour="#ddd"))
        parts.append(text(x, y + height + 16, f"{value:g}", size=11, anchor="middle"))
    for value, label in ((high, f"{high:.0f}"), (low, f"{low:.0f}")):
        parts.append(text(LEFT - 6, point(0, value)[1] + 4, label, size=11, anchor="end"))
    parts.append(polyline(staircase(plans), "#e15759"))
    if bounds:
        parts.append(polyline(staircase(bounds), "#4e79a7", dashed=True))
    parts.append(text(10, y + 40, "plan", colour="#e15759"))
    parts.append(text(10, y + 58, "bound (dashed)", colour="#4e79a7"))
    return y + height + 20
