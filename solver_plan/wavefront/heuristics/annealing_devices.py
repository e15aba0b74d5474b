"""Annealed list scheduling where it matters which devices run a slice: transfers, memory, reductions, two phases.

`device_state` has the state and its decoding, `device_moves` the moves.

Energy: latest end + reduction time + AREA_WEIGHT * area / devices + a penalty for bytes beyond the memory, relative to
the memory and in proportion to the energy.
"""

import math
import random
from collections.abc import Callable, Sequence

from solver_plan.solving import Clock
from solver_plan.wavefront.heuristics.annealing import STEPS_PER_LOOK
from solver_plan.wavefront.heuristics.device_moves import move
from solver_plan.wavefront.heuristics.device_state import DeviceState, Holding, decode
from solver_plan.wavefront.instance import Instance
from solver_plan.wavefront.schedule import Schedule

AREA_WEIGHT = 0.3
MEMORY_WEIGHT = 3.0
"""Excess of 1 % of one device's memory costs this many percent of the energy."""
START_TEMPERATURE = 0.01
END_TEMPERATURE = 0.0001
SECONDS_PER_STEP = 1.5e-5
SECONDS_PER_WORK = 1.5e-6
SECONDS_PER_DEVICE = 1e-7
"""Deterministic cost of a step, of a decoded piece of work, and of a device of it: about what they take."""


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
    state = DeviceState(instance, start)
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
    latest = decode(state, parts, order, math.inf)
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
            moved = move(state, parts, order, rng)
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
            latest = decode(state, new_parts, new_order, threshold - rest)
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
