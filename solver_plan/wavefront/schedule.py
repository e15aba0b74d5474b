"""A schedule without times: what runs where and in which order; and the earliest times that follow from it.

Every plan is the earliest plan of its own order: moving each piece of work as early as its devices, its predecessors
and its transfers allow never makes it longer (semi-active schedules).
"""

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from solver_plan.documents import digest_of
from solver_plan.wavefront.check import examine
from solver_plan.wavefront.costs import transfer_ms
from solver_plan.wavefront.instance import Instance
from solver_plan.wavefront.plan import Slice, WavefrontPlan


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive layers of a component on a set of devices."""

    component: int
    first: int
    end: int
    choice: int
    """Index into the instance's choices."""
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Runs and the order in which their work starts.

    `order` names work: i is run i (its forward, in two phases), len(runs) + i the backward of run i.
    """

    runs: tuple[Run, ...]
    order: tuple[int, ...]
    barriers: frozenset[int] = frozenset()
    """Places in `order` before which all earlier work must have ended (Spindle's waves)."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive layers of a component on a number of devices: which ones is open."""

    component: int
    layers: int
    choice: int


def earliest_times(instance: Instance, schedule: Schedule) -> list[tuple[float, float]]:
    """Return start and end of each work of a schedule, each as early as the order allows.

    The order must respect precedence: work appears after all that it waits for.
    """
    runs = schedule.runs
    count = len(runs)
    waits = _waits(instance, runs)
    waited_by: list[list[tuple[int, float]]] = [[] for _ in runs]
    for after, links in enumerate(waits):
        for before, delay in links:
            waited_by[before].append((after, delay))
    free = [0.0] * instance.devices
    times: list[tuple[float, float] | None] = [None] * (2 * count if instance.two_phases else count)
    latest = barrier = 0.0
    for place, work in enumerate(schedule.order):
        if place in schedule.barriers:
            barrier = latest
        index = work % count
        run = runs[index]
        choice = instance.choices[run.component][run.choice]
        if not instance.two_phases:
            layer_ms, links = choice.layer_ms, waits[index]
        elif work < count:
            layer_ms, links = choice.forward_ms, waits[index]
        else:
            layer_ms = choice.backward_ms
            links = [(index, 0.0), *((after + count, delay) for after, delay in waited_by[index])]
        start = barrier
        if layer_ms > 0:
            start = max(start, max(free[device] for device in run.devices))
        for before, delay in links:
            span = times[before]
            assert span is not None, "the order breaks precedence"
            start = max(start, span[1] + delay)
        end = start + layer_ms * (run.end - run.first)
        times[work] = start, end
        latest = max(latest, end)
        if layer_ms > 0:
            for device in run.devices:
                free[device] = end
    found = [span for span in times if span is not None]
    assert len(found) == len(times), "the order leaves work out"
    return found


def _waits(instance: Instance, runs: Sequence[Run]) -> list[list[tuple[int, float]]]:
    """Return, for each run, the runs that its forward waits for, with transfer delays."""
    of: list[list[int]] = [[] for _ in instance.components]
    for index in sorted(range(len(runs)), key=lambda index: runs[index].first):
        of[runs[index].component].append(index)

    def delay(before: int, after: int) -> float:
        size = instance.output_bytes[runs[before].component]
        return transfer_ms(instance.cluster, size, runs[before].devices, runs[after].devices)

    waits: list[list[tuple[int, float]]] = [[] for _ in runs]
    for component, indices in enumerate(of):
        for before, after in itertools.pairwise(indices):
            waits[after].append((before, delay(before, after)))
        for predecessor in instance.predecessors[component]:
            before = of[predecessor][-1]
            waits[indices[0]].append((before, delay(before, indices[0])))
    return waits


def plan_of(instance: Instance, schedule: Schedule) -> WavefrontPlan:
    """Return the plan of a schedule, with its predicted costs and without a certificate."""
    times = earliest_times(instance, schedule)
    problem = instance.problem
    count = len(schedule.runs)
    slices: list[Slice] = []
    by_start = sorted(range(count), key=lambda index: (times[index], schedule.runs[index].component))
    for index in by_start:
        run = schedule.runs[index]
        start, end = times[index]
        backward = times[index + count] if instance.two_phases else (None, None)
        slices.append(
            Slice(
                component=problem.components[run.component].name,
                layers=(run.first, run.end),
                mode=instance.choices[run.component][run.choice].mode,
                devices=tuple(sorted(run.devices)),
                start_ms=start,
                end_ms=end,
                backward_start_ms=backward[0],
                backward_end_ms=backward[1],
            )
        )
    plan = WavefrontPlan(problem_digest=digest_of(problem), slices=tuple(_merged(slices)))
    return WavefrontPlan(
        problem_digest=plan.problem_digest, slices=plan.slices, predicted=examine(problem, plan).predicted
    )


def _merged(slices: Sequence[Slice]) -> list[Slice]:
    """Join slices of a component that follow one another at once in the same way."""
    kept: list[Slice] = []
    last_of: dict[str, int] = {}
    for piece in slices:
        place = last_of.get(piece.component)
        before = None if place is None else kept[place]
        if (
            place is not None
            and before is not None
            and (before.devices, before.mode, before.layers[1]) == (piece.devices, piece.mode, piece.layers[0])
            and before.end_ms == piece.start_ms
            and before.backward_start_ms == piece.backward_end_ms
        ):
            kept[place] = Slice(
                component=piece.component,
                layers=(before.layers[0], piece.layers[1]),
                mode=piece.mode,
                devices=piece.devices,
                start_ms=before.start_ms,
                end_ms=piece.end_ms,
                backward_start_ms=piece.backward_start_ms,
                backward_end_ms=before.backward_end_ms,
            )
        else:
            last_of[piece.component] = len(kept)
            kept.append(piece)
    return kept


def in_list_order(instance: Instance, runs: Sequence[Run]) -> Schedule:
    """Return the schedule that starts runs in list order, and in two phases their backward in the reverse order."""
    count = len(runs)
    order = tuple(range(count))
    if instance.two_phases:
        order = (*order, *(count + index for index in reversed(range(count))))
    return Schedule(tuple(runs), order)


def with_devices(instance: Instance, segments: Sequence[Segment]) -> Schedule:
    """Choose devices for segments in list order.

    Each segment starts as early as the number of free devices allows, on the devices that became free last, which
    leaves the early ones for the rest of the list; of those that became free together it keeps its own.
    In two phases the backward runs in the reverse order, after every forward.
    """
    free = [(0.0, device) for device in range(instance.devices)]
    ready = [0.0] * len(instance.layers)
    next_layer = [0] * len(instance.layers)
    last: list[frozenset[int]] = [frozenset()] * len(instance.layers)
    runs: list[Run] = []
    for segment in segments:
        component = segment.component
        choice = instance.choices[component][segment.choice]
        start = max(ready[component], free[choice.devices - 1][0])
        usable = free[: bisect_right(free, (start, instance.devices))]
        usable.sort(key=lambda entry: (-entry[0], entry[1] not in last[component], entry[1]))
        chosen = usable[: choice.devices]
        end = start + choice.layer_ms * segment.layers
        for entry in chosen:
            free.remove(entry)
        for _, device in sorted(chosen):
            free.insert(bisect_left(free, (end, device)), (end, device))
        devices = tuple(sorted(device for _, device in chosen))
        first = next_layer[component]
        runs.append(Run(component, first, first + segment.layers, segment.choice, devices))
        next_layer[component] = first + segment.layers
        last[component] = frozenset(devices)
        ready[component] = end
        if next_layer[component] == instance.layers[component]:
            for after in instance.successors[component]:
                ready[after] = max(ready[after], end)
    return in_list_order(instance, runs)


def segments_of(schedule: Schedule, times: Sequence[tuple[float, float]]) -> list[Segment]:
    """Return the runs as segments in the order in which they start."""
    by_start = sorted(range(len(schedule.runs)), key=lambda index: (times[index], index))
    return [
        Segment(run.component, run.end - run.first, run.choice) for run in (schedule.runs[index] for index in by_start)
    ]
