"""Spindle's wavefront scheduler (ASPLOS 2025, sections 3.3 and 3.4): levels, continuous allocation, waves.

1. Levels: components of one depth in the graph are planned together, levels follow one another.
2. Allocation: relax devices n and layers l to reals. By Weglarz' theorem all components of a level then run from 0 to
   C* with sum n_c = N; C* is found by bisection. n_c between two valid numbers n1 < n2 stands for time-sharing: the
   speed-up is interpolated, t1 = (n2 - n) / (n2 - n1) * C* on n1 and t2 = (n - n1) / (n2 - n1) * C* on n2, rounded
   to whole layers (bi-point rounding). No devices (n1 = 0) is a dummy.
3. Waves: first fit of the rounded tuples (n, l) by a sort rule; all tuples of a wave run the number of layers that
   aligns them best; idle devices are given to the components with most work left (extension).

The released planner differs from the paper in details; where it does, it is followed, with extension on.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from solver_plan.wavefront.instance import Instance
from solver_plan.wavefront.schedule import Segment

LevelRule = Literal["depth", "late"]
SortRule = Literal["bigN_bigT", "bigN_smallT", "smallN", "smallT"]
ExtendRule = Literal["work", "time"]
LEVEL_RULES: tuple[LevelRule, ...] = ("depth", "late")
SORT_RULES: tuple[SortRule, ...] = ("bigN_bigT", "bigN_smallT", "smallN", "smallT")
EXTEND_RULES: tuple[ExtendRule, ...] = ("work", "time")
BISECTION_STEPS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting of the planner."""

    levels: LevelRule
    sort: SortRule
    extend: ExtendRule | None

    @property
    def name(self) -> str:
        """Return the setting as text."""
        return f"{self.levels}/{self.sort}/{self.extend or 'no extension'}"


SETTINGS = tuple(
    Setting(levels=levels, sort=sort, extend=extend)
    for levels, sort, extend in product(LEVEL_RULES, SORT_RULES, EXTEND_RULES)
)
"""All settings with extension on."""


@dataclass(slots=True)
class _Tuple:
    """Layers of a component that wait to run on a number of devices."""

    component: int
    choice: int
    layers: int


@dataclass(frozen=True, slots=True)
class Wave:
    """What runs side by side, from `start_ms` until all of it has ended."""

    start_ms: float
    end_ms: float
    segments: tuple[Segment, ...]


def spindle_waves(instance: Instance, setting: Setting) -> list[Wave]:
    """Return the waves of a problem in one setting."""
    return _waves(instance, _allocation(instance, setting.levels), setting)


def waves_of_each_setting(instance: Instance) -> Iterator[list[Wave]]:
    """Yield the waves of a problem in each of `SETTINGS`; the allocation depends on the levels only."""
    allocation = {rule: _allocation(instance, rule) for rule in LEVEL_RULES}
    for setting in SETTINGS:
        yield _waves(instance, allocation[setting.levels], setting)


def _allocation(instance: Instance, rule: LevelRule) -> list[list[_Tuple]]:
    return [_rounded(instance, level) for level in levels_of(instance, rule)]


def _waves(instance: Instance, allocation: list[list[_Tuple]], setting: Setting) -> list[Wave]:
    waves: list[Wave] = []
    for level in allocation:
        remaining = [replace(each) for each in level]
        waves.extend(_level_waves(instance, remaining, setting, waves[-1].end_ms if waves else 0.0))
    return waves


def levels_of(instance: Instance, rule: LevelRule) -> list[list[int]]:
    """Group components by depth: as early as the edges allow, or as late as possible."""
    depth = [0] * len(instance.layers)
    if rule == "depth":
        for component in instance.topological:
            for after in instance.successors[component]:
                depth[after] = max(depth[after], depth[component] + 1)
    else:
        for component in reversed(instance.topological):
            for before in instance.predecessors[component]:
                depth[before] = max(depth[before], depth[component] + 1)
        depth = [max(depth) - each for each in depth]
    levels: list[list[int]] = [[] for _ in range(max(depth) + 1)]
    for component, at in enumerate(depth):
        levels[at].append(component)
    return [level for level in levels if level]


def allocate(instance: Instance, level: list[int]) -> tuple[float, dict[int, float]]:
    """Return C* and the real number of devices of each component of a level (bisection)."""
    ladders = {component: _ladder(instance, component) for component in level}
    low = max(instance.shortest_ms(component) for component in level)
    high = sum(
        instance.layers[component] * max(choice.layer_ms for choice in instance.choices[component])
        for component in level
    )
    high = max(high, low)

    def devices_at(length_ms: float) -> dict[int, float]:
        found = {}
        for component in level:
            rate = instance.layers[component] / length_ms
            for (n1, r1), (n2, r2) in zip(ladders[component], ladders[component][1:], strict=False):
                if rate <= r2 * (1 + 1e-12):
                    found[component] = n1 + (n2 - n1) * max(0.0, rate - r1) / (r2 - r1)
                    break
            else:
                found[component] = float(ladders[component][-1][0])
        return found

    for _ in range(BISECTION_STEPS):
        middle = (low + high) / 2
        if sum(devices_at(middle).values()) < instance.devices:
            high = middle
        else:
            low = middle
    return high, devices_at(high)


def _ladder(instance: Instance, component: int) -> list[tuple[int, float]]:
    """Return (devices, layers per ms) of the choices that are faster than all with fewer devices, from (0, 0)."""
    ladder = [(0, 0.0)]
    for choice in instance.choices[component]:
        rate = 1.0 / choice.layer_ms
        if rate > ladder[-1][1]:
            if choice.devices == ladder[-1][0]:
                ladder.pop()
            ladder.append((choice.devices, rate))
    return ladder


def _choice_with(instance: Instance, component: int, devices: int) -> int:
    """Return the fastest choice with a number of devices."""
    choices = instance.choices[component]
    fitting = [index for index, choice in enumerate(choices) if choice.devices == devices]
    return min(fitting, key=lambda index: choices[index].layer_ms)


def _rounded(instance: Instance, level: list[int]) -> list[_Tuple]:
    """Bi-point rounding: at most two tuples a component, the larger number of devices first."""
    length_ms, devices = allocate(instance, level)
    found = []
    for component in level:
        ladder = [n for n, _ in _ladder(instance, component)]
        n = devices[component]
        n1 = max(each for each in ladder if each <= n + 1e-9)
        n2 = min((each for each in ladder if each > n1), default=n1)
        layers = instance.layers[component]
        if n1 == n2 or abs(n - n1) <= 1e-9:
            found.append(_Tuple(component, _choice_with(instance, component, n1), layers))
            continue
        high = _choice_with(instance, component, n2)
        if n1 == 0:
            found.append(_Tuple(component, high, layers))
            continue
        low = _choice_with(instance, component, n1)
        times = instance.choices[component]
        on_low = round((n2 - n) / (n2 - n1) * length_ms / times[low].layer_ms)
        on_high = round((n - n1) / (n2 - n1) * length_ms / times[high].layer_ms)
        on_high = min(layers, on_high)
        on_low = layers - on_high
        found += [_Tuple(component, choice, count) for choice, count in ((high, on_high), (low, on_low)) if count > 0]
    return found


def _level_waves(instance: Instance, remaining: list[_Tuple], setting: Setting, start_ms: float) -> Iterator[Wave]:
    choices = instance.choices

    def width(each: _Tuple) -> float:
        return each.layers * choices[each.component][each.choice].layer_ms

    def devices(each: _Tuple) -> int:
        return choices[each.component][each.choice].devices

    def key(each: _Tuple) -> tuple[float, ...]:
        whole = 0 if devices(each) == instance.devices else 1
        rules: dict[SortRule, tuple[float, ...]] = {
            "bigN_bigT": (-devices(each), -width(each)),
            "bigN_smallT": (-devices(each), width(each)),
            "smallN": (devices(each), -width(each)),
            "smallT": (width(each), devices(each)),
        }
        return whole, *rules[setting.sort]

    while remaining:
        remaining.sort(key=key)
        free = instance.devices
        wave: list[_Tuple] = []
        for each in remaining:
            if devices(each) <= free and all(each.component != other.component for other in wave):
                wave.append(each)
                free -= devices(each)
        shortest = min(width(each) for each in wave)
        layer_ms = [choices[each.component][each.choice].layer_ms for each in wave]
        wave_ms = max(max(round(shortest / t), 1) * t for t in layer_ms)
        running = [
            [each.choice, min(each.layers, int(wave_ms / t + 1e-9))] for each, t in zip(wave, layer_ms, strict=True)
        ]
        if setting.extend is not None and free > 0:
            _extend(instance, wave, remaining, running, free, wave_ms, setting.extend)
        segments = []
        for each, (choice, layers) in zip(wave, running, strict=True):
            segments.append(Segment(each.component, layers, choice))
            _consume(remaining, each, layers)
        remaining = [each for each in remaining if each.layers > 0]
        end_ms = start_ms + max(each.layers * choices[each.component][each.choice].layer_ms for each in segments)
        yield Wave(start_ms, end_ms, tuple(segments))
        start_ms = end_ms


def _consume(remaining: list[_Tuple], ran: _Tuple, layers: int) -> None:
    """Take layers off the tuple that ran, then off the other one of its component."""
    taken = min(ran.layers, layers)
    ran.layers -= taken
    layers -= taken
    for each in remaining:
        if layers > 0 and each.component == ran.component:
            taken = min(each.layers, layers)
            each.layers -= taken
            layers -= taken
    assert layers == 0


def _extend(
    instance: Instance,
    wave: list[_Tuple],
    remaining: list[_Tuple],
    running: list[list[int]],
    free: int,
    wave_ms: float,
    rule: ExtendRule,
) -> None:
    """Give idle devices to the components with most left, while that lets them run more layers in the wave."""

    left: dict[int, int] = {}
    for each in remaining:
        left[each.component] = left.get(each.component, 0) + each.layers

    def wider(place: int) -> int | None:
        choices = instance.choices[wave[place].component]
        now = choices[running[place][0]]
        fitting = [
            index
            for index, choice in enumerate(choices)
            if now.devices < choice.devices <= now.devices + free and choice.layer_ms < now.layer_ms
        ]
        return min(fitting, key=lambda index: (choices[index].devices, choices[index].layer_ms), default=None)

    def need(place: int) -> float:
        each = wave[place]
        choices = instance.choices[each.component]
        rest = left[each.component] - running[place][1]
        now = choices[running[place][0]]
        if rule == "work":
            return rest * choices[0].layer_ms * choices[0].devices / now.devices
        return rest * now.layer_ms / now.devices

    while free > 0:
        for place in sorted(range(len(wave)), key=lambda place: -need(place)):
            choice = wider(place)
            if choice is None:
                continue
            found = instance.choices[wave[place].component][choice]
            layers = min(left[wave[place].component], int(wave_ms / found.layer_ms + 1e-9))
            if layers > running[place][1]:
                free -= found.devices - instance.choices[wave[place].component][running[place][0]].devices
                running[place] = [choice, layers]
                break
        else:
            break
    while free > 0:
        choices = instance.choices
        by_time = sorted(
            range(len(wave)),
            key=lambda place: -running[place][1] * choices[wave[place].component][running[place][0]].layer_ms,
        )
        for place in by_time:
            choice = wider(place)
            if choice is not None:
                now = choices[wave[place].component][running[place][0]]
                free -= choices[wave[place].component][choice].devices - now.devices
                running[place][0] = choice
                break
        else:
            break
