"""Annealed list scheduling where it matters which devices run a slice: transfers, memory, reductions, two phases.

State: per component its segments (layers, choice, device set), and one list of all work, in two phases forward and
backward, that respects precedence. Decoding: each work in list order starts as early as its devices and its data allow;
no device waits for later work in the list. Every plan is the decoding of its own segments in order of start.

Energy: latest end + reduction time + AREA_WEIGHT * area / devices + a penalty for bytes beyond the memory, relative to
the memory and in proportion to the energy. What a set of weights holds and reduces depends on device sets only, and is
computed anew only for the weights that a move touches.
"""

import math
import random
from collections.abc import Callable, Sequence

from solver_plan.solving import Clock
from solver_plan.wavefront.heuristics.annealing import STEPS_PER_LOOK, tails_of
from solver_plan.wavefront.instance import Instance
from solver_plan.wavefront.schedule import Run, Schedule

AREA_WEIGHT = 0.3
MEMORY_WEIGHT = 3.0
"""Excess of 1 % of one device's memory costs this many percent of the energy."""
START_TEMPERATURE = 0.01
END_TEMPERATURE = 0.0001
MOST_SEGMENTS = 4
SECONDS_PER_STEP = 1.5e-5
SECONDS_PER_WORK = 1.5e-6
SECONDS_PER_DEVICE = 1e-7
"""Deterministic cost of a step, of a decoded piece of work, and of a device of it: about what they take."""

Part = tuple[int, int, tuple[int, ...], int]
"""(layers, choice, devices, their node or -1)."""
Token = int
"""Component c forward: c, its backward: -1 - c. Its k-th forward is part k, its k-th backward part k from the end."""
Holding = tuple[list[float], list[float]]
"""Bytes and reduction ms on each device, of one set of weights."""


class _State:
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
        self.found = math.inf

    def part(self, layers: int, choice: int, devices: Sequence[int]) -> Part:
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
        return sum(len(devices) * layers * self.total[component][choice] for layers, choice, devices, _ in parts)

    def schedule(self, parts: Sequence[Sequence[Part]], order: Sequence[Token]) -> Schedule:
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


def _decode(state: _State, parts: Sequence[Sequence[Part]], order: Sequence[Token], limit: float) -> float:
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


def anneal_devices(
    instance: Instance,
    start: Schedule,
    clock: Clock,
    share: float,
    seed: int,
    on_better: Callable[[Schedule, float], None] | None = None,
    heat: float = 1.0,
) -> tuple[Schedule, float, float]:
    """Improve a schedule for a share of the budget.

    Returns the best schedule, its objective and the bytes by which it breaks the memory, summed over the devices: 0
    where a schedule that keeps it was found. `on_better` is told of schedules that keep it; `heat` scales the start
    temperature.
    """
    rng = random.Random(seed)
    state = _State(instance, start)
    limit_bytes = instance.memory_limit
    weight = AREA_WEIGHT / instance.devices

    def beyond(holdings: Sequence[Holding]) -> tuple[float, float]:
        """Return (excess bytes over all devices, longest reduction)."""
        excess = 0.0
        if limit_bytes is not None:
            for held in zip(*(each[0] for each in holdings), strict=True):
                total = sum(held)
                if total > limit_bytes:
                    excess += total - limit_bytes
        reduction = max(map(sum, zip(*(each[1] for each in holdings), strict=True)))
        return excess, reduction

    parts, order, holdings = state.parts, state.order, state.holdings
    areas = [state.area(c, parts[c]) for c in instance.components]
    latest = _decode(state, parts, order, math.inf)
    excess, reduction = beyond(holdings)
    penalty = MEMORY_WEIGHT * (latest + reduction) / max(1, limit_bytes or 1)
    energy = latest + reduction + weight * sum(areas) + penalty * excess
    best = excess, latest + reduction
    best_parts, best_order, told = [list(each) for each in parts], order[:], best
    share = min(share, clock.remaining)
    end_at = clock.remaining - share
    hot = heat * START_TEMPERATURE
    cooling = math.log(END_TEMPERATURE / hot)
    while share > 0:
        progress = 1 - (clock.remaining - end_at) / share
        if progress >= 1 or clock.expired:
            break
        temperature = (best[1] if best[0] == 0 else energy) * hot * math.exp(cooling * progress)
        work = width = 0
        for _ in range(STEPS_PER_LOOK):
            moved = _move(state, parts, order, rng)
            if moved is None:
                continue
            changed, new_order = moved
            threshold = energy - temperature * math.log(1.0 - rng.random())
            new_parts, new_holdings, new_areas = parts, holdings, areas
            new_excess, new_reduction = excess, reduction
            if changed:
                new_parts = parts[:]
                new_areas = areas[:]
                for component, each in changed:
                    new_parts[component] = each
                    new_areas[component] = state.area(component, each)
                new_holdings = holdings[:]
                for key in {instance.parameters[component] for component, _ in changed}:
                    new_holdings[key] = state.holding(key, new_parts)
                new_excess, new_reduction = beyond(new_holdings)
            rest = new_reduction + weight * sum(new_areas) + penalty * new_excess
            latest = _decode(state, new_parts, new_order, threshold - rest)
            work += len(new_order)
            if latest + rest > threshold:
                continue
            parts, order, holdings, areas = new_parts, new_order, new_holdings, new_areas
            excess, reduction, energy = new_excess, new_reduction, latest + rest
            if (excess, latest + reduction) < best:
                best = excess, latest + reduction
                best_parts, best_order = [list(each) for each in parts], order[:]
        width = sum(len(part[2]) for each in parts for part in each)
        pieces = max(1, sum(map(len, parts)))
        clock.spend(SECONDS_PER_STEP * STEPS_PER_LOOK + work * (SECONDS_PER_WORK + SECONDS_PER_DEVICE * width / pieces))
        if on_better is not None and best < told and best[0] == 0:
            told = best
            on_better(state.schedule(best_parts, best_order), best[1])
    return state.schedule(best_parts, best_order), best[1], best[0]


Change = tuple[list[tuple[int, list[Part]]], list[Token]]
"""Components with new parts, and the list of work."""


def _move(state: _State, parts: list[list[Part]], order: list[Token], rng: random.Random) -> Change | None:
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


def _reorder(state: _State, order: list[Token], rng: random.Random) -> Change | None:
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


def _resized(state: _State, devices: tuple[int, ...], size: int, rng: random.Random) -> list[int]:
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
    state: _State, component: int, each: list[Part], index: int, order: list[Token], rng: random.Random
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
    state: _State, parts: list[list[Part]], component: int, index: int, order: list[Token], rng: random.Random
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
    state: _State, component: int, each: list[Part], index: int, order: list[Token], rng: random.Random
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
    state: _State, component: int, each: list[Part], index: int, order: list[Token], rng: random.Random
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
    component: int, each: list[Part], index: int, order: list[Token], rng: random.Random, state: _State
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
