"""Annealed list scheduling where any free devices will do: segments with device counts, in a priority list.

State: a list of segments (component, layers, choice) that respects precedence. Decoding: each segment in list order
starts as early as its predecessors and the number of free devices allow, on the devices that became free last (best
fit), so the early ones stay for later segments. Every plan is the decoding of its own segments in order of start, so
the best plan is among the states.

Energy: makespan + AREA_WEIGHT * total area / devices + delays beyond a due time a little below the best makespan. The
area (devices times time) is what the makespan cannot fall below, and moves that save area open room that later moves
use; without the penalty the search stalls early.

Speed: decoding resumes from a snapshot before the first changed segment. It stops as soon as the makespan exceeds what
would be accepted (the random threshold is drawn first), by a late segment or by what is idle for good, and as soon as
its state is that of the old list.
"""

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

from solver_plan.solving import Clock
from solver_plan.wavefront.instance import Instance
from solver_plan.wavefront.schedule import Segment

AREA_WEIGHT = 0.9
START_TEMPERATURE = 0.003
"""Of the energy."""
LARGE = 30
"""Components beyond which the start temperature falls: a large graph is disturbed as a whole by every hot move."""
END_TEMPERATURE = 0.00004
SNAPSHOT_EVERY = 8
COMPOUND = 0.3
"""Share of moves that change two places at once."""
NEAR = 16
"""How far apart the two are, at most, in the list."""
LATE_WEIGHT = 0.3
DUE = 0.97
"""Each component that cannot end in time for DUE times the best makespan costs LATE_WEIGHT times its delay: the
makespan alone does not tell a list with one late component from one with many."""
MOST_SEGMENTS = 4
"""Of a component; a move splits no further. Starts may have more."""
SECONDS_PER_STEP = 6e-6
"""Deterministic cost of a step and of a decoded segment: about what they take."""
SECONDS_PER_SEGMENT = 1.8e-6
STEPS_PER_LOOK = 128
"""Steps between two looks at the clock."""

Operation = tuple[int, int, float, int, int, float, float]
"""(component, devices, duration, layers, choice, least time from its end to the end of the plan, area)."""
_Snapshot = tuple[list[float], list[float], list[int], float, float]
"""Before a segment: when devices become free, ascending; when unfinished components are ready; layers left; delays of
what has ended; area of what was placed."""
Places = tuple[int, float]
"""First and last place at which a list was changed; the last is infinite where it became longer or shorter."""


class _State:
    """The priority list, with what decoding needs."""

    def __init__(self, instance: Instance, segments: Sequence[Segment]) -> None:
        self.instance = instance
        self.tails = tails_of(instance)
        self.table = [[(choice.devices, choice.layer_ms) for choice in choices] for choices in instance.choices]
        self.list: list[Operation] = [self.operation(s.component, s.layers, s.choice) for s in segments]
        self.counts = [0] * len(instance.layers)
        for segment in segments:
            self.counts[segment.component] += 1
        self.due = 0.0
        self.found = self.late = 0.0
        """Makespan and delays of the list decoded last."""
        self.makespan = self.delays = 0.0
        """Of this list."""
        self.snapshots: list[_Snapshot] = []

    def operation(self, component: int, layers: int, choice: int) -> Operation:
        devices, layer_ms = self.table[component][choice]
        duration = layer_ms * layers
        return component, devices, duration, layers, choice, self.tails[component], devices * duration

    def area(self) -> float:
        return sum(each[6] for each in self.list)

    def restart(self, area: float) -> float:
        """Decode the list from its start; returns the makespan with delays."""
        keep: list[_Snapshot] = []
        found, _ = decode(self, self.list, (0, math.inf), math.inf, area, keep)
        self.snapshots, self.makespan, self.delays = keep, self.found, self.late
        return found

    def segments(self) -> list[Segment]:
        return [Segment(each[0], each[3], each[4]) for each in self.list]


def tails_of(instance: Instance) -> list[float]:
    """Return the least time from the end of each component to the end of any plan."""
    tails = [0.0] * len(instance.layers)
    for component in reversed(instance.topological):
        for after in instance.successors[component]:
            tails[component] = max(tails[component], instance.shortest_ms(after) + tails[after])
    return tails


def decode(
    state: _State, operations: list[Operation], changed: Places, limit: float, area: float, keep: list[_Snapshot]
) -> tuple[float, int]:
    """Return the makespan with delays of a list, infinite once it exceeds `limit`, and the number of segments decoded.

    Parameters
    ----------
    state
        Holds the snapshots of the list that was changed.
    operations
        The list.
    changed
        First and last place at which it differs; the last is infinite where it is longer or shorter.
    limit
        Above it the makespan is of no interest.
    area
        Of all operations.
    keep
        Receives the snapshots of the new list.
    """
    instance = state.instance
    successors = instance.successors
    first, last = changed
    snapshots = state.snapshots
    block = first // SNAPSHOT_EVERY
    if block < len(snapshots):
        free0, ready0, left0, late, placed = snapshots[block]
        free, ready, left = free0[:], ready0[:], left0[:]
        keep.extend(snapshots[:block])
    else:
        block = 0
        free, ready, left = [0.0] * instance.devices, [0.0] * len(instance.layers), list(instance.layers)
        late = placed = 0.0
    begin = block * SNAPSHOT_EVERY
    place = begin
    due = state.due
    most = instance.devices * limit - area
    for place in range(begin, len(operations)):
        if place % SNAPSHOT_EVERY == 0:
            # what is idle so far stays idle
            if sum(free) - placed > most:
                return math.inf, place - begin
            if place > last:
                then = snapshots[len(keep)]
                if free == then[0] and left == then[2] and ready == then[1] and late == then[3]:
                    keep.extend(snapshots[len(keep) :])
                    state.found, state.late = state.makespan, state.delays
                    return state.found + LATE_WEIGHT * state.late, place - begin
            keep.append((free[:], ready[:], left[:], late, placed))
        component, devices, duration, layers, _, tail, room = operations[place]
        start = ready[component]
        available = free[devices - 1]
        if available > start:
            start = available
        end = start + duration
        if end + tail > limit:
            return math.inf, place - begin + 1
        at = bisect_right(free, start)
        del free[at - devices : at]
        at = bisect_left(free, end)
        free[at:at] = [end] * devices
        placed += room
        left[component] -= layers
        if left[component]:
            ready[component] = end
        else:
            # of no use to what follows: equal states shall look equal
            ready[component] = 0.0
            for after in successors[component]:
                if ready[after] < end:
                    ready[after] = end
            if end + tail > due:
                late += end + tail - due
    state.found = free[-1]
    state.late = late
    return free[-1] + LATE_WEIGHT * late, place - begin + 1


def anneal(
    instance: Instance,
    start: Sequence[Segment],
    clock: Clock,
    share: float,
    seed: int,
    on_better: Callable[[list[Segment], float], None] | None = None,
    heat: float = 1.0,
    area_weight: float = AREA_WEIGHT,
) -> tuple[list[Segment], float]:
    """Improve a list of segments for a share of the budget; returns the best list and its makespan.

    Parameters
    ----------
    instance
        The problem; device sets are ignored.
    start
        Segments in an order that respects precedence.
    clock
        Budget; the work is spent on it.
    share
        How much to use, in the clock's unit.
    seed
        Seeds the random moves.
    on_better
        Told of the best list so far, at looks at the clock.
    heat
        Scales the start temperature: below 1 to improve a good list without losing it.
    area_weight
        Of the energy.
    """
    rng = random.Random(seed)
    state = _State(instance, start)
    area = state.area()
    state.due = math.inf
    makespan = state.restart(area)
    weight = area_weight / instance.devices
    energy = makespan + weight * area
    best, best_makespan, told = state.segments(), makespan, makespan
    share = min(share, clock.remaining)
    end_at = clock.remaining - share
    hot = heat * START_TEMPERATURE * min(1.0, LARGE / len(instance.layers))
    cooling = math.log(END_TEMPERATURE / hot)
    log, uniform = math.log, rng.random
    while share > 0:
        progress = 1 - (clock.remaining - end_at) / share
        if progress >= 1 or clock.expired:
            break
        temperature = energy * hot * math.exp(cooling * progress)
        decoded = 0
        state.due = DUE * best_makespan
        energy = state.restart(area) + weight * area
        for _ in range(STEPS_PER_LOOK):
            moved = _move(state, rng)
            if moved is None:
                continue
            operations, places, change, counted = moved
            threshold = energy - temperature * log(1.0 - uniform())
            limit = threshold - weight * (area + change)
            keep: list[_Snapshot] = []
            makespan, count = decode(state, operations, places, limit, area + change, keep)
            decoded += count
            if makespan > limit:
                continue
            state.list, state.snapshots = operations, keep
            state.makespan, state.delays = state.found, state.late
            area += change
            energy = makespan + weight * area
            if counted is not None:
                state.counts[counted[0]] += counted[1]
            if state.found < best_makespan - 1e-9:
                best, best_makespan = state.segments(), state.found
        clock.spend(SECONDS_PER_STEP * STEPS_PER_LOOK + SECONDS_PER_SEGMENT * decoded)
        if on_better is not None and best_makespan < told:
            told = best_makespan
            on_better(best, best_makespan)
    return best, best_makespan


Move = tuple[list[Operation], Places, float, tuple[int, int] | None]
"""New list, changed places, change of the area, (component, change of its number of segments)."""


def _move(state: _State, rng: random.Random) -> Move | None:
    """Return a random neighbour, None where the draw fits nothing; a third of them change two places at once."""
    place = int(rng.random() * len(state.list))
    moved = _one_move(state, state.list, rng, place)
    if moved is None or rng.random() >= COMPOUND:
        return moved
    operations, places, change, counted = moved
    if counted is not None:
        return moved
    near = place + int((rng.random() - 0.5) * NEAR)
    if not 0 <= near < len(operations):
        return moved
    again = _one_move(state, operations, rng, near)
    if again is None:
        return moved
    both = min(places[0], again[1][0]), max(places[1], again[1][1])
    return again[0], both, change + again[2], again[3]


def _one_move(state: _State, operations: list[Operation], rng: random.Random, place: int) -> Move | None:
    kind = rng.random()
    if kind < 0.35:
        return _reorder(state, operations, rng, place)
    if kind < 0.6:
        return _change_choice(state, operations, rng, place)
    if kind < 0.8:
        return _shift_layers(state, operations, rng, place)
    if kind < 0.9:
        return _split(state, operations, rng, place)
    return _merge(state, operations, rng, place)


def _reorder(state: _State, operations: list[Operation], rng: random.Random, place: int) -> Move | None:
    """Move a segment within what precedence allows."""
    one = operations[place]
    component = one[0]
    # mostly near, sometimes far
    reach = 1 + int(rng.random() ** 3 * len(operations))
    target = place
    if rng.random() < 0.5:
        before = state.instance.predecessors[component]
        while target > 0 and reach > 0:
            other = operations[target - 1][0]
            if other == component or other in before:
                break
            target -= 1
            reach -= 1
    else:
        after = state.instance.successors[component]
        last = len(operations) - 1
        while target < last and reach > 0:
            other = operations[target + 1][0]
            if other == component or other in after:
                break
            target += 1
            reach -= 1
    if target == place:
        return None
    changed = operations[:]
    del changed[place]
    changed.insert(target, one)
    return changed, (min(place, target), max(place, target)), 0.0, None


def _change_choice(state: _State, operations: list[Operation], rng: random.Random, place: int) -> Move | None:
    component, _, _, layers, choice, _, area = operations[place]
    count = len(state.table[component])
    step = 1 if rng.random() < 0.7 else 2
    other = choice + step if rng.random() < 0.5 else choice - step
    if not 0 <= other < count:
        return None
    changed = operations[:]
    new = changed[place] = state.operation(component, layers, other)
    return changed, (place, place), new[6] - area, None


def _next_of(operations: list[Operation], place: int) -> int | None:
    """Return the place of the next segment of the same component."""
    component = operations[place][0]
    for other in range(place + 1, len(operations)):
        if operations[other][0] == component:
            return other
    return None


def _shift_layers(state: _State, operations: list[Operation], rng: random.Random, place: int) -> Move | None:
    """Move layers between two segments of a component."""
    one = operations[place]
    if state.counts[one[0]] < 2:
        return None
    after = _next_of(operations, place)
    if after is None:
        return None
    two = operations[after]
    most = 1 + int(rng.random() ** 2 * (one[3] + two[3]))
    shift = most if rng.random() < 0.5 else -most
    layers = one[3] + shift
    if not 0 < layers < one[3] + two[3]:
        return None
    changed = operations[:]
    first = changed[place] = state.operation(one[0], layers, one[4])
    second = changed[after] = state.operation(one[0], one[3] + two[3] - layers, two[4])
    return changed, (place, after), first[6] + second[6] - one[6] - two[6], None


def _split(state: _State, operations: list[Operation], rng: random.Random, place: int) -> Move | None:
    """Cut a segment in two, one of them on another number of devices."""
    component, _, _, layers, choice, _, area = operations[place]
    if layers < 2 or state.counts[component] >= MOST_SEGMENTS:
        return None
    other = choice + (1 if rng.random() < 0.5 else -1)
    if not 0 <= other < len(state.table[component]):
        return None
    cut = 1 + int(rng.random() * (layers - 1))
    choices = (choice, other) if rng.random() < 0.5 else (other, choice)
    first = state.operation(component, cut, choices[0])
    second = state.operation(component, layers - cut, choices[1])
    changed = operations[:]
    changed[place] = first
    changed.insert(place + 1, second)
    return changed, (place, math.inf), first[6] + second[6] - area, (component, 1)


def _merge(state: _State, operations: list[Operation], rng: random.Random, place: int) -> Move | None:
    """Join two segments of a component, at the place and in the mode of either."""
    one = operations[place]
    if state.counts[one[0]] < 2:
        return None
    after = _next_of(operations, place)
    if after is None:
        return None
    two = operations[after]
    joined = state.operation(one[0], one[3] + two[3], one[4] if rng.random() < 0.5 else two[4])
    changed = operations[:]
    if rng.random() < 0.5:
        changed[place] = joined
        del changed[after]
    else:
        changed[after] = joined
        del changed[place]
    return changed, (place, math.inf), joined[6] - one[6] - two[6], (one[0], -1)
