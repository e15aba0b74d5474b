"""Plays a wavefront plan event by event: devices take their work in the plan's order, as soon as data has arrived.

The times of the plan are not read, only who runs what and in which order on each device; so the end of the simulation
is an independent account of the makespan. It is never later than the plan's, and earlier where the plan has slack.
"""

import heapq
from collections import deque
from dataclasses import dataclass
from typing import Literal

from solver_plan.errors import InvalidPlanError
from solver_plan.wavefront.check import dependencies_of, examine
from solver_plan.wavefront.costs import choice_of, device_reduction_ms
from solver_plan.wavefront.plan import WavefrontPlan
from solver_plan.wavefront.problem import WavefrontProblem

Happening = Literal["start", "end", "arrive"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened: work started or ended, or its output arrived where it is needed."""

    time_ms: float
    what: Happening
    slice: int
    """Index into the plan's slices."""
    backward: bool
    target: int | None = None
    """Slice that the data arrived at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What happened."""

    events: tuple[Event, ...]
    end_ms: float
    """End of the last work."""
    reduction_ms: float
    makespan_ms: float
    busy_ms: tuple[float, ...]
    """Per device."""


def simulate(problem: WavefrontProblem, plan: WavefrontPlan) -> Simulation:
    """Play a plan.

    Raises `InvalidPlanError` if its slices make no sense, or its devices wait for one another for ever.
    """
    found = examine(problem, plan)
    if found.predicted is None:
        raise InvalidPlanError(found.violations)
    slices = plan.slices
    count = len(slices)
    both = problem.phases == "forward_backward"
    length: list[float] = []
    for piece in slices:
        choice = choice_of(problem.component_of[piece.component], piece)
        assert choice is not None
        length.append((choice.forward_ms if both else choice.layer_ms) * (piece.layers[1] - piece.layers[0]))
    if both:
        for piece in slices:
            choice = choice_of(problem.component_of[piece.component], piece)
            assert choice is not None
            length.append(choice.backward_ms * (piece.layers[1] - piece.layers[0]))
    feeds: list[list[tuple[int, float]]] = [[] for _ in length]
    missing = [0] * len(length)
    for link in dependencies_of(problem, slices):
        feeds[link.before].append((link.after, link.delay_ms))
        missing[link.after] += 1
        if both:
            feeds[link.after + count].append((link.before + count, link.delay_ms))
            missing[link.before + count] += 1
    if both:
        for index in range(count):
            feeds[index].append((index + count, 0.0))
            missing[index + count] += 1
    queues = _queues(problem, plan, length)
    busy = [0.0] * problem.cluster.devices
    occupied = [False] * problem.cluster.devices
    events: list[Event] = []
    pending: list[tuple[float, int, Happening, int, int]] = []
    done = 0

    def devices_of(work: int) -> tuple[int, ...]:
        return slices[work % count].devices if length[work] > 0 else ()

    def start_if_ready(work: int, now: float) -> None:
        if missing[work] or any(occupied[d] or not queues[d] or queues[d][0] != work for d in devices_of(work)):
            return
        for device in devices_of(work):
            queues[device].popleft()
            occupied[device] = True
            busy[device] += length[work]
        missing[work] = -1
        events.append(Event(now, "start", work % count, work >= count))
        heapq.heappush(pending, (now + length[work], 1, "end", work, -1))

    for work in range(len(length)):
        start_if_ready(work, 0.0)
    end_ms = 0.0
    while pending:
        now, _, what, work, target = heapq.heappop(pending)
        events.append(Event(now, what, work % count, work >= count, None if target < 0 else target % count))
        if what == "arrive":
            missing[target] -= 1
            start_if_ready(target, now)
            continue
        done += 1
        end_ms = max(end_ms, now)
        for device in devices_of(work):
            occupied[device] = False
        for after, delay in feeds[work]:
            heapq.heappush(pending, (now + delay, 0, "arrive", work, after))
        for device in devices_of(work):
            if queues[device]:
                start_if_ready(queues[device][0], now)
    if done < len(length):
        stuck = next(work for work in range(len(length)) if missing[work] >= 0)
        piece = slices[stuck % count]
        raise InvalidPlanError(
            (f"slices[{stuck % count}] ({piece.component}) never starts: devices wait for one another; reorder them",)
        )
    reduction_ms = max(device_reduction_ms(problem, slices))
    return Simulation(
        events=tuple(events),
        end_ms=end_ms,
        reduction_ms=reduction_ms,
        makespan_ms=end_ms + reduction_ms,
        busy_ms=tuple(busy),
    )


def _queues(problem: WavefrontProblem, plan: WavefrontPlan, length: list[float]) -> list[deque[int]]:
    """Return the work of each device in the plan's order of start; what takes no time needs no turn."""
    count = len(plan.slices)
    starts: list[tuple[float, int]] = [(piece.start_ms, index) for index, piece in enumerate(plan.slices)]
    if len(length) > count:
        starts += [(piece.backward_start_ms or 0.0, count + index) for index, piece in enumerate(plan.slices)]
    queues: list[deque[int]] = [deque() for _ in range(problem.cluster.devices)]
    for _, work in sorted(starts):
        if length[work] > 0:
            for device in plan.slices[work % count].devices:
                queues[device].append(work)
    return queues
