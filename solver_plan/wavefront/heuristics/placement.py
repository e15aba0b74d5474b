"""Spindle's device placement (section 3.5): wave by wave, keep data and parameters where they are, mind the memory.

Within a wave the segments that move most data choose first. Each tries the candidate device sets in the order of what
they would cost: the transfers into the segment, then the state it would add, then crossing nodes, then the fullest
device. Where no set leaves every device within its memory, alternatives of earlier segments are tried: depth-first
backtracking, bounded in steps.
"""

import itertools
from collections.abc import Sequence

from solver_plan.wavefront.costs import transfer_ms
from solver_plan.wavefront.heuristics.spindle import Wave
from solver_plan.wavefront.instance import Instance
from solver_plan.wavefront.schedule import Run, Schedule

MOST_STEPS = 4000
ALTERNATIVES = 6
"""Device sets that a segment tries before an earlier one has to give way."""


class _Held:
    """What is on the devices so far."""

    def __init__(self, instance: Instance) -> None:
        self.bytes = [0.0] * instance.devices
        self.layers: list[dict[tuple[int, int], int]] = [{} for _ in range(instance.devices)]
        """Per device, state bytes of each (parameters, layer)."""

    def added(self, instance: Instance, run: Run, device: int) -> float:
        """Return the bytes that a run would add to a device."""
        choice = instance.choices[run.component][run.choice]
        if choice.state_bytes == 0:
            return choice.activation_bytes * (run.end - run.first)
        key = instance.parameters[run.component]
        held = self.layers[device]
        state = sum(max(0, choice.state_bytes - held.get((key, layer), 0)) for layer in range(run.first, run.end))
        return state + choice.activation_bytes * (run.end - run.first)

    def put(self, instance: Instance, run: Run) -> list[tuple[int, float, dict[tuple[int, int], int]]]:
        """Add a run; return what undoes it."""
        undo = []
        choice = instance.choices[run.component][run.choice]
        key = instance.parameters[run.component]
        for device in run.devices:
            held = self.layers[device]
            before = {(key, layer): held.get((key, layer), 0) for layer in range(run.first, run.end)}
            undo.append((device, self.bytes[device], before))
            self.bytes[device] += self.added(instance, run, device)
            for place, state in before.items():
                held[place] = max(state, choice.state_bytes)
        return undo

    def take_back(self, undo: list[tuple[int, float, dict[tuple[int, int], int]]]) -> None:
        for device, held_bytes, before in undo:
            self.bytes[device] = held_bytes
            self.layers[device].update(before)


def place_waves(instance: Instance, waves: Sequence[Wave], keep_barriers: bool = True) -> tuple[Schedule, bool]:
    """Choose the devices of every segment of the waves.

    Returns the schedule, and whether it keeps the memory limit: if not, memory was left aside.
    """
    runs = None
    if instance.memory_limit is None or _least_bytes(instance, waves) <= instance.memory_limit * instance.devices:
        runs = _placed(instance, waves, instance.memory_limit)
    fits = runs is not None
    if runs is None:
        runs = _placed(instance, waves, None)
    assert runs is not None
    count = len(runs)
    order = list(range(count))
    barriers = []
    first = 0
    for wave in waves:
        barriers.append(first)
        first += len(wave.segments)
    if instance.two_phases:
        barriers += [2 * count - at for at in barriers]
        order += [count + index for index in reversed(range(count))]
    return Schedule(tuple(runs), tuple(order), frozenset(barriers if keep_barriers else ())), fits


def _least_bytes(instance: Instance, waves: Sequence[Wave]) -> float:
    """Return what the waves need of all devices together, wherever they are placed."""
    states: dict[tuple[int, int], int] = {}
    kept = 0.0
    done = [0] * len(instance.layers)
    for segment in itertools.chain.from_iterable(wave.segments for wave in waves):
        choice = instance.choices[segment.component][segment.choice]
        first = done[segment.component]
        done[segment.component] += segment.layers
        kept += choice.devices * choice.activation_bytes * segment.layers
        for layer in range(first, first + segment.layers):
            place = instance.parameters[segment.component], layer
            states[place] = max(states.get(place, 0), choice.devices * choice.state_bytes)
    return sum(states.values()) + kept


def _placed(instance: Instance, waves: Sequence[Wave], limit: int | None) -> list[Run] | None:
    """Return the runs in wave order, with devices; None if no placement within the limit was found."""
    todo: list[tuple[int, Run]] = []  # (first of its wave, run without devices), most data first within a wave
    number: list[int] = []
    done = [0] * len(instance.layers)
    at = 0
    for wave in waves:
        members = []
        for segment in wave.segments:
            first = done[segment.component]
            done[segment.component] = first + segment.layers
            members.append((at, Run(segment.component, first, first + segment.layers, segment.choice, ())))
            at += 1
        members.sort(key=lambda each: (-_volume(instance, each[1].component), -_width(instance, each[1])))
        todo += [(len(todo), run) for _, run in members]
        number += [place for place, _ in members]
    held = _Held(instance)
    chosen: list[Run] = []
    tried: list[list[Run]] = []
    undo: list[list[tuple[int, float, dict[tuple[int, int], int]]]] = []
    steps = 0
    while len(chosen) < len(todo):
        begin, run = todo[len(chosen)]
        if len(tried) == len(chosen):
            busy = {device for other in chosen[begin:] for device in other.devices}
            candidates = _candidates(instance, chosen, run, held, busy, limit)
            tried.append(list(itertools.islice(candidates, ALTERNATIVES)))
        steps += 1
        if steps > MOST_STEPS:
            return None
        if tried[-1]:
            placed = tried[-1].pop(0)
            undo.append(held.put(instance, placed))
            chosen.append(placed)
        else:
            tried.pop()
            if not chosen:
                return None
            chosen.pop()
            held.take_back(undo.pop())
    by_place = dict(zip(number, chosen, strict=True))
    return [by_place[place] for place in range(len(chosen))]


def _volume(instance: Instance, component: int) -> int:
    """Return the bytes that go in and out of a component."""
    return instance.output_bytes[component] + sum(instance.output_bytes[p] for p in instance.predecessors[component])


def _width(instance: Instance, run: Run) -> int:
    return instance.choices[run.component][run.choice].devices


def _candidates(
    instance: Instance, chosen: Sequence[Run], run: Run, held: _Held, busy: set[int], limit: int | None
) -> list[Run]:
    """Return the run on each candidate device set, cheapest first; sets that break the limit are left out."""
    size = _width(instance, run)
    cluster = instance.cluster
    sources = [
        (other.devices, instance.output_bytes[other.component])
        for other in chosen
        if (other.component == run.component and other.end == run.first)
        or (
            run.first == 0
            and other.component in instance.predecessors[run.component]
            and other.end == instance.layers[other.component]
        )
    ]
    free = [device for device in range(instance.devices) if device not in busy]
    added = {device: held.added(instance, run, device) for device in free}
    if limit is not None:
        free = [device for device in free if held.bytes[device] + added[device] <= limit]
    if len(free) < size:
        return []
    near = {device for devices, _ in sources for device in devices}
    orders = [
        sorted(free, key=lambda d: (d not in near, added[d], held.bytes[d], d)),
        sorted(free, key=lambda d: (added[d], d not in near, held.bytes[d], d)),
        sorted(free, key=lambda d: (held.bytes[d] + added[d], d)),
        free,
    ]
    sets = {tuple(sorted(order[:size])): None for order in orders}
    for order in orders:
        inside: dict[int, list[int]] = {}
        for device in order:
            inside.setdefault(device // cluster.devices_per_node, []).append(device)
        for own in inside.values():
            if len(own) >= size:
                sets[tuple(sorted(own[:size]))] = None
    for first in range(0, len(free) - size + 1, size):
        sets[tuple(free[first : first + size])] = None

    def cost(devices: tuple[int, ...]) -> tuple[float, float, bool, float, tuple[int, ...]]:
        moved = max((transfer_ms(cluster, size_bytes, source, devices) for source, size_bytes in sources), default=0.0)
        changed = not all(set(source) == set(devices) for source, _ in sources)
        state = sum(added[device] for device in devices)
        fullest = max(held.bytes[device] + added[device] for device in devices)
        return moved + (1e-9 if changed else 0.0), state, not cluster.in_one_node(devices), fullest, devices

    return [Run(run.component, run.first, run.end, run.choice, devices) for devices in sorted(sets, key=cost)]
