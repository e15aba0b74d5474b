"""Pipelines: the devices in groups of equal size, the layers of each set of weights dealt out over the groups.

What is left where memory is tight: no device holds all layers of a large set of weights, and components that share
weights run each layer on the same devices, so that its state is held as seldom as a group is large. Components go
through the groups as batches go through the stages of a pipeline, in several rounds where chunks of layers are dealt
out more than once (interleaved stages): shorter chunks fill the pipeline sooner.
"""

import itertools
from collections.abc import Iterator

from solver_plan.wavefront.instance import Instance
from solver_plan.wavefront.schedule import Run, Schedule, in_list_order

ROUNDS = (1, 2, 4)


def staged(instance: Instance) -> Iterator[list[Schedule]]:
    """Yield, for each number of groups that divides the devices, fewest first, schedules of different rounds."""
    widest = max(min(choice.devices for choice in each) for each in instance.choices)
    for groups in range(1, instance.devices // widest + 1):
        if instance.devices % groups == 0:
            runs = [_in_groups(instance, groups, rounds) for rounds in ROUNDS]
            yield [
                in_list_order(instance, _earliest_first(instance, each, longest_first))
                for each in runs
                for longest_first in (True, False)
            ]


def _in_groups(instance: Instance, groups: int, rounds: int) -> list[list[Run]]:
    """Return the runs of each component: chunks of its layers, dealt out over the groups."""
    size = instance.devices // groups
    chunks = groups * rounds
    found: list[list[Run]] = []
    for component in instance.components:
        choices = instance.choices[component]
        fitting = [index for index, choice in enumerate(choices) if choice.devices <= size]
        choice = min(fitting, key=lambda index: choices[index].layer_ms)
        layers = instance.layers[component]
        own: list[Run] = []
        cuts = [-(-layers * chunk // chunks) for chunk in range(chunks + 1)]
        for chunk, (first, end) in enumerate(itertools.pairwise(cuts)):
            at = chunk % groups * size
            if end > first:
                own.append(Run(component, first, end, choice, tuple(range(at, at + choices[choice].devices))))
        found.append(own)
    return found


def _earliest_first(instance: Instance, runs: list[list[Run]], longest_first: bool) -> list[Run]:
    """Order runs: always the one that can start first; of several the one whose component has most, or least, left."""
    free = [0.0] * instance.devices
    ready = [0.0] * len(runs)
    waiting = [len(each) for each in instance.predecessors]
    at = [0] * len(runs)
    open_components = {c for c in instance.components if not waiting[c]}
    order: list[Run] = []

    def left_ms(c: int) -> float:
        return sum((run.end - run.first) * instance.choices[c][run.choice].layer_ms for run in runs[c][at[c] :])

    left = [left_ms(c) for c in range(len(runs))]

    def urgency(c: int) -> tuple[float, float, int]:
        start = max(ready[c], *(free[device] for device in runs[c][at[c]].devices))
        return start, -left[c] if longest_first else left[c], c

    while open_components:
        c = min(open_components, key=urgency)
        run = runs[c][at[c]]
        choice = instance.choices[c][run.choice]
        length = (run.end - run.first) * (choice.forward_ms if instance.two_phases else choice.layer_ms)
        end = urgency(c)[0] + length
        for device in run.devices:
            free[device] = end
        ready[c] = end
        order.append(run)
        at[c] += 1
        left[c] = left_ms(c)
        if at[c] == len(runs[c]):
            open_components.remove(c)
            for after in instance.successors[c]:
                ready[after] = max(ready[after], end)
                waiting[after] -= 1
                if not waiting[after]:
                    open_components.add(after)
    return order
