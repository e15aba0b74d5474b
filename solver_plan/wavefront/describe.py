"""A wavefront plan as tables for a terminal."""

from solver_plan.report.printable import printable
from solver_plan.report.tables import Cell, table
from solver_plan.wavefront.check import check
from solver_plan.wavefront.idle import idle_by_cause
from solver_plan.wavefront.plan import Slice, WavefrontPlan
from solver_plan.wavefront.problem import WavefrontProblem
from solver_plan.wavefront.simulate import simulate

MOST_ROWS = 60
MEGABYTE = 2**20


def describe(plan: WavefrontPlan, problem: WavefrontProblem | None) -> str:
    """Return the plan as tables: slices, and with its problem, if it is valid, devices and idle time by cause."""
    parts: list[str] = []
    if plan.predicted is not None:
        predicted = plan.predicted
        parts.append(
            f"makespan {predicted.makespan_ms:.3f} ms, of which reduction {predicted.reduction_ms:.3f} ms; "
            f"transfers {predicted.transfer_ms:.3f} ms in all"
        )
    both = plan.slices[0].backward_start_ms is not None
    headers = ["component", "layers", "devices", "on", "start (ms)", "end (ms)"]
    shown = table(
        headers + (["backward (ms)", "to (ms)"] if both else []),
        [
            [
                piece.component,
                layers_of(piece),
                len(piece.devices),
                ranges(piece.devices),
                piece.start_ms,
                piece.end_ms,
                *([piece.backward_start_ms, piece.backward_end_ms] if both else []),
            ]
            for piece in plan.slices[:MOST_ROWS]
        ],
    )
    more = len(plan.slices) - MOST_ROWS
    parts.append(f"{shown}\n… and {more} more slices" if more > 0 else shown)
    violations = () if problem is None else check(problem, plan)
    if violations:
        parts.append(
            f"not a valid plan of this problem: {printable(violations[0])} ({len(violations)} violations; see check)"
        )
    elif problem is not None:
        idle = idle_by_cause(problem, plan)
        spent = {"busy": idle.busy_ms, **{f"idle: {cause}": ms for cause, ms in idle.by_cause_ms.items() if ms > 0}}
        rows: list[list[Cell]] = [[what, ms, f"{ms / idle.total_ms:.2%}"] for what, ms in spent.items()]
        parts.append(table(["devices", "together (ms)", "share"], rows))
    if plan.predicted is not None and any(plan.predicted.device_memory_bytes):
        held = plan.predicted.device_memory_bytes
        limit = None if problem is None else problem.cluster.memory_bytes_per_device
        of = "" if limit is None else f" of {limit / MEGABYTE:.1f} MB"
        parts.append(f"memory of a device: {min(held) / MEGABYTE:.1f} to {max(held) / MEGABYTE:.1f} MB{of}")
    return "\n\n".join(parts)


def layers_of(piece: Slice) -> str:
    """Return the first and the last layer of a slice."""
    return f"{piece.layers[0]}-{piece.layers[1] - 1}"


def describe_simulation(problem: WavefrontProblem, plan: WavefrontPlan) -> str:
    """Play the plan and return what happened, as tables for a terminal."""
    found = simulate(problem, plan)
    lines = []
    for event in found.events[:MOST_ROWS]:
        piece = plan.slices[event.slice]
        name = printable(piece.component)
        phase = " backward" if event.backward else ""
        target = "" if event.target is None else f" at {printable(plan.slices[event.target].component)}"
        lines.append(f"{event.time_ms:12.3f} ms  {event.what:6}  {name} {layers_of(piece)}{phase}{target}")
    if len(found.events) > MOST_ROWS:
        lines.append(f"… and {len(found.events) - MOST_ROWS} more events")
    lines += ["", f"simulated makespan {found.makespan_ms:.6f} ms (reduction {found.reduction_ms:.6f} ms)"]
    if plan.predicted is not None:
        difference = plan.predicted.makespan_ms - found.makespan_ms
        lines.append(f"predicted makespan {plan.predicted.makespan_ms:.6f} ms ({difference:+.6f} ms)")
    share = sum(found.busy_ms) / (found.makespan_ms * len(found.busy_ms))
    lines.append(f"devices busy {share:.2%} of the time")
    return "\n".join(lines)


def ranges(devices: tuple[int, ...]) -> str:
    """Return devices as ranges: 0-3,6."""
    parts: list[list[int]] = []
    for device in devices:
        if parts and device == parts[-1][1] + 1:
            parts[-1][1] = device
        else:
            parts.append([device, device])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
