"""Fine-tuning of a configuration: other degrees or partitions for parts of a stage (Aceso, section 4.4).

Aceso shifts, from each operator on, the longest run of operators from tensor to data parallelism or back by a factor of
two, and flips the partition of single operators. Here every run [s, e) within operators of one choice is a candidate
for each choice that an exchange or a flip leads to. All runs are ranked at once by the change in time that prefix sums
tell; what is recomputed counts at the stage's present price of a byte. The best few are evaluated exactly. Where a
stage has one layout, it changes as a whole.
"""

from collections.abc import Iterator

import numpy as np

from solver_plan.parallelism.choices import Floats
from solver_plan.parallelism.heuristics.aceso.configuration import Configuration, StageLayout, rewritten
from solver_plan.parallelism.heuristics.aceso.pipeline import Evaluated, Pipelines

EXACT_PER_ROUND = 12
"""Candidates of a stage that are evaluated before the next round begins."""
IMPOSSIBLE_MS = 1e9
"""Stands for what was not profiled in the ranking; the exact evaluation refuses it."""
MOST_ROUNDS = 30
"""Changes of a stage at most."""


def fine_tuned(pipelines: Pipelines, current: Evaluated) -> Iterator[Evaluated]:
    """Yield better and better configurations, one stage after the other, the slowest first."""
    for stage in current.bottlenecks():
        for _ in range(MOST_ROUNDS):
            better = _improved_stage(pipelines, current, stage)
            if better is None:
                break
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
    trial = current.stages[stage]
    places = pipelines.places(size, current.configuration.stages)
    assert places is not None
    choices = pipelines.batches[size].choices
    price = 0.0
    if trial.recompute_ms > 0:
        marks = np.array(pipelines.costs.marks(size, layout, places[stage]))
        held = np.concatenate([choices[run.choice].held_bytes[run.first : run.end] for run in layout])
        recomputed = float(held[marks].sum())
        price = trial.recompute_ms / recomputed if recomputed > 0 else 0.0
    found: list[tuple[float, StageLayout]] = []
    for run in layout:
        options = [
            number
            for number in (
                pipelines.exchanged(size, run.choice, True),
                pipelines.exchanged(size, run.choice, False),
                *pipelines.other_partitions(size, run.choice),
            )
            if number is not None
        ]
        for number in options:
            for change, first, end in _best_runs(pipelines, size, layout, run.first, run.end, number, price):
                found.append((change, rewritten(layout, first, end, number)))
    found.sort(key=lambda entry: entry[0])
    return [layout for _, layout in found[:EXACT_PER_ROUND]]


def _best_runs(
    pipelines: Pipelines, size: int, layout: StageLayout, first: int, end: int, number: int, price: float
) -> Iterator[tuple[float, int, int]]:
    """Yield (change in ms, s, e) of the most promising runs [s, e) within [first, end) to get another choice."""
    choice_of = {x: run.choice for run in layout for x in range(run.first, run.end)}
    old = choice_of[first]

    def handed_over(before: int, after: int, operator: int) -> float:
        time = pipelines.costs.resharding_between(size, before, after, operator)
        return IMPOSSIBLE_MS if time is None else time

    def weight(choice: int) -> Floats:
        costs = pipelines.batches[size].choices[choice]
        value = (costs.forward_ms + costs.backward_ms + price * costs.held_bytes)[first:end]
        value = np.where(np.isfinite(value), value, IMPOSSIBLE_MS)
        inner = [0.0, *(handed_over(choice, choice, x) for x in range(first + 1, end))]
        return np.concatenate([np.zeros(1), np.cumsum(value + np.array(inner))])

    gain = weight(number) - weight(old)
    if pipelines.problem.space.layout == "stage":
        if gain[-1] < 0:
            yield float(gain[-1]), first, end
        return
    starts, stops = np.zeros(end - first), np.zeros(end - first)
    for x in range(first, end):
        before = choice_of.get(x - 1)
        if before is not None:
            usual = handed_over(before, old, x)
            inside = handed_over(number, number, x) - handed_over(old, old, x) if x > first else 0.0
            starts[x - first] = handed_over(before, number, x) - usual - inside
        after = choice_of.get(x + 1)
        if after is not None:
            stops[x - first] = handed_over(number, after, x + 1) - handed_over(old, after, x + 1)
    change = gain[None, 1:] - gain[:-1, None] + starts[:, None] + stops[None, :]
    change[np.tril_indices(end - first, -1)] = np.inf
    flat = change.ravel()
    count = min(EXACT_PER_ROUND, len(flat))
    for index in np.argpartition(flat, count - 1)[:count]:
        if flat[index] < 0:
            s, e = divmod(int(index), end - first)
            yield float(flat[index]), first + s, first + e + 1
