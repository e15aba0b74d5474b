"""The search where any free devices will do: lists of segments, and a program that only counts devices."""

import logging
from collections.abc import Callable, Sequence

from solver_plan.solving import Clock, Incumbent
from solver_plan.solving.cp_sat import solve_cp_sat
from solver_plan.wavefront.heuristics.annealing import anneal
from solver_plan.wavefront.heuristics.annealing_processes import Annealed, Round
from solver_plan.wavefront.instance import Instance
from solver_plan.wavefront.model.capacity import CapacityModel
from solver_plan.wavefront.plan import WavefrontPlan
from solver_plan.wavefront.schedule import Schedule, Segment, earliest_times, with_devices
from solver_plan.wavefront.search import ANNEALING, CP_SAT, REHEAT, Offer, Search, Take, spans_of

log = logging.getLogger(__name__)

MOST_STARTS = 3
FRESH_ROUNDS = 5
"""Rounds from fresh starts, before the best is improved from where it is."""
AREA_WEIGHTS = (0.9, 0.5)
"""Of the annealing's energy, round by round: either suits some problems better."""


class CapacitySearch(Search):
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

    def neighbourhood_work(self, free: frozenset[int], limit: float) -> Callable[[], Take]:
        """Return work that re-optimises some components with all others keeping their modes and layers."""
        assert self.best is not None
        makespan, segments = self.best

        def work() -> Take:
            count = max(sum(1 for s in segments if s.component == c) for c in free)
            built = CapacityModel(self.instance, segments, makespan, free, max(3, count))
            outcome = solve_cp_sat(built.model, self.clock, hint=built.hint, limit=limit, gap_limit=0.0)
            if outcome.values is None:
                return lambda: False
            found = built.read(outcome.values)
            return lambda: self._take(found, _makespan(self.instance, found), CP_SAT)

        return work

    def restart(self) -> None:
        """Stay: annealing has ended near the best plan of all starts."""

    def spans(self) -> list[tuple[float, float]]:
        """Return when each component starts and ends in the incumbent."""
        assert self.best is not None
        schedule = with_devices(self.instance, self.best[1])
        return spans_of(self.instance, schedule)


def _makespan(instance: Instance, segments: list[Segment]) -> float:
    return max(end for _, end in earliest_times(instance, with_devices(instance, segments)))
