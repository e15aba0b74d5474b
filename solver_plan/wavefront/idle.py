"""Splits the idle time of a plan by cause.

At each moment every idle device is idle for the first of these reasons that holds:

* nothing left: every component has started its last slice (the tail of the plan),
* precedence: no component is ready, all wait for a predecessor, for their own slice before or for the forward,
* transfer: those whose predecessors have ended wait for their data,
* no mode that fits: components are ready, but none has a mode for as few devices as are idle,
* memory: a mode fits, but the idle devices have no room for the next layer of any,
* order: something ready fits, and the plan runs it later,
* reduction: the gradients are reduced after the last slice.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from solver_plan.wavefront.check import dependencies_of, examine
from solver_plan.wavefront.costs import choices_of, device_reduction_ms
from solver_plan.wavefront.plan import WavefrontPlan
from solver_plan.wavefront.problem import WavefrontProblem

Cause = Literal["nothing left", "precedence", "transfer", "no mode that fits", "memory", "order", "reduction"]
CAUSES: tuple[Cause, ...] = get_args(Cause)


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """Idle device time of a plan."""

    busy_ms: float
    """Devices times ms."""
    by_cause_ms: dict[Cause, float]
    """Devices times ms."""

    @property
    def total_ms(self) -> float:
        """Busy and idle, devices times ms."""
        return self.busy_ms + sum(self.by_cause_ms.values())


@dataclass(frozen=True, slots=True)
class _Work:
    """One span of a slice, with what it waits for."""

    index: int
    start_ms: float
    end_ms: float
    waits: tuple[tuple[int, float], ...]
    """(work before, transfer delay)."""


def idle_by_cause(problem: WavefrontProblem, plan: WavefrontPlan) -> Idle:
    """Return the idle time of a valid plan, by cause."""
    works = _works(problem, plan)
    count = len(plan.slices)
    moments = sorted({0.0} | {t for work in works for t in (work.start_ms, work.end_ms)} | _arrivals(works))
    memory = examine(problem, plan).predicted
    assert memory is not None
    by_cause: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
    busy = 0.0
    devices = problem.cluster.devices
    for start, end in itertools.pairwise(moments):
        middle = (start + end) / 2
        running = [work for work in works if work.start_ms <= middle < work.end_ms]
        used = {device for work in running for device in plan.slices[work.index % count].devices}
        busy += len(used) * (end - start)
        idle = [device for device in range(devices) if device not in used]
        if idle:
            left = [work for work in works if work.start_ms > middle]
            cause = _cause(problem, plan, works, left, middle, idle, memory.device_memory_bytes)
            by_cause[cause] += len(idle) * (end - start)
    reductions = device_reduction_ms(problem, plan.slices)
    busy += sum(reductions)
    by_cause["reduction"] += sum(max(reductions) - each for each in reductions)
    return Idle(busy_ms=busy, by_cause_ms=by_cause)


def _works(problem: WavefrontProblem, plan: WavefrontPlan) -> list[_Work]:
    count = len(plan.slices)
    both = problem.phases == "forward_backward"
    waits: list[list[tuple[int, float]]] = [[] for _ in range(2 * count)]
    for link in dependencies_of(problem, plan.slices):
        waits[link.after].append((link.before, link.delay_ms))
        waits[link.before + count].append((link.after + count, link.delay_ms))
    works = [_Work(i, piece.start_ms, piece.end_ms, tuple(waits[i])) for i, piece in enumerate(plan.slices)]
    if both:
        for i, piece in enumerate(plan.slices):
            assert piece.backward_start_ms is not None
            assert piece.backward_end_ms is not None
            links = ((i, 0.0), *waits[i + count])
            works.append(_Work(i + count, piece.backward_start_ms, piece.backward_end_ms, links))
    return works


def _arrivals(works: Sequence[_Work]) -> set[float]:
    return {works[before].end_ms + delay for work in works for before, delay in work.waits if delay > 0}


def _cause(
    problem: WavefrontProblem,
    plan: WavefrontPlan,
    works: Sequence[_Work],
    left: Sequence[_Work],
    now: float,
    idle: Sequence[int],
    memory_bytes: Sequence[int],
) -> Cause:
    if not left:
        return "nothing left"
    ended = [work for work in left if all(works[before].end_ms <= now for before, _ in work.waits)]
    if not ended:
        return "precedence"
    ready = [work for work in ended if all(works[before].end_ms + delay <= now for before, delay in work.waits)]
    if not ready:
        return "transfer"
    count = len(plan.slices)
    fitting = []
    for work in ready:
        component = problem.component_of[plan.slices[work.index % count].component]
        choices = choices_of(component, len(idle))
        if work.index >= count:  # the backward runs where its forward ran
            wanted = set(plan.slices[work.index % count].devices)
            choices = choices if wanted <= set(idle) else ()
        fitting += [(component, choice) for choice in choices]
    if not fitting:
        return "no mode that fits"
    limit = problem.cluster.memory_bytes_per_device
    if limit is not None:
        room = [limit - memory_bytes[device] for device in idle]
        needs = ((choice.devices, choice.state_bytes + choice.activation_bytes) for _, choice in fitting)
        if not any(sum(1 for each in room if each >= need) >= devices for devices, need in needs):
            return "memory"
    return "order"
