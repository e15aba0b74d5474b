"""The search where it matters which devices run a slice: transfers, memory, reductions, two phases."""

import logging
from collections.abc import Callable, Sequence

from solver_plan.solving import Clock, Incumbent
from solver_plan.solving.cp_sat import solve_cp_sat
from solver_plan.wavefront.heuristics.annealing_devices import AREA_WEIGHT, anneal_devices
from solver_plan.wavefront.heuristics.annealing_processes import Annealed, Round
from solver_plan.wavefront.instance import Instance
from solver_plan.wavefront.model.device_sets import MOST_DEVICES, DeviceSetModel
from solver_plan.wavefront.model.devices import DeviceModel
from solver_plan.wavefront.model.pieces import neighbourhood, whole_problem
from solver_plan.wavefront.model.slices import SliceModel
from solver_plan.wavefront.plan import WavefrontPlan
from solver_plan.wavefront.schedule import Schedule, plan_of
from solver_plan.wavefront.search import ANNEALING, CP_SAT, REHEAT, Offer, Search, Take, spans_of

log = logging.getLogger(__name__)

ROUND_SHARE = 0.12
FRESH_ROUNDS = 6
"""As in the other search; rounds end far apart here, so more fresh ones."""
ANNEALING_SHARE = 0.1
LARGE_ANNEALING_SHARE = 0.85
MOST_COMPONENT_DEVICES = 100
"""Components times devices: in larger problems neighbourhoods bring little, and most of the time is for annealing."""
NEIGHBOURHOOD_LIMIT = 2.5
NEIGHBOURHOOD_SIZE = 3
"""The same where device sets matter: annealing is stuck early there, and two components are soon proven best."""
LARGEST_NEIGHBOURHOOD = 4
PATIENCE = 2
MOST_PROGRAMS_AT_ONCE = 8
RESTART_SHARE = 0.05
"""Of the whole budget, for annealing another plan to go on from."""
MOST_SLICES_IN_NEIGHBOURHOOD = 150
SLICES_SHARE = 0.95
"""Of the neighbourhoods, for the program of few slices: the other one knows more device sets, but is slow."""
LEAST_GAIN = 5e-4
"""Of the objective, that a neighbourhood has to bring."""


class DeviceSearch(Search):
    """Where it matters which devices run a slice."""

    round_share = ROUND_SHARE
    neighbourhood_limit = NEIGHBOURHOOD_LIMIT
    neighbourhood_size = NEIGHBOURHOOD_SIZE
    largest_neighbourhood = LARGEST_NEIGHBOURHOOD
    patience = PATIENCE

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
        small = len(instance.layers) * instance.devices <= MOST_COMPONENT_DEVICES
        self.annealing_share = ANNEALING_SHARE if small else LARGE_ANNEALING_SHARE
        budget = clock.budget
        self.neighbourhoods_at_once = 1 if budget.deterministic else min(MOST_PROGRAMS_AT_ONCE, budget.worker_count)
        self.best: tuple[float, float, Schedule] | None = None
        """What is being improved: bytes beyond the memory, objective, schedule."""
        self.annealed: list[tuple[float, Schedule]] = []
        """Plans that annealing from the starts has ended with, and that have not been improved yet: objective, plan."""

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
        self._take_annealed(schedule, objective, excess)

    def _take_annealed(self, schedule: Schedule, objective: float, excess: float) -> None:
        log.info("annealed to %g, %g bytes beyond the memory", objective, excess)
        if excess == 0:
            self.annealed.append((objective, schedule))
        self._take(schedule, objective, excess)

    def _take(self, schedule: Schedule, objective: float, excess: float, source: str = ANNEALING) -> bool:
        """Go on from a schedule if it is better than the best one since the last restart."""
        if self.best is not None and (excess, objective) >= self.best[:2]:
            return False
        self.best = excess, objective, schedule
        if excess == 0:
            self.offer(schedule, source)
        return True

    def round(self, number: int, share: float, beside: bool = False) -> Round:
        """Return the next round: from the next start, or after some rounds from the best."""
        assert self.best is not None
        fresh = number < FRESH_ROUNDS or beside
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
        self._take_annealed(found.best, found.objective, found.excess_bytes)

    def _tell(self, schedule: Schedule, objective: float) -> None:
        self._take(schedule, objective, 0.0)

    def solve_whole(self, limit: float) -> None:
        """Prove optimality with a piece for each layer."""
        assert self.best is not None
        schedule = self.best[2]
        slow = self.incumbent.objective or 3 * sum(self.instance.shortest_ms(c) for c in self.instance.components)
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
            self._take_solved(built.read(outcome.values))
        if outcome.bound is not None:
            self._bound(built.milliseconds(outcome.bound))

    def _take_solved(self, schedule: Schedule) -> bool:
        predicted = plan_of(self.instance, schedule).predicted
        assert predicted is not None
        fits = self.instance.keeps_memory(predicted.device_memory_bytes)
        return fits and self._take(schedule, predicted.makespan_ms, 0.0, CP_SAT)

    def _bound(self, bound_ms: float) -> None:
        if self.incumbent.objective is not None:
            self.incumbent.raise_bound(min(bound_ms, self.incumbent.objective), CP_SAT)

    def neighbourhoods(self, share: float) -> None:
        """Re-optimise from the best plan, later from others that annealing has ended with."""
        self._drop_alike()
        super().neighbourhoods(share)

    def _drop_alike(self) -> None:
        """Forget what annealing has ended with that is as long as the plan that is improved now: likely the same."""
        assert self.best is not None
        objective = self.best[1]
        self.annealed = [each for each in self.annealed if each[0] != objective]

    def suits_neighbourhoods(self) -> bool:
        """Tell whether the best plan keeps the memory, and the programs around it are small enough."""
        assert self.best is not None
        excess, _, schedule = self.best
        return excess == 0 and len(schedule.runs) * self.instance.devices <= 40 * MOST_SLICES_IN_NEIGHBOURHOOD

    def neighbourhood_work(self, free: frozenset[int], limit: float) -> Callable[[], Take]:
        """Return work that re-optimises some components with all others keeping their slices and devices."""
        assert self.best is not None
        _, objective, schedule = self.best
        horizon = objective * (1 - LEAST_GAIN)
        few_slices = self.rng.random() < SLICES_SHARE
        seed = self.rng.randrange(2**31)

        def work() -> Take:
            built: DeviceModel | SliceModel
            if few_slices:
                built = SliceModel(self.instance, schedule, horizon, free)
            else:
                built = DeviceModel(self.instance, neighbourhood(schedule, free, 3), horizon)
            outcome = solve_cp_sat(
                built.model, self.clock, limit=limit, gap_limit=0.0, light=True, workers=1, seed=seed
            )
            if outcome.values is None:
                return lambda: False
            found = built.read(outcome.values)
            return lambda: self._take_solved(found)

        return work

    def restart(self) -> None:
        """Go on from the next best that annealing has found, or anneal anew; the incumbent is kept where it is."""
        self.best = None
        if self.annealed:
            self.best = 0.0, *min(self.annealed, key=lambda each: each[0])
        else:
            seed = self.rng.randrange(2**31)
            limit = self.clock.budget.time_limit_s * RESTART_SHARE
            self._anneal(self.starts[seed % len(self.starts)], limit, seed, heat=1.0)
        self._drop_alike()
        assert self.best is not None
        log.info("neighbourhoods go on from %g", self.best[1])

    def spans(self) -> list[tuple[float, float]]:
        """Return when each component starts and ends in the plan that is being improved."""
        assert self.best is not None
        return spans_of(self.instance, self.best[2])
