"""The search for better plans: annealing from several starts, and the constraint program around the incumbent.

Small problems are given to the constraint program whole, a slice for each layer, and are then solved to proven
optimality; its bound holds for every plan. Large ones are re-optimised a few components at a time: those of one task,
of one set of weights, or those that run at one time (large-neighbourhood search by windows). `search_capacity` and
`search_devices` say how for the two sorts of problems.
"""

import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace

from solver_plan.solving import Clock, Incumbent
from solver_plan.wavefront.heuristics.annealing_processes import Annealed, AnnealingProcesses, Round
from solver_plan.wavefront.instance import Instance
from solver_plan.wavefront.plan import WavefrontPlan
from solver_plan.wavefront.schedule import Schedule, earliest_times

log = logging.getLogger(__name__)

Offer = Callable[[Schedule, str], bool]
Take = Callable[[], bool]
"""Takes, in the main thread, what a neighbourhood brought; True if that is a better plan."""
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
OTHER_SEEDS = 1000
"""Between the seeds of the rounds of two processes."""
LEAST_FOR_PROCESSES_S = 4.0
"""Of annealing: with less, starting other processes (about half a second each) takes too much of it."""
MOST_PROCESSES = 7
REHEAT = 0.3
"""Start temperature of later rounds, relative to the first."""
NEIGHBOURHOOD_LIMIT = 0.5
"""Most for one neighbourhood, in the clock's unit."""
NEIGHBOURHOOD_SIZE = 2
"""Components to begin with."""
LARGEST_NEIGHBOURHOOD = 5
LARGEST_NEIGHBOURHOOD_SHARE = 0.3
"""Of the time for neighbourhoods, at most for one."""
MOST_DRAWS = 20
"""Of a neighbourhood that was not tried yet."""
SECONDS_PER_NEIGHBOURHOOD = 0.02
"""Deterministic cost of building a program: some are solved in no time at all."""


class Search(ABC):
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
    neighbourhoods_at_once: int = 1
    """Each in a thread of its own."""

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
    def neighbourhood_work(self, free: frozenset[int], limit: float) -> Callable[[], Take]:
        """Return work, for any thread, that re-optimises some components of what is the best now."""

    @abstractmethod
    def restart(self) -> None:
        """Go on from another plan, since no neighbourhood of this one has a better one."""

    @abstractmethod
    def spans(self) -> list[tuple[float, float]]:
        """Return when each component starts and ends in the incumbent."""

    def suits_neighbourhoods(self) -> bool:
        """Tell whether there is a plan that neighbourhoods can be taken of."""
        return True

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
        limit = min(self.neighbourhood_limit, share * LARGEST_NEIGHBOURHOOD_SHARE)
        tried: set[frozenset[int]] = set()
        end_at = self.clock.remaining - share
        at_work: set[Future[Take]] = set()
        with ThreadPoolExecutor(self.neighbourhoods_at_once, "neighbourhood") as threads:
            while not self.done and self.clock.remaining > end_at:
                if not self.suits_neighbourhoods():
                    self.anneal_round(self.round(self.rng.randrange(10**6), 4 * self.neighbourhood_limit))
                    continue
                while len(at_work) < self.neighbourhoods_at_once:
                    self.clock.spend(SECONDS_PER_NEIGHBOURHOOD)
                    work = self.neighbourhood_work(self._untried(size, tried), limit)
                    at_work.add(threads.submit(work))
                ended, at_work = wait(at_work, return_when=FIRST_COMPLETED)
                for each in ended:
                    if each.result()():
                        failed = 0
                        tried.clear()
                    else:
                        failed += 1
                if failed > self.patience * len(self.instance.layers):
                    failed = 0
                    size += 1
                    if size > min(self.largest_neighbourhood, len(self.instance.layers)):
                        size = self.neighbourhood_size
                        _take_all(at_work)
                        at_work = set()
                        tried.clear()
                        self.restart()
            _take_all(at_work)

    def _untried(self, size: int, tried: set[frozenset[int]]) -> frozenset[int]:
        """Return a neighbourhood that was not tried on this plan, if one is soon found, and note it."""
        for _ in range(MOST_DRAWS):
            found = self._neighbourhood(size)
            if found not in tried:
                break
        tried.add(found)
        return found

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


def _take_all(at_work: set[Future[Take]]) -> None:
    for each in at_work:
        each.result()()


def spans_of(instance: Instance, schedule: Schedule) -> list[tuple[float, float]]:
    """Return when each component starts and ends, in ms."""
    times = earliest_times(instance, schedule)
    found: list[tuple[float, float]] = [(float("inf"), 0.0)] * len(instance.layers)
    for run, (start, end) in zip(schedule.runs, times, strict=False):
        before = found[run.component]
        found[run.component] = min(before[0], start), max(before[1], end)
    return found
