"""The moves of annealing where it matters which devices run a slice."""

import random
from collections.abc import Sequence

from solver_plan.wavefront.heuristics.device_state import DeviceState, Part, Token

MOST_SEGMENTS = 4

Change = tuple[list[tuple[int, list[Part]]], list[Token]]
"""Components with new parts, and the list of work."""


def move(state: DeviceState, parts: list[list[Part]], order: list[Token], rng: random.Random) -> Change | None:
    """Return a random change; None where the one drawn is impossible."""
    kind = rng.random()
    if kind < 0.3:
        return _reorder(state, order, rng)
    component = rng.randrange(len(parts))
    each = parts[component]
    index = rng.randrange(len(each))
    if kind < 0.45:
        return _resize(state, component, each, index, order, rng)
    if kind < 0.65:
        return _elsewhere(state, parts, component, index, order, rng)
    if kind < 0.8:
        return _shift(state, component, each, index, order, rng)
    if kind < 0.9:
        return _split(state, component, each, index, order, rng)
    return _merge(component, each, index, order, rng, state)


def _reorder(state: DeviceState, order: list[Token], rng: random.Random) -> Change | None:
    place = rng.randrange(len(order))
    token = order[place]
    component = token if token >= 0 else -1 - token
    instance = state.instance
    if token >= 0:
        before = {component, *instance.predecessors[component]}
        after = {component, *instance.successors[component], -1 - component}
    else:
        before = {component, -1 - component, *(-1 - c for c in instance.successors[component])}
        after = {-1 - component, *(-1 - c for c in instance.predecessors[component])}
    reach = 1 + int(rng.random() ** 3 * len(order))
    target = place
    if rng.random() < 0.5:
        while target > 0 and reach > 0 and order[target - 1] not in before:
            target -= 1
            reach -= 1
    else:
        while target < len(order) - 1 and reach > 0 and order[target + 1] not in after:
            target += 1
            reach -= 1
    if target == place:
        return None
    changed = order[:]
    del changed[place]
    changed.insert(target, token)
    return [], changed


def _resized(state: DeviceState, devices: tuple[int, ...], size: int, rng: random.Random) -> list[int]:
    """Return some of the devices, or these and more, mostly of their own nodes."""
    if size <= len(devices):
        if rng.random() < 0.5:
            at = rng.randrange(len(devices) - size + 1)
            return list(devices[at : at + size])
        return rng.sample(devices, size)
    inside = set(devices)
    rest = [device for device in range(state.instance.devices) if device not in inside]
    rng.shuffle(rest)
    if rng.random() < 0.7:
        cluster = state.instance.cluster
        nodes = {cluster.node_of(device) for device in devices}
        rest.sort(key=lambda device: cluster.node_of(device) not in nodes)
    return [*devices, *rest[: size - len(devices)]]


def _resize(
    state: DeviceState, component: int, each: list[Part], index: int, order: list[Token], rng: random.Random
) -> Change | None:
    layers, choice, devices, _ = each[index]
    choices = state.instance.choices[component]
    step = 1 if rng.random() < 0.7 else 2
    other = choice + step if rng.random() < 0.5 else choice - step
    if not 0 <= other < len(choices):
        return None
    changed = each[:]
    changed[index] = state.part(layers, other, _resized(state, devices, choices[other].devices, rng))
    return [(component, changed)], order


def _elsewhere(
    state: DeviceState, parts: list[list[Part]], component: int, index: int, order: list[Token], rng: random.Random
) -> Change | None:
    """Run a part on other devices: one replaced, those of related work, or a block."""
    each = parts[component]
    layers, choice, devices, _ = each[index]
    instance = state.instance
    kind = rng.random()
    if kind < 0.35:
        if len(devices) == instance.devices:
            return None
        new = rng.randrange(instance.devices)
        if new in devices:
            return None
        target = list(devices)
        target[rng.randrange(len(target))] = new
    elif kind < 0.8:
        related = [part for other, part in enumerate(each) if other != index]
        for others in (
            instance.predecessors[component],
            instance.successors[component],
            state.sharing[instance.parameters[component]],
        ):
            related += [part for other in others if other != component for part in parts[other]]
        if not related:
            return None
        source = related[rng.randrange(len(related))][2]
        fitting = state.by_count[component].get(len(source))
        if fitting is None:
            target = _resized(state, source, len(devices), rng)
        else:
            target = list(source)
            if choice not in fitting:
                choice = fitting[rng.randrange(len(fitting))]
    else:
        size = len(devices)
        first = rng.randrange(max(1, instance.devices // size)) * size
        target = list(range(first, min(instance.devices, first + size)))
        if len(target) < size:
            return None
    changed = each[:]
    changed[index] = state.part(layers, choice, target)
    if changed[index] == each[index]:
        return None
    return [(component, changed)], order


def _shift(
    state: DeviceState, component: int, each: list[Part], index: int, order: list[Token], rng: random.Random
) -> Change | None:
    if index + 1 >= len(each):
        return None
    one, two = each[index], each[index + 1]
    most = 1 + int(rng.random() ** 2 * (one[0] + two[0]))
    layers = one[0] + (most if rng.random() < 0.5 else -most)
    if not 0 < layers < one[0] + two[0]:
        return None
    changed = each[:]
    changed[index] = (layers, *one[1:])
    changed[index + 1] = (one[0] + two[0] - layers, *two[1:])
    return [(component, changed)], order


def _places(order: Sequence[Token], token: Token) -> list[int]:
    return [place for place, other in enumerate(order) if other == token]


def _split(
    state: DeviceState, component: int, each: list[Part], index: int, order: list[Token], rng: random.Random
) -> Change | None:
    layers, choice, devices, _ = each[index]
    if layers < 2 or len(each) >= MOST_SEGMENTS:
        return None
    cut = 1 + rng.randrange(layers - 1)
    choices = state.instance.choices[component]
    other = min(len(choices) - 1, max(0, choice + rng.choice((-1, 0, 1))))
    target = _resized(state, devices, choices[other].devices, rng)
    if rng.random() < 0.3:
        target = rng.sample(range(state.instance.devices), choices[other].devices)
    changed = each[:]
    first_is_new = rng.random() < 0.5
    sizes = (cut, layers - cut)
    old = (choice, devices)
    new = (other, target)
    one, two = (new, old) if first_is_new else (old, new)
    changed[index] = state.part(sizes[0], *one)
    changed.insert(index + 1, state.part(sizes[1], *two))
    new_order = order[:]
    new_order.insert(_places(order, component)[index], component)
    if state.instance.two_phases:
        backward = _places(new_order, -1 - component)
        new_order.insert(backward[len(each) - 1 - index], -1 - component)
    return [(component, changed)], new_order


def _merge(
    component: int, each: list[Part], index: int, order: list[Token], rng: random.Random, state: DeviceState
) -> Change | None:
    if index + 1 >= len(each):
        return None
    one, two = each[index], each[index + 1]
    kept = one if rng.random() < 0.5 else two
    changed = each[:]
    changed[index] = (one[0] + two[0], *kept[1:])
    del changed[index + 1]
    new_order = order[:]
    offset = int(rng.random() * 2)
    del new_order[_places(order, component)[index + offset]]
    if state.instance.two_phases:
        backward = _places(new_order, -1 - component)
        del new_order[backward[len(each) - 2 - index + int(rng.random() * 2)]]
    return [(component, changed)], new_order
