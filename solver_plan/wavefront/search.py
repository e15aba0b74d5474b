"""The search for better plans: annealing from several starts, and the constraint program around the incumbent.

Small problems are given to the constraint program whole, a slice for each layer, and are then solved to proven
optimality; its bound holds for every plan. Large ones are re-optimised a few components at a time: those of one task,
of one set of weights, or those that run at one time (large-neighbourhood search by windows).
"""

import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

from solver_plan.solving import Clock, Incumbent
from solver_plan.solving.cp_sat import solve_cp_sat
from solver_plan.wavefront.heuristics.annealing import anneal
from solver_plan.wavefront.heuristics.annealing_devices import AREA_WEIGHT, anneal_devices
from solver_plan.wavefront.heuristics.annealing_processes import Annealed, AnnealingProcesses, Round
from solver_plan.wavefront.instance import Instance
from solver_plan.wavefront.model.capacity import CapacityModel
from solver_plan.wavefront.model.device_sets import MOST_DEVICES, DeviceSetModel
from solver_plan.wavefront.model.devices import DeviceModel
from solver_plan.wavefront.model.pieces import neighbourhood, whole_problem
from solver_plan.wavefront.model.slices import SliceModel
from solver_plan.wavefront.plan import WavefrontPlan
from solver_plan.wavefront.schedule import Schedule, Segment, earliest_times, plan_of, with_devices

log = logging.getLogger(__name__)

Offer = Callable[[Schedule, str], bool]
ANNEALING = "heuristic:annealing"
CP_SAT = "cp-sat"
MOST_LAYERS_WHOLE = 24
"""Layers of a problem that is given to the constraint program whole."""
MOST_LAYER_DEVICES_WHOLE = 160
BEFORE_WHOLE_SHARE = 0.08
"""Of what is left, for annealing and then for neighbourhoods: from a better incumbent the proof is shorter."""
WHOLE_SHARE = 0.85
"""Of what is left, for the whole problem."""
ANNEALING_SHARE = 0.85
"""Of what is left, for annealing, where the problem is not solved whole."""
ROUND_SHARE = 0.12
"""Of the annealing's time, for a round."""
MOST_STARTS = 3
FRESH_ROUNDS = 5
"""Rounds from fresh starts, before the best is improved from where it is."""
DEVICE_ROUND_SHARE = 0.12
DEVICE_FRESH_ROUNDS = 6
"""The same where device sets matter: rounds end far apart there, so more fresh ones."""
AREA_WEIGHTS = (0.9, 0.5)
"""Of the annealing's energy, round by round: either suits some problems better."""
REHEAT = 0.3
"""Start temperature of later rounds, relative to the first."""
OTHER_SEEDS = 1000
"""Between the seeds of the rounds of two processes."""
LEAST_FOR_PROCESSES_S = 4.0
"""Of annealing: with less, starting other processes (about half a second each) takes too much of it."""
MOST_PROCESSES = 7
NEIGHBOURHOOD_LIMIT = 0.5
"""Most for one neighbourhood, in the clock's unit."""
NEIGHBOURHOOD_SIZE = 2
"""Components to begin with."""
DEVICE_ANNEALING_SHARE = 0.2
DEVICE_NEIGHBOURHOOD_LIMIT = 2.5
DEVICE_NEIGHBOURHOOD_SIZE = 3
"""The same where device sets matter: annealing is stuck early there, and two components are soon proven best."""
LARGEST_NEIGHBOURHOOD = 5
DEVICE_LARGEST_NEIGHBOURHOOD = 4
DEVICE_PATIENCE = 2
RESTART_SHARE = 0.05
"""Of the whole budget, for annealing another plan to go on from."""
MOST_SLICES_IN_NEIGHBOURHOOD = 150
SLICES_SHARE = 0.95
"""Of the neighbourhoods, for the program of few slices: the other one knows more device sets, but is slow."""
SECONDS_PER_NEIGHBOURHOOD = 0.02
"""Deterministic cost of building a program: some are solved in no time at all."""
LEAST_GAIN = 1e-4
"""Of the objective, that a neighbourhood has to bring."""


class _Search(ABC):
    """What both searches share: the whole problem where it is small, else annealing and neighbourhoods."""

    def __init__(self, instance: Instance, clock: Clock, incumbent: Incumbent[WavefrontPlan], offer: Offer) -> None:
        self.instance = instance
        self.clock = clock
        self.incumbent = incumbent
        self.offer = offer
        self.rng = random.Random(clock.budget.seed)

    round_share: float = ROUND_SHARE
    annealing_share: float = ANNEALING_SHARE
    neighbourhood_limit: float = NEIGHBOURHOOD_LIMIT
    neighbourhood_size: int = NEIGHBOURHOOD_SIZE
    largest_neighbourhood: int = LARGEST_NEIGHBOURHOOD
    patience: int = 1
    """Neighbourhoods without a better plan, relative to the components, after which larger ones are tried."""

    @abstractmethod
    def first(self, share: float) -> None:
        """Find a good plan fast."""

    @abstractmethod
    def round(self, number: int, share: float, beside: bool = False) -> Round:
        """Return the next round: fresh, or after some rounds from the best; `beside`: of another process."""

    @abstractmethod
    def anneal_round(self, each: Round) -> None:
        """Anneal once."""

    @abstractmethod
    def take(self, found: Annealed) -> None:
        """Keep what another process found, if it is better."""

    @abstractmethod
    def solve_whole(self, limit: float) -> None:
        """Give the whole problem to the constraint program."""

    @abstractmethod
    def solve_neighbourhood(self, free: frozenset[int], limit: float) -> bool:
        """Re-optimise some components; True if that gave a better plan."""

    @abstractmethod
    def restart(self) -> None:
        """Go on from another plan, since no neighbourhood of this one has a better one."""

    @abstractmethod
    def spans(self) -> list[tuple[float, float]]:
        """Return when each component starts and ends in the incumbent."""

    def improve(self, use_solver: bool) -> None:
        """Search until the plan is proven good enough or the budget is used."""
        clock, layers = self.clock, sum(self.instance.layers)
        if use_solver and layers <= MOST_LAYERS_WHOLE and layers * self.instance.devices <= MOST_LAYER_DEVICES_WHOLE:
            self.anneal_round(self.round(0, clock.remaining * BEFORE_WHOLE_SHARE))
            self.neighbourhoods(clock.remaining * BEFORE_WHOLE_SHARE)
            if not self.done:
                self.solve_whole(clock.remaining * WHOLE_SHARE)
        share = clock.remaining * (self.annealing_share if use_solver else 1.0)
        end_at = clock.remaining - share
        number = 0
        with AnnealingProcesses(self.instance, self._other_processes(share)) as others:
            while not self.done and clock.remaining > end_at + 1e-3:
                seconds = min(share * self.round_share, clock.remaining - end_at)
                mine, *theirs = [self.round(number + at, seconds, at > 0) for at in range(1 + len(others))]
                others.begin([replace(each, seed=each.seed + OTHER_SEEDS) for each in theirs])
                self.anneal_round(mine)
                for found in others.results(clock):
                    self.take(found)
                number += 1 + len(others)
        log.info("annealing: %s after %d rounds", self.incumbent.objective, number)
        if use_solver:
            self.neighbourhoods(clock.remaining)

    def _other_processes(self, share: float) -> int:
        """Return how many processes anneal beside this one: none in the deterministic search."""
        budget = self.clock.budget
        if budget.deterministic or share < LEAST_FOR_PROCESSES_S or self.done:
            return 0
        return min(MOST_PROCESSES, budget.worker_count - 1)

    @property
    def done(self) -> bool:
        """Nothing is left to do."""
        return self.incumbent.closed or self.clock.expired

    def neighbourhoods(self, share: float) -> None:
        """Re-optimise components that run at one time, belong together, or any few, for a share of the budget."""
        size = self.neighbourhood_size
        failed = 0
        end_at = self.clock.remaining - share
        while not self.done and self.clock.remaining > end_at:
            free = self._neighbourhood(size)
            self.clock.spend(SECONDS_PER_NEIGHBOURHOOD)
            if self.solve_neighbourhood(free, self.neighbourhood_limit):
                failed = 0
            else:
                failed += 1
            if failed > self.patience * len(self.instance.layers):
                failed = 0
                size += 1
                if size > self.largest_neighbourhood:
                    size = self.neighbourhood_size
                    self.restart()

    def _neighbourhood(self, size: int) -> frozenset[int]:
        instance = self.instance
        size = min(size, len(instance.layers))
        spans = self.spans()
        centre = self.rng.randrange(len(instance.layers))
        kind = self.rng.random()
        if kind < 0.5:
            start, end = spans[centre]
            pool = [c for c in instance.components if spans[c][0] < end and spans[c][1] > start]
        elif kind < 0.75:
            pool = [
                c
                for c in instance.components
                if c in instance.predecessors[centre]
                or c in instance.successors[centre]
                or instance.parameters[c] == instance.parameters[centre]
            ]
        else:
            pool = list(instance.components)
        pool = [c for c in pool if c != centre]
        return frozenset([centre, *self.rng.sample(pool, min(size - 1, len(pool)))])


class CapacitySearch(_Search):
    """Where any free devices will do."""

    def __init__(
        self,
        instance: Instance,
        clock: Clock,
        incumbent: Incumbent[WavefrontPlan],
        offer: Offer,
        starts: Sequence[list[Segment]],
    ) -> None:
        super().__init__(instance, clock, incumbent, offer)
        self.starts = starts
        self.best: tuple[float, list[Segment]] | None = None

    def first(self, share: float) -> None:
        """Anneal each start for a short time, and begin from what comes of them, best first: starts end far apart."""
        found: list[tuple[float, int, list[Segment]]] = []
        for number, start in enumerate(self.starts):
            seed = self.clock.budget.seed + number
            segments, makespan = anneal(self.instance, start, self.clock, share / len(self.starts), seed)
            log.info("start %d: %g", number, makespan)
            self._take(segments, makespan)
            found.append((makespan, number, segments))
        self.starts = [segments for _, _, segments in sorted(found)]

    def _take(self, segments: list[Segment], makespan: float, source: str = ANNEALING) -> bool:
        if self.best is not None and makespan >= self.best[0]:
            return False
        self.best = makespan, segments
        return self.offer(with_devices(self.instance, segments), source)

    def round(self, number: int, share: float, beside: bool = False) -> Round:
        """Return the next round: from the next start, or after some rounds from the best."""
        assert self.best is not None
        seed = self.clock.budget.seed + 1 + number
        if number < FRESH_ROUNDS or (beside and number // 2 % 2):
            # other processes also later, every other time: the best may be where nothing better is near
            start, heat = self.starts[number % min(MOST_STARTS, len(self.starts))], 1.0
        else:
            start, heat = self.best[1], REHEAT
        return Round(start, share, seed, heat, AREA_WEIGHTS[number // 2 % len(AREA_WEIGHTS)])

    def anneal_round(self, each: Round) -> None:
        """Anneal once."""
        assert not isinstance(each.start, Schedule)
        segments, makespan = anneal(
            self.instance, each.start, self.clock, each.seconds, each.seed, self._tell, each.heat, each.area_weight
        )
        log.info("round from seed %d: %g", each.seed, makespan)
        self._take(segments, makespan)

    def take(self, found: Annealed) -> None:
        """Keep what another process found, if it is better."""
        assert not isinstance(found.best, Schedule)
        log.info("round of another process: %g", found.objective)
        self._take(found.best, found.objective)

    def _tell(self, segments: list[Segment], makespan: float) -> None:
        self._take(segments, makespan)

    def solve_whole(self, limit: float) -> None:
        """Prove optimality with a slice for each layer."""
        assert self.best is not None
        makespan, segments = self.best
        built = CapacityModel(self.instance, segments, makespan)
        outcome = solve_cp_sat(
            built.model,
            self.clock,
            hint=built.hint,
            limit=limit,
            on_bound=lambda ticks: self._bound(built.milliseconds(int(ticks))),
        )
        if outcome.values is not None:
            found = built.read(outcome.values)
            self._take(found, _makespan(self.instance, found), CP_SAT)
        if outcome.bound is not None:
            self._bound(built.milliseconds(outcome.bound))

    def _bound(self, bound_ms: float) -> None:
        if self.incumbent.objective is not None:
            self.incumbent.raise_bound(min(bound_ms, self.incumbent.objective), CP_SAT)

    def solve_neighbourhood(self, free: frozenset[int], limit: float) -> bool:
        """Re-optimise some components with all others keeping their modes and layers."""
        assert self.best is not None
        makespan, segments = self.best
        count = max(sum(1 for s in segments if s.component == c) for c in free)
        built = CapacityModel(self.instance, segments, makespan, free, max(3, count))
        outcome = solve_cp_sat(built.model, self.clock, hint=built.hint, limit=limit, gap_limit=0.0)
        if outcome.values is None:
            return False
        found = built.read(outcome.values)
        return self._take(found, _makespan(self.instance, found), CP_SAT)

    def restart(self) -> None:
        """Stay: annealing has ended near the best plan of all starts."""

    def spans(self) -> list[tuple[float, float]]:
        """Return when each component starts and ends in the incumbent."""
        assert self.best is not None
        schedule = with_devices(self.instance, self.best[1])
        return _spans(self.instance, schedule)


class DeviceSearch(_Search):
    """Where it matters which devices run a slice."""

    round_share = DEVICE_ROUND_SHARE
    annealing_share = DEVICE_ANNEALING_SHARE
    neighbourhood_limit = DEVICE_NEIGHBOURHOOD_LIMIT
    neighbourhood_size = DEVICE_NEIGHBOURHOOD_SIZE
    largest_neighbourhood = DEVICE_LARGEST_NEIGHBOURHOOD
    patience = DEVICE_PATIENCE

    def __init__(
        self,
        instance: Instance,
        clock: Clock,
        incumbent: Incumbent[WavefrontPlan],
        offer: Offer,
        starts: Sequence[Schedule],
    ) -> None:
        super().__init__(instance, clock, incumbent, offer)
        self.starts = starts
        self.best: tuple[float, float, Schedule] | None = None
        """What is being improved: bytes beyond the memory, objective, schedule."""

    def first(self, share: float) -> None:
        """Anneal each start for a short time."""
        for number, start in enumerate(self.starts):
            self._anneal(start, share / len(self.starts), self.clock.budget.seed + number, 1.0)

    def add_start(self, start: Schedule, source: str) -> None:
        """Begin from one more schedule, before the others."""
        self.starts = [start, *self.starts]
        if self.offer(start, source):
            assert self.incumbent.objective is not None
            self.best = 0.0, self.incumbent.objective, start

    def _anneal(self, start: Schedule, share: float, seed: int, heat: float) -> None:
        schedule, objective, excess = anneal_devices(
            self.instance, start, self.clock, share, seed, self._tell, heat=heat
        )
        log.info("annealed to %g, %g bytes beyond the memory", objective, excess)
        self._take(schedule, objective, excess)

    def _take(self, schedule: Schedule, objective: float, excess: float, source: str = ANNEALING) -> bool:
        if self.best is not None and (excess, objective) >= self.best[:2]:
            return False
        self.best = excess, objective, schedule
        return excess == 0 and self.offer(schedule, source)

    def round(self, number: int, share: float, beside: bool = False) -> Round:
        """Return the next round: from the next start, or after some rounds from the best."""
        assert self.best is not None
        fresh = number < DEVICE_FRESH_ROUNDS
        start = self.starts[number % len(self.starts)] if fresh else self.best[2]
        heat = 1.0 if fresh else REHEAT
        return Round(start, share, self.clock.budget.seed + 100 + number, heat, AREA_WEIGHT)

    def anneal_round(self, each: Round) -> None:
        """Anneal once."""
        assert isinstance(each.start, Schedule)
        self._anneal(each.start, each.seconds, each.seed, each.heat)

    def take(self, found: Annealed) -> None:
        """Keep what another process found, if it is better."""
        assert isinstance(found.best, Schedule)
        self._take(found.best, found.objective, found.excess_bytes)

    def _tell(self, schedule: Schedule, objective: float) -> None:
        self._take(schedule, objective, 0.0)

    def solve_whole(self, limit: float) -> None:
        """Prove optimality with a piece for each layer."""
        assert self.best is not None
        excess, objective, schedule = self.best
        slow = objective if excess == 0 else 3 * sum(self.instance.shortest_ms(c) for c in self.instance.components)
        built: DeviceModel | DeviceSetModel
        pieces = whole_problem(self.instance, schedule)
        if self.instance.devices <= MOST_DEVICES:
            built = DeviceSetModel(self.instance, pieces, slow)
        else:
            built = DeviceModel(self.instance, pieces, slow, break_symmetry=True)
        outcome = solve_cp_sat(
            built.model,
            self.clock,
            limit=limit,
            for_proof=True,
            on_bound=lambda ticks: self._bound(built.milliseconds(int(ticks))),
        )
        if outcome.values is not None:
            self._read(built, outcome.values)
        if outcome.bound is not None:
            self._bound(built.milliseconds(outcome.bound))

    def _read(self, built: DeviceModel | DeviceSetModel | SliceModel, value: Callable[..., int]) -> bool:
        schedule = built.read(value)
        predicted = plan_of(self.instance, schedule).predicted
        assert predicted is not None
        assert self.best is not None
        limit = self.instance.memory_limit
        beyond = limit is not None and max(predicted.device_memory_bytes) > limit
        if beyond or predicted.makespan_ms >= self.best[1]:
            return False
        self.best = 0.0, predicted.makespan_ms, schedule
        self.offer(schedule, CP_SAT)
        return True

    def _bound(self, bound_ms: float) -> None:
        if self.incumbent.objective is not None:
            self.incumbent.raise_bound(min(bound_ms, self.incumbent.objective), CP_SAT)

    def solve_neighbourhood(self, free: frozenset[int], limit: float) -> bool:
        """Re-optimise some components with all others keeping their slices and devices."""
        assert self.best is not None
        excess, objective, schedule = self.best
        if excess > 0 or len(schedule.runs) * self.instance.devices > 40 * MOST_SLICES_IN_NEIGHBOURHOOD:
            # nothing to start from, or too large a program: anneal on
            self.anneal_round(self.round(DEVICE_FRESH_ROUNDS + self.rng.randrange(10**6), 4 * limit))
            return False
        horizon = objective * (1 - LEAST_GAIN)
        built: DeviceModel | SliceModel
        if self.rng.random() < SLICES_SHARE:
            built = SliceModel(self.instance, schedule, horizon, free)
        else:
            built = DeviceModel(self.instance, neighbourhood(schedule, free, 3), horizon)
        outcome = solve_cp_sat(built.model, self.clock, limit=limit, gap_limit=0.0, light=True, workers=1)
        return outcome.values is not None and self._read(built, outcome.values)

    def restart(self) -> None:
        """Anneal from a start; the incumbent is kept where it is."""
        seed = self.rng.randrange(2**31)
        self.best = None
        self._anneal(
            self.starts[seed % len(self.starts)], self.clock.budget.time_limit_s * RESTART_SHARE, seed, heat=1.0
        )

    def spans(self) -> list[tuple[float, float]]:
        """Return when each component starts and ends in the plan that is being improved."""
        assert self.best is not None
        return _spans(self.instance, self.best[2])


def _spans(instance: Instance, schedule: Schedule) -> list[tuple[float, float]]:
    times = earliest_times(instance, schedule)
    found: list[tuple[float, float]] = [(float("inf"), 0.0)] * len(instance.layers)
    for run, (start, end) in zip(schedule.runs, times, strict=False):
        before = found[run.component]
        found[run.component] = min(before[0], start), max(before[1], end)
    return found


def _makespan(instance: Instance, segments: list[Segment]) -> float:
    return max(end for _, end in earliest_times(instance, with_devices(instance, segments)))
