"""A wavefront plan as tables for a terminal."""

from solver_plan.wavefront.idle import idle_by_cause
from solver_plan.wavefront.plan import WavefrontPlan
from solver_plan.wavefront.problem import WavefrontProblem
from solver_plan.wavefront.simulate import simulate

MOST_ROWS = 60
GIGA = 1e9


def describe(plan: WavefrontPlan, problem: WavefrontProblem | None) -> str:
    """Return the plan as tables: certificate, slices, and with its problem devices and idle time by cause."""
    lines = _certificate(plan)
    both = plan.slices[0].backward_start_ms is not None
    header = ["component", "layers", "devices", "start ms", "end ms"] + (["backward ms", "to ms"] if both else [])
    rows = [
        [
            piece.component,
            f"{piece.layers[0]}-{piece.layers[1]}",
            f"{len(piece.devices)}: {ranges(piece.devices)}",
            f"{piece.start_ms:.3f}",
            f"{piece.end_ms:.3f}",
            *([f"{piece.backward_start_ms:.3f}", f"{piece.backward_end_ms:.3f}"] if both else []),
        ]
        for piece in plan.slices[:MOST_ROWS]
    ]
    lines += ["", *_table(header, rows)]
    if len(plan.slices) > MOST_ROWS:
        lines.append(f"… and {len(plan.slices) - MOST_ROWS} more slices")
    if problem is not None:
        idle = idle_by_cause(problem, plan)
        rows = [["busy", f"{idle.busy_ms:.1f}", f"{idle.busy_ms / idle.total_ms:.2%}"]]
        for cause, spent in idle.by_cause_ms.items():
            if spent > 0:
                rows.append([f"idle: {cause}", f"{spent:.1f}", f"{spent / idle.total_ms:.2%}"])
        lines += ["", *_table(["devices", "device ms", "share"], rows)]
    if plan.predicted is not None and any(plan.predicted.device_memory_bytes):
        held = plan.predicted.device_memory_bytes
        limit = None if problem is None else problem.cluster.memory_bytes_per_device
        of = "" if limit is None else f" of {limit / GIGA:.2f} GB"
        lines += ["", f"memory of a device: {min(held) / GIGA:.2f} to {max(held) / GIGA:.2f} GB{of}"]
    return "\n".join(lines)


def describe_simulation(problem: WavefrontProblem, plan: WavefrontPlan) -> str:
    """Play the plan and return what happened, as tables for a terminal."""
    found = simulate(problem, plan)
    lines = []
    for event in found.events[:MOST_ROWS]:
        piece = plan.slices[event.slice]
        phase = " backward" if event.backward else ""
        target = "" if event.target is None else f" at {plan.slices[event.target].component}"
        layers = f"{piece.layers[0]}-{piece.layers[1]}"
        lines.append(f"{event.time_ms:12.3f} ms  {event.what:6}  {piece.component} {layers}{phase}{target}")
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


def _certificate(plan: WavefrontPlan) -> list[str]:
    lines = []
    if plan.predicted is not None:
        predicted = plan.predicted
        lines.append(
            f"makespan {predicted.makespan_ms:.3f} ms, of which reduction {predicted.reduction_ms:.3f} ms; "
            f"transfers {predicted.transfer_ms:.3f} ms in all"
        )
    certificate = plan.certificate
    if certificate is None:
        return [*lines, "written by hand: nothing is claimed"]
    if certificate.bound is None or certificate.gap is None:
        proven = "nothing proven"
    else:
        proven = f"bound {certificate.bound:.3f} ms ({certificate.bound_from}), gap {certificate.gap:.2%}"
    return [
        *lines,
        f"{certificate.status}, {proven}, by {certificate.incumbent}, "
        f"stopped by {certificate.stopped_by} after {certificate.seconds:.1f} s",
    ]


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    text = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in [header, *rows]
    ]
    return [text[0], "-" * len(text[0]), *text[1:]]
