"""The state of annealing where it matters which devices run a slice, and its decoding into times.

State: per component its segments (layers, choice, device set), and one list of all work, in two phases forward and
backward, that respects precedence. Decoding: each work in list order starts as early as its devices and its data allow;
no device waits for later work in the list. Every plan is the decoding of its own segments in order of start.

What a set of weights holds and reduces depends on device sets only, and is computed anew only for the weights that a
move touches.
"""

import math
from collections.abc import Sequence

from solver_plan.wavefront.heuristics.annealing import tails_of
from solver_plan.wavefront.instance import Instance
from solver_plan.wavefront.schedule import Run, Schedule

Part = tuple[int, int, tuple[int, ...], int]
"""(layers, choice, devices, their node or -1)."""
Token = int
"""Component c forward: c, its backward: -1 - c. Its k-th forward is part k, its k-th backward part k from the end."""
Holding = tuple[list[float], list[float]]
"""Bytes and reduction ms on each device, of one set of weights."""


class DeviceState:
    """What moves and decoding need to know of a problem, and the state that annealing begins with."""

    def __init__(self, instance: Instance, schedule: Schedule) -> None:
        self.instance = instance
        count = len(schedule.runs)
        self.parts: list[list[Part]] = [[] for _ in instance.components]
        by_layer = sorted(range(count), key=lambda index: schedule.runs[index].first)
        for index in by_layer:
            run = schedule.runs[index]
            self.parts[run.component].append(self.part(run.end - run.first, run.choice, run.devices))
        self.order: list[Token] = [
            schedule.runs[work].component if work < count else -1 - schedule.runs[work - count].component
            for work in schedule.order
        ]
        self.tails = tails_of(instance) if not instance.two_phases else [0.0] * len(instance.layers)
        choices = instance.choices
        self.forward = [
            [choice.forward_ms if instance.two_phases else choice.layer_ms for choice in each] for each in choices
        ]
        self.backward = [[choice.backward_ms for choice in each] for each in choices]
        self.total = [[choice.layer_ms for choice in each] for each in choices]
        self.by_count = [
            {n: [k for k, choice in enumerate(each) if choice.devices == n] for n in {c.devices for c in each}}
            for each in choices
        ]
        cluster = instance.cluster
        self.within = [cluster.ms_to_move(size, True) for size in instance.output_bytes]
        self.across = [cluster.ms_to_move(size, False) for size in instance.output_bytes]
        self.sharing: list[list[int]] = [[] for _ in range(max(instance.parameters) + 1)]
        for component, key in enumerate(instance.parameters):
            self.sharing[key].append(component)
        self.holdings: list[Holding] = [self.holding(key, self.parts) for key in range(len(self.sharing))]

    def part(self, layers: int, choice: int, devices: Sequence[int]) -> Part:
        """Return a part, its devices in order."""
        chosen = tuple(sorted(devices))
        cluster = self.instance.cluster
        node = cluster.node_of(chosen[0])
        return layers, choice, chosen, node if cluster.node_of(chosen[-1]) == node else -1

    def holding(self, key: int, parts: Sequence[Sequence[Part]]) -> Holding:
        """Return what one set of weights costs each device: bytes with activations, and reduction time."""
        instance = self.instance
        cluster = instance.cluster
        held = [0.0] * instance.devices
        reduced = [0.0] * instance.devices
        masks: dict[int, list[int]] = {}  # state bytes -> layers held per device
        holders: dict[int, dict[int, int]] = {}  # layer -> device -> gradient bytes
        gradients = False
        for component in self.sharing[key]:
            at = 0
            for layers, choice_index, devices, _ in parts[component]:
                choice = instance.choices[component][choice_index]
                span = ((1 << layers) - 1) << at
                kept = float(math.ceil(choice.activation_bytes * layers))
                mask = masks.setdefault(choice.state_bytes, [0] * instance.devices)
                for device in devices:
                    held[device] += kept
                    mask[device] |= span
                if choice.gradient_bytes:
                    gradients = True
                    for layer in range(at, at + layers):
                        here = holders.setdefault(layer, {})
                        for device in devices:
                            here[device] = max(here.get(device, 0), choice.gradient_bytes)
                at += layers
        taken = [0] * instance.devices
        for state_bytes in sorted(masks, reverse=True):
            for device, mask_of in enumerate(masks[state_bytes]):
                held[device] += state_bytes * (mask_of & ~taken[device]).bit_count()
                taken[device] |= mask_of
        if gradients:
            for here in holders.values():
                k = len(here)
                if k > 1:
                    within = cluster.in_one_node(list(here))
                    for device, size in here.items():
                        reduced[device] += cluster.ms_to_move(2 * (k - 1) / k * size, within)
        return held, reduced

    def area(self, component: int, parts: Sequence[Part]) -> float:
        """Return device-milliseconds."""
        return sum(len(devices) * layers * self.total[component][choice] for layers, choice, devices, _ in parts)

    def schedule(self, parts: Sequence[Sequence[Part]], order: Sequence[Token]) -> Schedule:
        """Return the schedule that decoding makes of a state."""
        runs: list[Run] = []
        number: list[list[int]] = [[] for _ in parts]
        for component, each in enumerate(parts):
            at = 0
            for layers, choice, devices, _ in each:
                number[component].append(len(runs))
                runs.append(Run(component, at, at + layers, choice, devices))
                at += layers
        forward = [iter(each) for each in number]
        backward = [reversed(each) for each in number]
        works = [next(forward[token]) if token >= 0 else len(runs) + next(backward[-1 - token]) for token in order]
        return Schedule(tuple(runs), tuple(works))


def decode(state: DeviceState, parts: Sequence[Sequence[Part]], order: Sequence[Token], limit: float) -> float:
    """Return the latest end, infinite once it exceeds `limit`."""
    instance = state.instance
    predecessors, successors, two_phases = instance.predecessors, instance.successors, instance.two_phases
    within, across, tails = state.within, state.across, state.tails
    free = [0.0] * instance.devices
    count = len(parts)
    at = [0] * count
    ended = [0.0] * count
    forward_ends: list[list[float]] = [[] for _ in range(count)]
    latest = 0.0
    for token in order:
        if token >= 0:
            component = token
            k = at[component]
            at[component] = k + 1
            layers, choice, devices, node = parts[component][k]
            start = max([free[device] for device in devices])
            if k:
                _, _, other, other_node = parts[component][k - 1]
                ready = ended[component]
                if other != devices:
                    ready += within[component] if other_node == node >= 0 else across[component]
                if ready > start:
                    start = ready
            else:
                for before in predecessors[component]:
                    _, _, other, other_node = parts[before][-1]
                    ready = ended[before]
                    if other != devices:
                        ready += within[before] if other_node == node >= 0 else across[before]
                    if ready > start:
                        start = ready
            end = start + layers * state.forward[component][choice]
            ended[component] = end
            if two_phases:
                forward_ends[component].append(end)
                if k + 1 == len(parts[component]):
                    at[component] = k
            if end + tails[component] > limit:
                return math.inf
            for device in devices:
                free[device] = end
        else:
            component = -1 - token
            k = at[component]
            at[component] = k - 1
            layers, choice, devices, node = parts[component][k]
            start = forward_ends[component][k]
            if k + 1 < len(parts[component]):
                _, _, other, other_node = parts[component][k + 1]
                ready = ended[component]
                if other != devices:
                    ready += within[component] if other_node == node >= 0 else across[component]
                if ready > start:
                    start = ready
            else:
                for after in successors[component]:
                    _, _, other, other_node = parts[after][0]
                    ready = ended[after]
                    if other != devices:
                        ready += within[component] if other_node == node >= 0 else across[component]
                    if ready > start:
                        start = ready
            length = layers * state.backward[component][choice]
            if length > 0:
                available = max([free[device] for device in devices])
                if available > start:
                    start = available
                for device in devices:
                    free[device] = start + length
            end = start + length
            ended[component] = end
            if end > limit:
                return math.inf
        if end > latest:
            latest = end
    return latest
