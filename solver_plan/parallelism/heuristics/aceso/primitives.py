"""The primitives of Aceso's search: what one of them does to a bottleneck stage, and its effects as a table.

Each takes a configuration and a target stage and returns configurations that relieve the target; those that need
another stage to give or take (operators, devices) try the partners that were not tried from this configuration before,
the most promising first, until one works (Aceso, section 4.2; `action_resource_table` of its artifact).

    name            time memory devices efficiency communication
    dec_op            -     -      0        0            0         moves operators to the partner, stage by stage
    inc_dp, inc_tp    -     -      +        -            +         takes devices from partners
    dec_dp, dec_tp    +     +      -        +            -         gives devices to partners
    inc_mbs           -     +      0        +            0         all stages
    dec_mbs           +     -      0        -            0         all stages
    inc_tp_dec_dp     +     -      0        -            +         within the stage
    inc_dp_dec_tp     -     +      0        +            -         within the stage
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from solver_plan.parallelism.heuristics.aceso.configuration import (
    Configuration,
    Run,
    StageLayout,
    clipped,
    extended,
    merged,
)
from solver_plan.parallelism.heuristics.aceso.pipeline import Evaluated, Pipelines
from solver_plan.parallelism.heuristics.aceso.stage_costs import Place, StageTrial

GOALS = (0.4, 0.2, 0.0)
"""Shares of the gap between bottleneck and partner by which moving operators is to relieve the bottleneck."""
MOST_MOVES = 5
"""Bottlenecks that one use of dec_op relieves one after the other."""

Tried = set[int]
"""Partners tried before, from the same configuration, for the same target and primitive."""


@dataclass(frozen=True, slots=True)
class Primitive:
    """A change, and the sign of its effects on the target stage."""

    name: str
    time: int
    memory: int
    devices: int
    efficiency: int
    communication: int
    apply: Callable[[Pipelines, Evaluated, int, Tried], list[Configuration]]


# -- operators ------------------------------------------------------------------------------------------------------


def move_operators(pipelines: Pipelines, current: Evaluated, target: int, tried: Tried) -> list[Configuration]:
    """Move operators from the target towards the stage that has most to spare (dec_op, inc_op at the partner)."""
    for partner in _by_spare_time(current, target):
        if partner in tried:
            continue
        tried.add(partner)
        found = []
        for share in GOALS:
            moved = _ripple(pipelines, current, target, partner, share)
            if moved is not None:
                found.append(_move_on(pipelines, moved, share))
        if found:
            return list(dict.fromkeys(found))
    return []


def spare_time(current: Evaluated, stage: int) -> float:
    """Return `efficient_time`: idle time of a stage, weighted with how well its devices work.

    A stage that recomputes gets half its gap to the slowest stage, for its memory is full; another one as much as its
    memory has room for, and half of the rest.
    """
    trial = current.stages[stage]
    slowest = max(other.time_ms for other in current.stages)
    gap = (slowest - trial.time_ms) / slowest if slowest else 0.0
    largest = current.largest_memory_bytes
    if trial.recompute_ms > 0 or largest <= 0:
        idle = gap / 2
    else:
        used = min(gap, max(0.0, 1 - trial.memory_bytes / largest))
        idle = used + (gap - used) / 2
    return idle * trial.devices * (trial.ideal_ms / trial.time_ms if trial.time_ms else 1.0)


def _by_spare_time(current: Evaluated, target: int) -> list[int]:
    others = [number for number in range(len(current.stages)) if number != target]
    if current.fits:
        return sorted(others, key=lambda number: (-spare_time(current, number), number))
    return sorted(others, key=lambda number: (current.stages[number].memory_bytes, number))


def _move_on(pipelines: Pipelines, moved: Configuration, share: float) -> Configuration:
    """Relieve the next bottlenecks in the same way, as long as that helps."""
    current = pipelines.evaluate(moved)
    assert current is not None
    for _ in range(MOST_MOVES - 1):
        target = current.bottlenecks()[0]
        partners = _by_spare_time(current, target)
        further = _ripple(pipelines, current, target, partners[0], share) if partners else None
        following = pipelines.evaluate(further) if further is not None else None
        if following is None or following.order >= current.order:
            break
        current = following
    return current.configuration


def _ripple(pipelines: Pipelines, current: Evaluated, target: int, partner: int, share: float) -> Configuration | None:
    """Pass as few operators as possible from stage to stage, so that each comes below the goal."""
    size, layouts = current.configuration.size, list(current.configuration.stages)
    places = pipelines.places(size, layouts)
    assert places is not None
    slowest = current.stages[target].time_ms
    goal = slowest - share * (slowest - current.stages[partner].time_ms)

    def below(layout: StageLayout, place: Place) -> bool:
        if current.fits and pipelines.costs.least_ms(size, layout) >= goal:
            return False
        trial = pipelines.costs.stage(size, layout, place)
        if trial is None or not trial.fits:
            return False
        return trial.time_ms < goal if current.fits else True

    step = 1 if partner > target else -1
    for number in range(target, partner, step):
        layout, place = layouts[number], places[number]
        moved = _least_to_move(layout, step > 0, lambda rest, place=place: below(rest, place))  # type: ignore[misc]
        if moved is None:
            return None
        if moved == 0:
            return Configuration(size, tuple(layouts)) if number != target else None
        first, end = layout[0].first, layout[-1].end
        following = layouts[number + step]
        if step > 0:
            layouts[number] = clipped(layout, first, end - moved)
            layouts[number + step] = extended(following, end - moved, following[-1].end)
        else:
            layouts[number] = clipped(layout, first + moved, end)
            layouts[number + step] = extended(following, following[0].first, first + moved)
    if not below(layouts[partner], places[partner]):
        return None
    return Configuration(size, tuple(layouts))


def _least_to_move(layout: StageLayout, from_end: bool, below: Callable[[StageLayout], bool]) -> int | None:
    """Return the least number of operators to take away, found by doubling and halving; None if none suffices."""
    first, end = layout[0].first, layout[-1].end

    def suffices(count: int) -> bool:
        return below(clipped(layout, first, end - count) if from_end else clipped(layout, first + count, end))

    most = end - first - 1
    if suffices(0):
        return 0
    low, high = 0, 1
    while high <= most and not suffices(high):
        low, high = high, 2 * high
    if high > most:
        if low == most or not suffices(most):
            return None
        high = most
    while high - low > 1:
        middle = (low + high) // 2
        if suffices(middle):
            high = middle
        else:
            low = middle
    return high


# -- devices --------------------------------------------------------------------------------------------------------


def scale_stage(tensor: bool, up: bool) -> Callable[[Pipelines, Evaluated, int, Tried], list[Configuration]]:
    """Return the primitive that changes a stage's tensor (else data) parallel degree and balances the devices."""

    def apply(pipelines: Pipelines, current: Evaluated, target: int, tried: Tried) -> list[Configuration]:
        size, stages = current.configuration
        layout = pipelines.scaled(size, stages[target], tensor, up)
        if layout is None:
            return []
        change = pipelines.devices(size, layout) - current.stages[target].devices
        free = pipelines.problem.cluster.devices - sum(stage.devices for stage in current.stages)
        alone = (*stages[:target], layout, *stages[target + 1 :])
        if change <= free if up else not pipelines.problem.space.use_all_devices:
            return [Configuration(size, alone)] if pipelines.places(size, alone) is not None else []
        missing = change - free if up else -change
        for partner, scaled in _partners(pipelines, current, alone, {target}, not up, missing):
            if partner in tried:
                continue
            tried.add(partner)
            balanced = _balance(pipelines, current, alone, {target}, not up, missing, (partner, scaled))
            if balanced is not None and pipelines.places(size, balanced) is not None:
                return [Configuration(size, balanced)]
        return []

    return apply


def _partners(
    pipelines: Pipelines,
    current: Evaluated,
    stages: tuple[StageLayout, ...],
    busy: set[int],
    up: bool,
    missing: int,
) -> list[tuple[int, StageLayout]]:
    """Return the stages that can take (`up`) or give at most so many devices, the fastest after the change first."""
    size = current.configuration.size
    places = pipelines.places(size, current.configuration.stages)
    assert places is not None
    found: list[tuple[bool, float, int, int, StageLayout]] = []
    for number, layout in enumerate(stages):
        for tensor in (True, False):
            scaled = pipelines.scaled(size, layout, tensor, up) if number not in busy else None
            if scaled is None:
                continue
            if abs(pipelines.devices(size, scaled) - pipelines.devices(size, layout)) > missing:
                continue
            trial = pipelines.costs.stage(size, scaled, places[number])
            if trial is not None:
                key = trial.time_ms if trial.fits else trial.memory_bytes
                found.append((not trial.fits, key, number, int(tensor), scaled))
    best: dict[int, StageLayout] = {}
    for _, _, number, _, scaled in sorted(found):
        best.setdefault(number, scaled)
    return list(best.items())


def _balance(
    pipelines: Pipelines,
    current: Evaluated,
    stages: tuple[StageLayout, ...],
    busy: set[int],
    up: bool,
    missing: int,
    first: tuple[int, StageLayout],
) -> tuple[StageLayout, ...] | None:
    """Chain partners, beginning with `first`, until so many devices have changed hands; None if that never happens."""
    size = current.configuration.size
    partner: tuple[int, StageLayout] | None = first
    while partner is not None:
        number, scaled = partner
        missing -= abs(pipelines.devices(size, scaled) - pipelines.devices(size, stages[number]))
        stages = (*stages[:number], scaled, *stages[number + 1 :])
        busy = {*busy, number}
        if missing == 0:
            return stages
        partner = next(iter(_partners(pipelines, current, stages, busy, up, missing)), None)
    return None


# -- micro-batch and exchange ---------------------------------------------------------------------------------------


def change_micro_batch(step: int) -> Callable[[Pipelines, Evaluated, int, Tried], list[Configuration]]:
    """Return the primitive that takes the next larger (1) or smaller (-1) micro-batch size for all stages.

    Every stage chooses its degrees anew: the fastest that fits, or else the smallest.
    """

    def apply(pipelines: Pipelines, current: Evaluated, target: int, tried: Tried) -> list[Configuration]:
        size = current.configuration.size + step
        if not 0 <= size < len(pipelines.batches) or target in tried:
            return []
        tried.add(target)
        places = pipelines.places(current.configuration.size, current.configuration.stages)
        assert places is not None
        layouts = []
        for layout, trial, place in zip(current.configuration.stages, current.stages, places, strict=True):
            best = min(_uniform(pipelines, size, layout, trial.devices, place), key=_fastest_fitting, default=None)
            if best is None:
                return []
            layouts.append(best[0])
        return [Configuration(size, tuple(layouts))]

    return apply


def _fastest_fitting(option: tuple[StageLayout, StageTrial]) -> tuple[bool, float]:
    trial = option[1]
    return not trial.fits, trial.time_ms if trial.fits else trial.memory_bytes


def _uniform(
    pipelines: Pipelines, size: int, layout: StageLayout, devices: int, place: Place
) -> Iterator[tuple[StageLayout, StageTrial]]:
    """Yield a stage with each choice for all its operators, in the first partition that the choices have."""
    seen: set[int] = set()
    first, end = layout[0].first, layout[-1].end
    for number, costs in enumerate(pipelines.batches[size].choices):
        if costs.choice.devices != devices or costs.choice.tensor_parallel in seen:
            continue
        trial = pipelines.costs.stage(size, (Run(first, end, number),), place)
        if trial is not None:
            seen.add(costs.choice.tensor_parallel)
            yield (Run(first, end, number),), trial


def exchange(to_tensor: bool) -> Callable[[Pipelines, Evaluated, int, Tried], list[Configuration]]:
    """Return the primitive that raises one degree of the target and lowers the other."""

    def apply(pipelines: Pipelines, current: Evaluated, target: int, tried: Tried) -> list[Configuration]:
        size, stages = current.configuration
        runs, changed = [], False
        for run in stages[target]:
            number = pipelines.exchanged(size, run.choice, to_tensor)
            changed |= number is not None
            runs.append(run if number is None else Run(run.first, run.end, number))
        if not changed:
            return []
        return [Configuration(size, (*stages[:target], merged(runs), *stages[target + 1 :]))]

    return apply


PRIMITIVES = (
    Primitive("dec_op", -1, -1, 0, 0, 0, move_operators),
    Primitive("inc_dp", -1, -1, 1, -1, 1, scale_stage(tensor=False, up=True)),
    Primitive("dec_dp", 1, 1, -1, 1, -1, scale_stage(tensor=False, up=False)),
    Primitive("inc_tp", -1, -1, 1, -1, 1, scale_stage(tensor=True, up=True)),
    Primitive("dec_tp", 1, 1, -1, 1, -1, scale_stage(tensor=True, up=False)),
    Primitive("inc_mbs", -1, 1, 0, 1, 0, change_micro_batch(1)),
    Primitive("dec_mbs", 1, -1, 0, -1, 0, change_micro_batch(-1)),
    Primitive("inc_tp_dec_dp", 1, -1, 0, -1, 1, exchange(to_tensor=True)),
    Primitive("inc_dp_dec_tp", -1, 1, 0, 1, -1, exchange(to_tensor=False)),
)
