"""A home for each layer: all components that share its weights run it on the same few devices, inside one node.

Gradients of a layer that runs on several nodes are summed over the links between them, which can take longer than
what the devices gain. So the sets of weights are dealt out over groups of devices, at most a node, one group after
another: each group gets work until it has its share, and a set that does not fit is cut between two layers, whose
transfer is cheap beside the sum (McNaughton's wrap-around rule, 1959, with groups for machines). Within its group a
component takes as many devices as do not waste much, and what can start first starts first.
"""

import itertools
from collections.abc import Iterator

from solver_plan.wavefront.instance import Instance
from solver_plan.wavefront.schedule import Run, Schedule

WASTES = (1.0, 3.0, 0.3, 0.1)
"""Of the least device time of a layer, that more devices may waste: the most promising first."""
ROUNDS = (1, 2)
"""Chunks of a set's layers in each of its groups: shorter ones fill the pipeline sooner, and move data more often."""
Home = tuple[int, int, int]
"""(first layer, end layer, group)."""


def at_home(instance: Instance) -> Iterator[Schedule]:
    """Yield schedules in which each layer of a set of weights has its home, in groups of a node and of half a node."""
    node = min(instance.devices, instance.cluster.devices_per_node)
    for size in (node, node // 2):
        if size and instance.devices % size == 0 and size < instance.devices:
            for waste in WASTES:
                choices = [_choice(instance, component, size, waste) for component in instance.components]
                if None not in choices:
                    chosen = [choice for choice in choices if choice is not None]
                    homes = _homes(instance, chosen, instance.devices // size)
                    for rounds, longest_first in itertools.product(ROUNDS, (True, False)):
                        dealt = [_in_rounds(each, rounds) for each in homes]
                        yield _listed(instance, chosen, dealt, size, longest_first)


def _choice(instance: Instance, component: int, size: int, waste: float) -> int | None:
    """Return the widest choice of a group that wastes little device time; None where none fits into the group."""
    choices = instance.choices[component]
    fitting = [index for index, choice in enumerate(choices) if choice.devices <= size]
    if not fitting:
        return None
    least = min(choices[index].devices * choices[index].layer_ms for index in fitting)
    good = [i for i in fitting if choices[i].devices * choices[i].layer_ms <= least * (1 + waste)]
    return min(good, key=lambda index: choices[index].layer_ms)


def _homes(instance: Instance, chosen: list[int], groups: int) -> list[list[Home]]:
    """Return, for each set of weights, the ranges of its layers with their groups: those with most work first."""
    per_layer = [0.0] * (max(instance.parameters) + 1)
    layers = [0] * len(per_layer)
    for component, choice_index in enumerate(chosen):
        choice = instance.choices[component][choice_index]
        per_layer[instance.parameters[component]] += choice.devices * choice.layer_ms
        layers[instance.parameters[component]] = instance.layers[component]
    share = sum(work * count for work, count in zip(per_layer, layers, strict=True)) / groups
    group, room = 0, share
    found: list[list[Home]] = [[] for _ in per_layer]
    for key in sorted(range(len(per_layer)), key=lambda key: -per_layer[key] * layers[key]):
        at = 0
        while at < layers[key]:
            fit = layers[key] - at
            if group < groups - 1:
                fit = min(fit, round(room / per_layer[key]) if per_layer[key] > 0 else fit)
            if fit > 0:
                found[key].append((at, at + fit, group))
                at += fit
                room -= fit * per_layer[key]
            if at < layers[key]:
                group, room = group + 1, room + share
    return found


def _in_rounds(homes: list[Home], rounds: int) -> list[Home]:
    """Deal the layers of a set of weights out over its groups in several rounds."""
    if len(homes) == 1:
        return homes
    found: list[Home] = []
    at = 0
    for number in range(rounds):
        for first, end, group in homes:
            layers = (end - first) * (number + 1) // rounds - (end - first) * number // rounds
            if layers:
                found.append((at, at + layers, group))
                at += layers
    return found


def _listed(instance: Instance, chosen: list[int], homes: list[list[Home]], size: int, longest_first: bool) -> Schedule:
    """Schedule the runs: always the work that can start first; of several that with most, or least, left after it."""
    free = [0.0] * instance.devices
    ranges = [homes[key] for key in instance.parameters]
    steps = [len(each) * (2 if instance.two_phases else 1) for each in ranges]
    at = [0] * len(chosen)
    ready = [0.0] * len(chosen)
    waiting = [len(each) for each in instance.predecessors]
    behind = [len(each) for each in instance.successors]
    open_components = {c for c in instance.components if not waiting[c]}
    runs: list[Run] = []
    order: list[tuple[int, bool]] = []
    mine: list[list[int]] = [[] for _ in chosen]

    def devices_of(c: int) -> tuple[int, ...]:
        """Return the devices of the next work; of those that are free in time, the ones that became so last."""
        if at[c] >= len(ranges[c]):
            return runs[mine[c][steps[c] - 1 - at[c]]].devices
        first = ranges[c][at[c]][2] * size
        count = instance.choices[c][chosen[c]].devices
        group = sorted(range(first, first + size), key=lambda device: (free[device], device))
        start = max(ready[c], free[group[count - 1]])
        usable = [device for device in group if free[device] <= start]
        return tuple(sorted(sorted(usable, key=lambda device: (-free[device], device))[:count]))

    def urgency(c: int) -> tuple[float, float, int]:
        start = max(ready[c], *(free[device] for device in devices_of(c)))
        left = (steps[c] - at[c]) * instance.choices[c][chosen[c]].layer_ms
        return start, -left if longest_first else left, c

    while open_components:
        c = min(open_components, key=urgency)
        start, devices = urgency(c)[0], devices_of(c)
        choice = instance.choices[c][chosen[c]]
        count = len(ranges[c])
        forward = at[c] < count
        if forward:
            first, end, _ = ranges[c][at[c]]
            mine[c].append(len(runs))
            order.append((len(runs), True))
            runs.append(Run(c, first, end, chosen[c], devices))
            length = (end - first) * (choice.forward_ms if instance.two_phases else choice.layer_ms)
        else:
            index = mine[c][steps[c] - 1 - at[c]]
            order.append((index, False))
            length = (runs[index].end - runs[index].first) * choice.backward_ms
        ready[c] = start + length
        for device in devices:
            free[device] = ready[c]
        at[c] += 1
        after = instance.successors[c] if at[c] == count else instance.predecessors[c] if at[c] == steps[c] else ()
        left = waiting if at[c] == count else behind
        if at[c] == steps[c] or (at[c] == count and behind[c]):
            open_components.remove(c)
        for other in after:
            ready[other] = max(ready[other], ready[c])
            left[other] -= 1
            if not left[other]:
                open_components.add(other)
    return Schedule(tuple(runs), tuple(index if is_forward else len(runs) + index for index, is_forward in order))
