"""Local search over placements and device programs for problems with streaming.

A state is a placement and a program (the slot of each streamed update); its value is the least period of the layout of
`streaming.py`. Moves change one or two layers. Many states have the same period, so ties are taken, and a state a
little worse than the best is tolerated (threshold accepting, Dueck and Scheuer 1990), less and less.
"""

import random
from collections.abc import Callable, Iterator, Sequence

from solver_plan.offload.bounds import Inequality, relaxed_period_ms
from solver_plan.offload.operations import Placement, resident_bytes
from solver_plan.offload.plan import Place
from solver_plan.offload.problem import OffloadProblem
from solver_plan.offload.state_flow import Program, Slot
from solver_plan.offload.streaming import Streamed, at_once, best_layout, lay_out
from solver_plan.solving.budget import Clock

SECONDS_PER_OPERATION = 4e-5
"""Deterministic cost of laying out and retiming one operation."""
TOLERANCE = 0.004
"""How much worse than the one before a state may be at the beginning of a round."""
STARTS = 5
"""So many of the best seeds are searched from."""
FIRST_TRIAL = 1.03
"""Seeds are laid out for this multiple of their lower bound."""
STEPS_PER_ROUND = 400
FOCUSED = 0.7
"""Share of the moves that change a layer of the critical cycle."""
FLOWING = 0.5
"""Share of the moved placements whose updates stand where the flow of the states puts them."""


def improve(
    problem: OffloadProblem,
    rows: Sequence[Inequality],
    seeds: Sequence[Placement],
    clock: Clock,
    *,
    limit: float,
    enough: Callable[[], bool],
    on_better: Callable[[Streamed], None],
) -> Streamed | None:
    """Search from the best seed on until the limit, in rounds of falling tolerance.

    Parameters
    ----------
    problem, rows
        The problem and its inequalities (`bounds.inequalities`).
    seeds
        Placements to start from.
    clock, limit
        Use at most this much of what is left.
    enough
        Asked after each step; True ends the search.
    on_better
        Told each timeline that is better than all before.
    """
    draws = random.Random(clock.budget.seed)
    stop_at = clock.remaining - limit
    best: Streamed | None = None

    def consider(found: Streamed | None) -> bool:
        nonlocal best
        if found is None:
            return False
        clock.spend(SECONDS_PER_OPERATION * len(found.iteration.operations))
        if best is not None and found.timing.period_ms >= best.timing.period_ms * (1 - 1e-12):
            return False
        best = found
        on_better(found)
        return True

    def over() -> bool:
        return enough() or clock.remaining <= max(0.0, stop_at)

    starts: list[Streamed] = []
    for placement in seeds:
        lower_ms = relaxed_period_ms(rows, placement)
        for program in _programs(placement):
            if best is not None and (over() or lower_ms >= best.timing.period_ms):
                break
            found = lay_out(problem, placement, program, lower_ms * FIRST_TRIAL)
            consider(found)
            if found is not None:
                starts.append(found)
    if best is None:
        return None
    starts.sort(key=lambda found: found.timing.period_ms)
    for found in starts[:STARTS]:
        if not over():
            lower_ms = relaxed_period_ms(rows, found.placement)
            consider(best_layout(problem, found.placement, found.program, lower_ms))
    number = 0
    while not over():
        # first from the best, then from other good starts, then from the best again and again
        current = starts[number] if 0 < number < min(STARTS, len(starts)) else best
        number += 1
        for step in range(STEPS_PER_ROUND):
            if over():
                break
            tolerance = TOLERANCE * (1 - step / STEPS_PER_ROUND) ** 2
            placement, program = _neighbour(problem, current, draws)
            lower_ms = relaxed_period_ms(rows, placement)
            clock.spend(SECONDS_PER_OPERATION)
            if lower_ms > current.timing.period_ms * (1 + tolerance):
                continue
            trial_ms = lower_ms + draws.choice((0.0, 0.5, 0.9, 1.0)) * (current.timing.period_ms - lower_ms)
            flows = placement != current.placement and draws.random() < FLOWING
            found = lay_out(problem, placement, None if flows else program, trial_ms)
            if consider(found) or (
                found is not None and found.timing.period_ms <= current.timing.period_ms * (1 + tolerance)
            ):
                assert found is not None
                current = found
    return best


def alternating(problem: OffloadProblem, streamed: int) -> Iterator[Placement]:
    """Return placements with so many streamed layers spread evenly, and the first ones resident as room allows."""
    count = len(problem.layers)
    for resident_first in (True, False):
        for shift in (0.0, 0.5, 0.999):
            places: list[Place] = ["cpu"] * count
            room = problem.gpu_state_bytes
            for layer in range(count) if resident_first else reversed(range(count)):
                if problem.state_bytes(layer) <= room:
                    room -= problem.state_bytes(layer)
                    places[layer] = "gpu"
            free = [layer for layer, place in enumerate(places) if place == "cpu" and problem.may_stream(layer)]
            number = min(streamed, len(free))
            for position in range(number):
                places[free[int((position + shift) * len(free) / number)]] = "gpu_streamed"
            yield tuple(places)


def _programs(placement: Placement) -> Iterator[Program | None]:
    """As the states flow; all streamed updates as early as can be, between backward and forward, as late as can be, and
    by turns.
    """
    early = at_once(placement)
    yield None
    yield early
    yield dict.fromkeys(early, 0)
    yield {layer: -layer for layer in early}
    yield {layer: layer if number % 2 else -layer for number, layer in enumerate(early)}


def _neighbour(problem: OffloadProblem, current: Streamed, draws: random.Random) -> tuple[Placement, dict[int, Slot]]:
    """Return a random neighbour whose residents fit."""
    focus = sorted({current.iteration.operations[arc.before].layer for arc in current.critical.arcs})
    focus = focus or list(range(len(current.placement)))
    for _ in range(100):
        places = list(current.placement)
        program = dict(current.program)
        if program and draws.random() < 0.4:
            critical = [layer for layer in focus if layer in program]
            for _ in range(draws.choice((1, 1, 2))):
                layer = draws.choice(critical if critical and draws.random() < FOCUSED else sorted(program))
                program[layer] = _random_slot(layer, draws)
            return tuple(places), program
        first = draws.choice(focus) if draws.random() < FOCUSED else draws.randrange(len(places))
        if draws.random() < 0.5:
            others = [place for place in ("cpu", "gpu", "gpu_streamed") if place != places[first]]
            _place(problem, places, program, first, draws.choice(others), draws)  # type: ignore[arg-type]
        else:
            near = draws.random() < 0.5
            second = first + draws.choice((-2, -1, 1, 2)) if near else draws.randrange(len(places))
            if not 0 <= second < len(places) or places[first] == places[second]:
                continue
            one, other = places[first], places[second]
            _place(problem, places, program, first, other, draws)
            _place(problem, places, program, second, one, draws)
        if tuple(places) != current.placement and resident_bytes(problem, places) <= problem.gpu_state_bytes:
            return tuple(places), program
    return current.placement, dict(current.program)


def _place(
    problem: OffloadProblem,
    places: list[Place],
    program: dict[int, Slot],
    layer: int,
    place: Place,
    draws: random.Random,
) -> None:
    if place == "gpu_streamed" and not problem.may_stream(layer):
        return
    places[layer] = place
    program.pop(layer, None)
    if place == "gpu_streamed":
        program[layer] = _random_slot(layer, draws)


def _random_slot(layer: int, draws: random.Random) -> Slot:
    return draws.choice((layer, layer, 0, -layer, draws.randint(-layer, layer), max(0, layer - 1), max(0, layer - 2)))
