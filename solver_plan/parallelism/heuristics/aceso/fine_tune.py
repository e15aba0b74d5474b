"""Fine-tuning of a configuration: other degrees or partitions for parts of a stage (Aceso, section 4.4).

Aceso shifts, from each operator on, the longest run of operators from tensor to data parallelism or back by a factor of
two, and flips the partition of single operators. Here every run [s, e) within operators of one choice is a candidate
for each choice that an exchange or a flip leads to. All runs are ranked at once by the change in time that prefix sums
tell; what is recomputed counts at the stage's present price of a byte. The best few are evaluated exactly, one by one
and many at once. Where a stage has one layout, it changes as a whole.
"""

from collections.abc import Iterator

import numpy as np

from solver_plan.parallelism.heuristics.aceso.configuration import Configuration, Run, StageLayout, rewritten
from solver_plan.parallelism.heuristics.aceso.pipeline import IMPOSSIBLE_MS, Evaluated, Pipelines

CHANGES_PER_RUN = 12
"""Changes that are ranked for each run and other choice."""
EXACT_PER_PRICE = 8
"""Changes that are evaluated for each price, before the next round begins."""
PRICE_FACTORS = (1.0, 4.0)
MOST_ROUNDS = 60
"""Changes at most."""


def fine_tuned(pipelines: Pipelines, current: Evaluated) -> Iterator[Evaluated]:
    """Yield better and better configurations: the slowest stage is changed until nothing makes it faster."""
    for _ in range(MOST_ROUNDS):
        better = _improved_stage(pipelines, current, current.bottlenecks()[0])
        if better is None:
            return
        current = better
        yield current


def _improved_stage(pipelines: Pipelines, current: Evaluated, stage: int) -> Evaluated | None:
    size, stages = current.configuration
    best: Evaluated | None = None
    for layout in _promising(pipelines, current, stage):
        found = pipelines.evaluate(Configuration(size, (*stages[:stage], layout, *stages[stage + 1 :])))
        if found is not None and found.order < (best or current).order:
            best = found
    return best


def _promising(pipelines: Pipelines, current: Evaluated, stage: int) -> list[StageLayout]:
    size, layout = current.configuration.size, current.configuration.stages[stage]
    found: set[StageLayout] = set()
    ordered: list[StageLayout] = []
    for price in _prices(pipelines, current, stage):
        changes = sorted(
            change
            for run in layout
            for number in _options(pipelines, size, run.choice)
            for change in _best_changes(pipelines, size, layout, run, number, price)
        )
        together: list[StageLayout] = [layout]
        used: list[tuple[int, int]] = []
        for _, first, end, number in changes:
            # what neighbours cost each other was ranked for one change at a time: leave an operator between changes
            if all(end < begin or stop < first for begin, stop in used):
                used.append((first, end))
                together.append(rewritten(together[-1], first, end, number))
        several = [together[count] for count in (len(used), len(used) // 2, len(used) // 4) if count > 1]
        for option in (*several, *(rewritten(layout, *change[1:]) for change in changes[:EXACT_PER_PRICE])):
            if option not in found:
                found.add(option)
                ordered.append(option)
    return ordered


def _options(pipelines: Pipelines, size: int, choice: int) -> list[int]:
    """Return the choices that one exchange of degrees or one flip of the partition leads to."""
    exchanged = (pipelines.exchanged(size, choice, True), pipelines.exchanged(size, choice, False))
    return [*(number for number in exchanged if number is not None), *pipelines.other_partitions(size, choice)]


def _prices(pipelines: Pipelines, current: Evaluated, stage: int) -> list[tuple[float, float]]:
    """Return prices in ms of a byte held for a micro-batch and of a byte of weights.

    Nothing, and where the stage recomputes, what it pays now, and a multiple of it.
    """
    size, layout = current.configuration.size, current.configuration.stages[stage]
    trial = current.stages[stage]
    if trial.recompute_ms <= 0:
        return [(0.0, 0.0)]
    places = pipelines.places(size, current.configuration.stages)
    assert places is not None
    marks = np.array(pipelines.costs.marks(size, layout, places[stage]))
    choices = pipelines.batches[size].choices
    held = np.concatenate([choices[run.choice].held_bytes[run.first : run.end] for run in layout])
    price = trial.recompute_ms / max(1.0, float(held[marks].sum()))
    copies = (pipelines.problem.state_bytes_per_weight_byte + 1) / (places[stage].behind + 1)
    return [(0.0, 0.0), *((factor * price, factor * price * copies) for factor in PRICE_FACTORS)]


def _best_changes(
    pipelines: Pipelines, size: int, layout: StageLayout, run: Run, number: int, price: tuple[float, float]
) -> Iterator[tuple[float, int, int, int]]:
    """Yield (change in ms, s, e, number) of the most promising [s, e) within a run to get the choice `number`.

    They do not overlap; each is the best one that begins at its first operator.
    """
    first, end, old = run
    costs = [pipelines.batches[size].choices[choice] for choice in (number, old)]
    busy = [
        cost.forward_ms + cost.backward_ms + price[0] * cost.held_bytes + price[1] * cost.weight_bytes for cost in costs
    ]
    change = (np.minimum(busy[0], IMPOSSIBLE_MS) - np.minimum(busy[1], IMPOSSIBLE_MS))[first:end]
    within = [pipelines.handing_over_ms(size, choice, choice) for choice in (number, old)]
    change[1:] += (within[0] - within[1])[first + 1 : end]
    gain = np.concatenate([np.zeros(1), np.cumsum(change)])
    if pipelines.problem.space.layout == "stage":
        if gain[-1] < 0:
            yield float(gain[-1]), first, end, number
        return
    starts, stops = np.zeros(end - first), np.zeros(end - first)
    starts[1:] = (pipelines.handing_over_ms(size, old, number) - within[0])[first + 1 : end]
    stops[:-1] = (pipelines.handing_over_ms(size, number, old) - within[1])[first + 1 : end]
    place = layout.index(run)
    if place > 0:
        before = layout[place - 1].choice
        starts[0] = _between(pipelines, size, before, number, first) - _between(pipelines, size, before, old, first)
    if place < len(layout) - 1:
        after = layout[place + 1].choice
        stops[-1] = _between(pipelines, size, number, after, end) - _between(pipelines, size, old, after, end)
    # change(s, e) = starts[s] - gain[s] + gain[e + 1] + stops[e]: the best e >= s is a minimum from the back
    behind = (gain[1:] + stops)[::-1]
    least = np.minimum.accumulate(behind)
    attained = np.concatenate([np.ones(1, dtype=np.bool_), behind[1:] <= least[:-1]])
    best_stop = (end - first - 1 - np.maximum.accumulate(np.where(attained, np.arange(end - first), 0)))[::-1]
    best = starts - gain[:-1] + least[::-1]
    taken: list[tuple[int, int]] = []
    for s in np.argsort(best, kind="stable"):
        begin, stop = int(first + s), int(first + best_stop[s] + 1)
        if best[s] >= 0 or len(taken) == CHANGES_PER_RUN:
            return
        if all(stop <= other or end_of <= begin for other, end_of in taken):
            taken.append((begin, stop))
            yield float(best[s]), begin, stop, number


def _between(pipelines: Pipelines, size: int, before: int, after: int, operator: int) -> float:
    return float(pipelines.handing_over_ms(size, before, after)[operator])
