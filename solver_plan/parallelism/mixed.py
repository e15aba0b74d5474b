"""Stages whose operators may each have a layout of their own (space.layout "operator").

For stage [a, e) on g devices with b stages behind, a path chooses for every operator a layout o (t * d = g, partition
K) and whether it is recomputed:

    time    sum of forward + backward + recomputed forward + resharding(o_{j-1}, o_j) + transfers
    memory  s * W + (b + 1) * (input + held - saved) + peak + max(reserved, W)

Lower bound (Lagrange): with a price q on every byte, the shortest path of
time + q * (s W + (b + 1)(input + held - saved)), minus q * (memory - least reserved), is at most the time of every
stage that fits; the best of some prices counts. The peak is neglected. One pass over the chain serves all first
operators, ends and prices.                                                                   → MixedStages.least_ms
A stage that is looked for is bounded better, see `mixed_bound`.
Plans: see `mixed_search`, then `mixed_bound`.                                                    → MixedStages.find
"""

from collections.abc import Callable, Sequence

import numpy as np

from solver_plan.parallelism.choices import Choice, ChoiceCosts, Floats, Integers, MicroBatch
from solver_plan.parallelism.costs.resharding import resharding_ms
from solver_plan.parallelism.mixed_bound import StageBound
from solver_plan.parallelism.mixed_search import MixedStage, Options, StageSearch, prices_of_a_byte
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.parallelism.recomputation.shape import ChainShape
from solver_plan.parallelism.stage_graph import INTER, INTRA
from solver_plan.parallelism.stage_table import Spans

PRICES = 13
"""Prices tried for every stage."""
REFINED_PRICES = 14
"""Prices tried then for the stages with one first operator: around the one that is best for the longest of them."""
BEHIND_STEPS = (*range(17), 20, 24, 32, 48, 64)
"""Stages behind for which the bound is computed; between them the lower one serves: it grows with their number."""
TRANSITION_COST_S = 2e-9
"""Deterministic seconds of one transition of a shortest path."""
STEP_COST_S = 1e-4
"""Deterministic seconds of one operator of all paths of a number of devices."""


def options(problem: ParallelismProblem, batch: MicroBatch) -> list[Options]:
    """Return the layouts of each number of devices, fewest devices first."""
    counts = sorted({costs.choice.devices for costs in batch.choices})
    return [_options(problem, batch, [c for c in batch.choices if c.choice.devices == count]) for count in counts]


def _options(problem: ParallelismProblem, batch: MicroBatch, costs: Sequence[ChoiceCosts]) -> Options:
    choices = tuple(one.choice for one in costs)
    resharding = np.zeros((len(problem.operators), len(choices), len(choices)))
    for j in range(1, len(problem.operators)):
        for before, first in enumerate(choices):
            for after, second in enumerate(choices):
                resharding[j, before, after] = _resharding(problem, batch.size, j, first, second)
    forward = np.stack([one.forward_ms for one in costs])
    return Options(
        choices=choices,
        forward_ms=forward,
        busy_ms=forward + np.stack([one.backward_ms for one in costs]),
        input_bytes=np.stack([one.input_bytes for one in costs]),
        weight_bytes=np.stack([one.weight_bytes for one in costs]),
        held_bytes=np.stack([one.held_bytes for one in costs]),
        forward_reserved_bytes=np.stack([one.forward_reserved_bytes for one in costs]),
        backward_reserved_bytes=np.stack([one.backward_reserved_bytes for one in costs]),
        resharding_ms=resharding,
        receive_ms=np.stack([one.receive_ms for one in costs], axis=1),
        send_ms=np.stack([one.send_ms for one in costs], axis=1),
    )


def _resharding(problem: ParallelismProblem, size: int, j: int, first: Choice, second: Choice) -> float:
    before = problem.profile_of(j - 1, size // first.data_parallel, first.tensor_parallel, first.partition)
    after = problem.profile_of(j, size // second.data_parallel, second.tensor_parallel, second.partition)
    if before is None or after is None:
        return np.inf
    produced = (before.output_layout, first.tensor_parallel, first.data_parallel)
    received = (after.input_layout, second.tensor_parallel, second.data_parallel)
    time = resharding_ms(problem.resharding, produced, received, after.input_bytes)
    return np.inf if time is None else time


def cheapest_choices(batch: MicroBatch) -> MicroBatch:
    """Return a micro-batch with one choice for each number of devices: the least of everything over its layouts.

    No stage of mixed layouts is faster or smaller, so bounds made from it hold.
    """
    counts = sorted({costs.choice.devices for costs in batch.choices})
    merged = []
    for count in counts:
        costs = [one for one in batch.choices if one.choice.devices == count]
        fastest = np.argmin(np.stack([one.forward_ms + one.backward_ms for one in costs]), axis=0)
        at = np.arange(len(fastest))
        merged.append(
            ChoiceCosts(
                choice=Choice(count, 1, 0),
                forward_ms=np.stack([one.forward_ms for one in costs])[fastest, at],
                backward_ms=np.stack([one.backward_ms for one in costs])[fastest, at],
                input_bytes=np.stack([one.input_bytes for one in costs]).min(axis=0),
                weight_bytes=np.stack([one.weight_bytes for one in costs]).min(axis=0),
                held_bytes=np.stack([one.held_bytes for one in costs]).min(axis=0),
                forward_reserved_bytes=np.stack([one.forward_reserved_bytes for one in costs]).min(axis=0),
                backward_reserved_bytes=np.stack([one.backward_reserved_bytes for one in costs]).min(axis=0),
                receive_ms=np.stack([one.receive_ms for one in costs]).min(axis=0),
                send_ms=np.stack([one.send_ms for one in costs]).min(axis=0),
            )
        )
    return MicroBatch(size=batch.size, count=batch.count, choices=tuple(merged))


class MixedStages:
    """The stages of one number of devices at one micro-batch size."""

    def __init__(
        self, problem: ParallelismProblem, shape: ChainShape, layouts: Options, work: Callable[[float], None]
    ) -> None:
        self.options = layouts
        self._shape = shape
        self._limit = problem.cluster.usable_bytes_per_device
        self._state = problem.state_bytes_per_weight_byte
        self._devices_per_node = problem.cluster.devices_per_node
        self._work = work
        self.proven_ms: dict[tuple[int, int, int], float] = {}
        """Lower bound on the time of the stages (first, end, behind) that were found."""
        self._bounds: dict[int, tuple[Integers, Floats]] = {}

    def find(self, first: int, end: int, behind: int, links: tuple[int, int] | None = None) -> MixedStage | None:
        """Return a fast stage that fits, between these links; None if none was found.

        Without `links`, they are as in most pipelines, and `proven_ms` is filled in.
        """
        place = (first, end, behind)
        usual = INTER if self.options.choices[0].devices == self._devices_per_node else INTRA
        linked = self._search(place, links or (INTRA if first == 0 else usual, INTER if behind == 0 else usual))
        row = linked.best_row()
        if row is None:
            return None
        if links is not None:
            return linked.stage(StageBound(linked).least(row)[1])
        proven_ms, other = StageBound(self._search(place, None)).least(row)
        self.proven_ms[place] = proven_ms
        rows = [row, linked.improved(other)]
        return min((linked.stage(one) for one in rows), key=lambda stage: stage.time_ms)

    def _search(self, place: tuple[int, int, int], links: tuple[int, int] | None) -> StageSearch:
        return StageSearch(self.options, self._shape, self._limit, self._state, self._work, place, links)

    def least_ms(self, behind: int, first: Integers, end: Integers) -> Floats:
        """Return a lower bound on the time of the stages [first, end), shape (stages,).

        Of transfers it holds what they take at least more than with the best layout.
        """
        count = len(self._shape.classes)
        step = max(one for one in BEHIND_STEPS if one <= behind)
        if step not in self._bounds:
            self._bounds[step] = np.arange(count), np.full((count, count + 1), -np.inf)
        known, least = self._bounds[step]
        wanted = known.copy()
        np.maximum.at(wanted, first, end)
        missing = np.flatnonzero(wanted > known)
        if len(missing):
            # longer and longer rows, so that those that are going on are neighbours
            stop = np.maximum.accumulate(wanted[missing])
            self._sweep(step, missing, stop, least)
            known[missing] = stop
        return np.asarray(least[first, end])

    def _sweep(self, behind: int, rows: Integers, stop: Integers, least: Floats) -> None:
        """Raise the bounds of the stages that begin at `rows` and end, at the latest, at `stop`."""
        saved = (behind + 1) * self.options.held_bytes
        coarse = prices_of_a_byte(self.options.forward_ms, saved, PRICES)
        best = self._shortest(behind, rows, stop, np.tile(coarse, (len(rows), 1)), least)
        last = len(coarse) - 1
        low, high = (
            np.maximum(coarse[np.maximum(best - 1, 0)], coarse[min(1, last)] / 4),
            coarse[np.minimum(best + 1, last)],
        )
        if last > 0:
            steps = np.arange(1, REFINED_PRICES + 1) / (REFINED_PRICES + 1)
            self._shortest(behind, rows, stop, low[:, None] * (high / low)[:, None] ** steps, least)

    def _shortest(self, behind: int, rows: Integers, stop: Integers, prices: Floats, least: Floats) -> Integers:
        """Raise the bounds at some prices for each row, (rows, prices); return the best one for its longest stage.

        Arrays have shape (layouts, rows, prices): the shortest paths from each first operator to operator j, which is
        recomputed (`marked`) or not (`plain`).
        """
        own, layouts, in_flight = self.options, len(self.options.choices), behind + 1
        self._work(TRANSITION_COST_S * float((stop - rows).sum()) * prices.shape[1] * 2 * layouts**2)
        sizes = self._state * own.weight_bytes + in_flight * own.held_bytes
        reserved_of = own.forward_reserved_bytes.min(axis=0), own.backward_reserved_bytes.min(axis=0)
        plain = np.full((layouts, *prices.shape), np.inf)
        marked = plain.copy()
        reserved = np.zeros((2, len(rows)))
        best = np.zeros(len(rows), dtype=np.int64)
        begun = done = 0
        for j in range(int(rows[0]), int(stop[-1])):
            self._work(STEP_COST_S)
            while stop[done] <= j:
                done += 1
            alive = slice(done, begun)
            if done < begun:
                saved = in_flight * own.held_bytes[:, j - 1, None, None] * prices[alive]
                after, after_marked = self._step(j, plain[:, alive], marked[:, alive], saved)
                cost = own.busy_ms[:, j, None, None] + sizes[:, j, None, None] * prices[alive]
                plain[:, alive] = after + cost
                if self._shape.allowed:
                    marked[:, alive] = after_marked + (cost + own.forward_ms[:, j, None, None])
                for number in (0, 1):
                    np.maximum(reserved[number, alive], reserved_of[number][j - 1], out=reserved[number, alive])
            if begun < len(rows) and rows[begun] == j:
                size = sizes[:, j, None] + in_flight * own.input_bytes[:, j, None]
                plain[:, begun] = (own.busy_ms + own.least_receive_ms)[:, j, None] + size * prices[begun]
                if self._shape.allowed:
                    marked[:, begun] = plain[:, begun] + own.forward_ms[:, j, None]
                begun += 1
            alive = slice(done, begun)
            room = self._limit - reserved[0, alive] - reserved[1, alive]
            value = np.minimum(plain[:, alive], marked[:, alive]).min(axis=0) - room[:, None] * prices[alive]
            best[alive] = value.argmax(axis=1)
            least[rows[alive], j + 1] = np.maximum(least[rows[alive], j + 1], value.max(axis=1))
        return best

    def _step(self, j: int, plain: Floats, marked: Floats, saved: Floats) -> tuple[Floats, Floats]:
        """Return the paths that reach operator j, and those that reach it recomputed.

        Where the operator before is recomputed too, and no block starts, what it holds is saved.
        """
        change = self.options.resharding_ms[j]
        either = np.minimum(plain, marked)
        saving = None if self._shape.block_start[j] else marked - saved
        if not change.any():
            after = either.min(axis=0)[None]
            return after, after if saving is None else np.minimum(after, saving.min(axis=0)[None])
        after = (either[:, None] + change[:, :, None, None]).min(axis=0)
        if saving is None:
            return after, after
        return after, np.minimum(after, (saving[:, None] + change[:, :, None, None]).min(axis=0))


class MixedBound:
    """Lower bound on what a stage of mixed layouts takes beyond its fastest operators."""

    def __init__(self, table: Spans, stages: MixedStages) -> None:
        self.spans = table
        self._stages = stages

    def milliseconds(self, behind: int, at: Integers | None = None) -> Floats:
        """Return the bound for spans (all, or those at indices `at`) with `behind` stages behind them."""
        index = np.arange(len(self.spans.first)) if at is None else at
        if not len(index):
            return np.empty(0)
        least_ms = self._stages.least_ms(behind, self.spans.first[index], self.spans.end[index])
        return np.asarray(np.maximum(least_ms - self.spans.busy_ms[index], 0.0))

    def most_saved_bytes(self, behind: int, index: Integers) -> Floats:
        """Return an upper bound on what recomputation takes off the memory: all that is held."""
        return np.asarray((behind + 1) * self.spans.input_and_held_bytes[index])
