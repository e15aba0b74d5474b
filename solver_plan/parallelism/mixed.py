"""Stages whose operators may each have a layout of their own (space.layout "operator").

For stage [a, e) on g devices with b stages behind, a path chooses for every operator a layout o (t * d = g, partition
K) and whether it is recomputed:

    time    sum of forward + backward + recomputed forward + resharding(o_{j-1}, o_j)
    memory  s * W + (b + 1) * (input + held - saved) + peak + max(reserved, W)

Lower bound (Lagrange): with a price q on every byte, the shortest path of
time + q * (s W + (b + 1)(input + held - saved)), minus q * (memory - least reserved), is at most the time of every
stage that fits; the best of a few prices counts. The peak is neglected. One pass from every first operator serves all
ends.
                                                                                                   → MixedBound
Plans: shortest paths at increasing prices, with caps on what the allocator reserves, until the true memory fits; then
layouts and recomputation are improved one operator at a time.                                     → MixedStages.find
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from solver_plan.parallelism.choices import Bools, Choice, ChoiceCosts, Floats, Integers, MicroBatch
from solver_plan.parallelism.costs.recompute import saved_and_peak
from solver_plan.parallelism.costs.resharding import resharding_ms
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.parallelism.recomputation.shape import ChainShape
from solver_plan.parallelism.stage_table import Spans, maximum_but_last

PRICES_MS_PER_BYTE = np.concatenate([np.zeros(1), np.geomspace(4e-9, 5e-7, 9)])
"""Prices tried; recomputing a convolution costs some 1e-7 ms for each byte that it saves on a V100."""
BEHIND_STEPS = (0, 1, 2, 4, 8, 16, 32, 64)
"""Stages behind for which the bound is computed; between them the lower one serves: it grows with their number."""
PASS_COST_S = 2e-8
"""Deterministic seconds of one transition of a shortest path."""
BISECTIONS = 9
CAPS = (0.0, 0.35, 1.0)
"""Between the least that the stage must reserve (0) and what the fastest layouts reserve (1)."""


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """The layouts of a number of devices; arrays have shape (layouts, operators)."""

    choices: tuple[Choice, ...]
    forward_ms: Floats
    busy_ms: Floats
    input_bytes: Floats
    weight_bytes: Floats
    held_bytes: Floats
    forward_reserved_bytes: Floats
    backward_reserved_bytes: Floats
    resharding_ms: Floats
    """(operators, layouts, layouts): from the layout of the operator before to that of the operator."""


@dataclass(frozen=True, slots=True)
class MixedStage:
    """A stage that fits: a layout for each operator and the recomputed operators."""

    time_ms: float
    """Without transfers."""
    layouts: tuple[int, ...]
    marks: tuple[bool, ...]


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
        self._work = work
        self._paths: dict[tuple[float, int], tuple[Integers, Floats]] = {}
        self._flags = 2 if shape.allowed else 1

    @property
    def operators(self) -> int:
        """Number of operators of the chain."""
        return len(self._shape.classes)

    @property
    def _states(self) -> int:
        return len(self.options.choices) * self._flags

    def _costs(self, j: int, price: float, in_flight: int) -> Floats:
        """Return (states,): time and priced memory of an operator, layouts without recomputation first."""
        own = self.options
        plain = own.busy_ms[:, j] + price * (self._state * own.weight_bytes[:, j] + in_flight * own.held_bytes[:, j])
        return plain if self._flags == 1 else np.concatenate([plain, plain + own.forward_ms[:, j]])

    def _transitions(self, j: int, price: float, in_flight: int) -> Floats:
        """Return (states before, states): resharding, less the priced bytes that two recomputed neighbours save."""
        change: Floats = self.options.resharding_ms[j]
        if self._flags == 1:
            return change
        saved = np.zeros_like(change)
        if not self._shape.block_start[j]:
            saved = saved + price * in_flight * self.options.held_bytes[:, j - 1][:, None]
        return np.block([[change, change], [change, change - saved]])

    # -- lower bound --------------------------------------------------------------------------------------------

    def shortest(self, price: float, behind: int, earliest: Integers) -> Floats:
        """Return, shape (operators, operators + 1), the shortest path of every span [a, e) at a price of a byte.

        `earliest`, shape (operators,), is the first operator of the longest span that is asked for with each last
        operator; spans that begin before it are infinite, or left from an earlier call.
        """
        key = (price, behind)
        known = self._paths.get(key)
        if known is None or (known[0] > earliest).any():
            count = len(self._shape.classes)
            lengths = np.arange(count) + 1 - earliest
            self._work(PASS_COST_S * float(lengths.sum()) * self._states**2)
            result = np.full((count, count + 1), np.inf)
            value = np.full((count, self._states), np.inf)
            entering = price * (behind + 1) * np.tile(self.options.input_bytes, (self._flags, 1))
            for j in range(count):
                costs = self._costs(j, price, behind + 1)
                alive = slice(int(earliest[j]), j)
                if alive.start < j:
                    before = value[alive]
                    step = (before[:, :, None] + self._transitions(j, price, behind + 1)[None]).min(axis=1)
                    value[alive] = step + costs
                value[j] = costs + entering[:, j]
                result[earliest[j] : j + 1, j + 1] = value[earliest[j] : j + 1].min(axis=1)
            self._paths[key] = (earliest, result)
            return result
        return known[1]

    # -- plans --------------------------------------------------------------------------------------------------

    def find(self, first: int, end: int, behind: int) -> MixedStage | None:
        """Return a stage that fits, as fast as paths and single changes make it; None if none was found."""
        best: MixedStage | None = None
        for allowed in self._caps(first, end):
            found = self._cheapest_price(first, end, behind, allowed)
            if found is not None:
                found = self._improved(first, end, behind, found)
                if best is None or found.time_ms < best.time_ms:
                    best = found
        return best

    def _caps(self, first: int, end: int) -> Iterator[Bools]:
        """Yield, shape (layouts, operators), which layouts are allowed under caps on what is reserved."""
        own = self.options
        fastest = own.busy_ms.argmin(axis=0)
        at = np.arange(first, max(end - 1, first + 1))
        for forward_cap in self._levels(own.forward_reserved_bytes, fastest, at):
            for backward_cap in self._levels(own.backward_reserved_bytes, fastest, at):
                allowed = (own.forward_reserved_bytes <= forward_cap) & (own.backward_reserved_bytes <= backward_cap)
                allowed[:, end - 1] = True  # what the last operator reserves does not count
                if allowed[:, first:end].any(axis=0).all():
                    yield allowed

    def _levels(self, reserved: Floats, fastest: Integers, at: Integers) -> list[float]:
        least = float(reserved[:, at].min(axis=0).max())
        free = float(reserved[fastest[at], at].max())
        return sorted({least + cap * max(0.0, free - least) for cap in CAPS})

    def _cheapest_price(self, first: int, end: int, behind: int, allowed: Bools) -> MixedStage | None:
        """Return the path at the least price whose memory fits, by bisection over the logarithm of the price."""
        path = self._path(first, end, behind, 0.0, allowed)
        if path is None or self.memory(first, end, behind, path) <= self._limit:
            return path
        low, high = np.log(1e-10), np.log(1e-5)
        best = self._path(first, end, behind, float(np.exp(high)), allowed)
        if best is None or self.memory(first, end, behind, best) > self._limit:
            return None
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            path = self._path(first, end, behind, float(np.exp(middle)), allowed)
            if path is not None and self.memory(first, end, behind, path) <= self._limit:
                high = middle
                if path.time_ms < best.time_ms:
                    best = path
            else:
                low = middle
        return best

    def _path(self, first: int, end: int, behind: int, price: float, allowed: Bools) -> MixedStage | None:
        """Return the shortest path of one stage at a price of a byte."""
        states, layouts = self._states, len(self.options.choices)
        self._work(PASS_COST_S * (end - first) * states**2 + 1e-5 * (end - first))
        forbidden = np.where(np.tile(allowed, (self._flags, 1)), 0.0, np.inf)
        entering = price * (behind + 1) * np.tile(self.options.input_bytes[:, first], self._flags)
        value = self._costs(first, price, behind + 1) + entering + forbidden[:, first]
        back = np.zeros((end - first, states), dtype=np.int64)
        for j in range(first + 1, end):
            through = value[:, None] + self._transitions(j, price, behind + 1)
            back[j - first] = through.argmin(axis=0)
            value = through.min(axis=0) + self._costs(j, price, behind + 1) + forbidden[:, j]
        state = int(value.argmin())
        if not np.isfinite(value[state]):
            return None
        chosen = [state]
        for j in range(end - first - 1, 0, -1):
            state = int(back[j, state])
            chosen.append(state)
        chosen.reverse()
        chosen_layouts = tuple(one % layouts for one in chosen)
        marks = tuple(one >= layouts for one in chosen)
        return MixedStage(self.time(first, chosen_layouts, marks), chosen_layouts, marks)

    def time(self, first: int, layouts: Sequence[int], marks: Sequence[bool]) -> float:
        """Return forward, backward, recomputation and resharding of a stage, in ms."""
        at = np.arange(first, first + len(layouts))
        chosen = np.array(layouts)
        own = self.options
        total = own.busy_ms[chosen, at].sum() + own.forward_ms[chosen, at] @ np.array(marks, dtype=np.float64)
        return float(total + own.resharding_ms[at[1:], chosen[:-1], chosen[1:]].sum())

    def memory(self, first: int, end: int, behind: int, stage: MixedStage) -> float:
        """Return the memory of a stage on each device, in bytes, as the cost model counts it."""
        at, chosen, own = np.arange(first, end), np.array(stage.layouts), self.options
        held = own.held_bytes[chosen, at]
        saved, peak = saved_and_peak(
            stage.marks,
            held.tolist(),
            self._shape.block_start[first:end].tolist(),
            self._shape.shares_buffer[first:end].tolist(),
        )
        weights = float(own.weight_bytes[chosen, at].sum())
        but_last, layouts = at[:-1], chosen[:-1]
        reserved = float(
            own.forward_reserved_bytes[layouts, but_last].max(initial=0.0)
            + own.backward_reserved_bytes[layouts, but_last].max(initial=0.0)
        )
        kept = float(own.input_bytes[chosen[0], first] + held.sum()) - saved
        return weights * self._state + (behind + 1) * kept + peak + max(reserved, weights)

    def _improved(self, first: int, end: int, behind: int, stage: MixedStage) -> MixedStage:
        """Change one operator at a time, its layout or whether it is recomputed, while that is faster and fits."""
        for _ in range(3):
            before = stage.time_ms
            for j in range(end - first):
                for layout in range(len(self.options.choices)):
                    for mark in (False, True) if stage.marks[j] else (False,):
                        if layout == stage.layouts[j] and mark == stage.marks[j]:
                            continue
                        layouts = (*stage.layouts[:j], layout, *stage.layouts[j + 1 :])
                        marks = (*stage.marks[:j], mark, *stage.marks[j + 1 :])
                        time = self.time(first, layouts, marks)
                        if time < stage.time_ms - 1e-9:
                            changed = MixedStage(time, layouts, marks)
                            if self.memory(first, end, behind, changed) <= self._limit:
                                stage = changed
            self._work(2e-5 * (end - first) * len(self.options.choices))
            if stage.time_ms == before:
                break
        return stage


class MixedBound:
    """Lower bound on what a stage of mixed layouts takes beyond its fastest operators."""

    def __init__(self, table: Spans, stages: MixedStages, limit_bytes: int) -> None:
        self.spans = table
        self._stages = stages
        self._limit = limit_bytes

    @cached_property
    def _earliest(self) -> Integers:
        """First operator of the longest span with each last operator, never falling from one to the next."""
        count = self._stages.operators
        earliest = np.arange(count)
        np.minimum.at(earliest, self.spans.end - 1, self.spans.first)
        return np.minimum.accumulate(earliest[::-1])[::-1]

    @cached_property
    def _least_reserved(self) -> Floats:
        own = self._stages.options
        first, end = self.spans.first, self.spans.end
        return maximum_but_last(own.forward_reserved_bytes.min(axis=0), first, end) + maximum_but_last(
            own.backward_reserved_bytes.min(axis=0), first, end
        )

    def milliseconds(self, behind: int, at: Integers | None = None) -> Floats:
        """Return the bound for spans (all, or those at indices `at`) with `behind` stages behind them."""
        index = np.arange(len(self.spans.first)) if at is None else at
        step = max(one for one in BEHIND_STEPS if one <= behind)
        first, end = self.spans.first[index], self.spans.end[index]
        room = self._limit - self._least_reserved[index]
        best = np.full(len(index), -np.inf)
        for price in PRICES_MS_PER_BYTE:
            path = self._stages.shortest(float(price), step, self._earliest)
            np.maximum(best, path[first, end] - price * room, out=best)
        return np.asarray(np.maximum(best - self.spans.busy_ms[index], 0.0))

    def most_saved_bytes(self, behind: int, index: Integers) -> Floats:
        """Return an upper bound on what recomputation takes off the memory: all that is held."""
        return np.asarray((behind + 1) * self.spans.input_and_held_bytes[index])
