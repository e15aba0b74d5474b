"""List schedules from the allotment program: how many layers of each component run on how many devices, then event by
event whatever is ready and fits, by priority. The start of the annealing on large graphs.
"""

import heapq
from collections.abc import Sequence

from solver_plan.solving import Clock
from solver_plan.wavefront.bounds import least_area_allotments
from solver_plan.wavefront.instance import Instance
from solver_plan.wavefront.schedule import Segment

STRETCHES = (1.0, 1.02, 1.06, 1.12, 1.2)
"""Latest end allowed over the relaxation's: longer allows narrower, cheaper modes."""
Allotment = list[list[tuple[int, int]]]
"""Per component, (choice, layers) in the order in which they run."""


def allotted_lists(instance: Instance, clock: Clock) -> list[tuple[float, list[Segment]]]:
    """Return list schedules as (makespan, segments), best first."""
    found: list[tuple[float, list[Segment]]] = []
    for fractions in least_area_allotments(instance, clock, STRETCHES):
        for widest_first in (True, False):
            allotment = [
                sorted(_whole(instance.layers[c], fractions[c]), reverse=widest_first) for c in instance.components
            ]
            for wide_first in (True, False):
                found.append(list_schedule(instance, allotment, wide_first))
    found.sort(key=lambda each: each[0])
    return found


def _whole(layers: int, fractions: Sequence[float]) -> list[tuple[int, int]]:
    """Round layers per choice to whole numbers of the same sum, largest remainder first."""
    whole = [int(x + 1e-6) for x in fractions]
    by_remainder = sorted(range(len(whole)), key=lambda k: whole[k] - fractions[k])
    for k in by_remainder[: layers - sum(whole)]:
        whole[k] += 1
    return [(k, count) for k, count in enumerate(whole) if count]


def list_schedule(instance: Instance, allotment: Allotment, wide_first: bool) -> tuple[float, list[Segment]]:
    """Start, event by event, whatever is ready and fits, by the longest path that remains (or the widest first)."""
    times = [sum(count * instance.choices[c][k].layer_ms for k, count in allotment[c]) for c in instance.components]
    remaining = [0.0] * len(times)
    for c in reversed(instance.topological):
        remaining[c] = times[c] + max((remaining[after] for after in instance.successors[c]), default=0.0)
    waiting = [len(each) for each in instance.predecessors]
    ready = [c for c in instance.components if not waiting[c]]
    at = [0] * len(times)
    free = instance.devices
    now = 0.0
    running: list[tuple[float, int, int, float]] = []
    order: list[Segment] = []
    while ready or running:
        width = {c: instance.choices[c][allotment[c][at[c]][0]].devices for c in ready}
        ready.sort(key=lambda c: (-width[c] if wide_first else 0, -remaining[c], c))
        for c in list(ready):
            if width[c] <= free:
                choice, count = allotment[c][at[c]]
                duration = count * instance.choices[c][choice].layer_ms
                heapq.heappush(running, (now + duration, c, width[c], duration))
                free -= width[c]
                ready.remove(c)
                order.append(Segment(c, count, choice))
        now = running[0][0]
        while running and running[0][0] <= now * (1 + 1e-12):
            _, c, devices, duration = heapq.heappop(running)
            free += devices
            remaining[c] -= duration
            at[c] += 1
            if at[c] < len(allotment[c]):
                ready.append(c)
                continue
            for after in instance.successors[c]:
                waiting[after] -= 1
                if not waiting[after]:
                    ready.append(after)
    return now, order
