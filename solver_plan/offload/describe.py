"""A plan as tables for a terminal: what it costs, where each layer is updated, and what binds."""

from collections.abc import Iterator
from itertools import groupby

from solver_plan.offload.assemble import candidate_of
from solver_plan.offload.bounds import binding
from solver_plan.offload.check import violations
from solver_plan.offload.operations import iteration_of, precedences_of
from solver_plan.offload.plan import RESOURCES, OffloadPlan
from solver_plan.offload.problem import OffloadProblem
from solver_plan.offload.retiming import retime
from solver_plan.report.units import size_text

WIDEST_NAME = 40
RESOURCE_WORDS = {
    "gpu": "the GPU",
    "cpu": "the CPU",
    "d2h": "copies to the host",
    "h2d": "copies to the device",
}


def describe(plan: OffloadPlan, problem: OffloadProblem | None = None) -> str:
    """Return the plan as text; with its problem also the rooms and what binds."""
    lines = [*_summary(plan, problem), "", *_placement(plan), "", *_resources(plan, problem)]
    if problem is not None and not violations(problem, plan):
        lines += ["", *what_binds(problem, plan)]
    return "\n".join(lines) + "\n"


def _summary(plan: OffloadPlan, problem: OffloadProblem | None) -> Iterator[str]:
    yield f"period     {plan.predicted.period_ms:.3f} ms"
    room = "" if problem is None else f" of {size_text(problem.gpu_state_bytes, 3)}"
    yield f"resident   {size_text(plan.predicted.gpu_state_bytes, 3)}{room}"


def _placement(plan: OffloadPlan) -> Iterator[str]:
    counts = {
        place: sum(item.update_on == place for item in plan.placement) for place in ("cpu", "gpu", "gpu_streamed")
    }
    yield "updated on   " + ", ".join(f"{place}: {count}" for place, count in counts.items() if count)
    numbered = enumerate(plan.placement)
    for place, run in groupby(numbered, key=lambda pair: pair[1].update_on):
        items = list(run)
        first, last = items[0], items[-1]
        names = first[1].layer[:WIDEST_NAME]
        if len(items) > 1:
            names += f" … {last[1].layer[:WIDEST_NAME]} ({len(items)})"
        yield f"  {place:13s}{names}"


def _resources(plan: OffloadPlan, problem: OffloadProblem | None) -> Iterator[str]:
    period_ms = plan.predicted.period_ms
    yield "resource      busy ms   share  operations"
    for resource in RESOURCES:
        items = [item for item in plan.timeline if item.resource == resource]
        busy_ms = sum(item.end_ms - item.start_ms for item in items)
        kinds: list[str] = sorted({item.operation for item in items})
        if resource == "gpu" and problem is not None and problem.accumulation_steps > 1:
            busy_ms += problem.other_micro_steps_ms
            kinds.append("other micro-steps")
        share = busy_ms / period_ms if period_ms else 0.0
        yield f"{resource:8s}{busy_ms:13.3f}{share:8.1%}  {', '.join(kinds)}"


def what_binds(problem: OffloadProblem, plan: OffloadPlan) -> tuple[str, ...]:
    """Return what sets the period: the resources of the critical cycle, the window of the bound, the room."""
    candidate = candidate_of(problem, plan)
    iteration = iteration_of(problem, candidate.placement)
    lines: list[str] = []
    retimed = retime(problem, iteration, precedences_of(problem, iteration), candidate.timing)
    if retimed is not None and retimed[1].arcs:
        arcs = retimed[1].arcs
        total_ms = sum(arc.weight_ms for arc in arcs)
        shares: dict[str, float] = {}
        for arc in arcs:
            item = iteration.operations[arc.before]
            shares[item.resource] = shares.get(item.resource, 0.0) + arc.weight_ms
        parts = [
            f"{RESOURCE_WORDS[resource]} {share / total_ms:.1%}"
            for resource, share in sorted(shares.items(), key=lambda pair: -pair[1])
            if share > 0
        ]
        lines.append("binds: the longest cycle of work runs through " + ", ".join(parts))
    row = binding(problem, candidate.placement)
    lines.append(f"this placement's bound: {_words(problem, row.name)} ({row.value_ms(candidate.placement):.3f} ms)")
    left = problem.gpu_state_bytes - plan.predicted.gpu_state_bytes
    waiting = [
        problem.state_bytes(index)
        for index, place in enumerate(candidate.placement)
        if place != "gpu" and problem.state_bytes(index)
    ]
    if waiting:
        lacking = min(waiting) - left
        if lacking > 0:
            lines.append(f"room: full; {lacking} bytes more of gpu_state_bytes would keep one more layer on the GPU")
        else:
            lines.append(f"room: {left} bytes are left")
    return tuple(lines)


def _words(problem: OffloadProblem, name: str) -> str:
    """Say an inequality of `bounds.py` in words."""
    kind, _, number = name.partition(" ")
    if not number.isdigit():
        return RESOURCE_WORDS.get(name, name)
    layer = problem.layers[int(number)].name
    if kind == "chain":
        return f"layer {layer!r} alone, its copies and update between its backward and its next forward"
    if kind == "stay":
        return f"layer {layer!r} alone, its state in, update and out"
    return f"{RESOURCE_WORDS[kind]} in the window from the backward of {layer!r} to its next forward"
