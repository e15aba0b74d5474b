"""Aceso's search: iterative bottleneck alleviation with several hops (Liu et al., EuroSys 2024, and its artifact).

    for each number of stages p, with turns of equal work instead of processes that run side by side:
        c = balanced configuration of p stages
        trial: for each of the p slowest stages of c as first target: r = multi_hop(c), until it is better than the best
               fine-tune the best configuration that was new in this trial
               a better one was found: c = it
               else c = best of the configurations that were generated, but never expanded, within 1.2 of the best time
               none left: adaptive restart from the best expanded ones, up to 5 times each, with partners not tried yet
    multi_hop(c, hop): at most 7 hops
        target = slowest stage of c that was no target from here yet (fullest, where memory does not suffice)
        for each group of primitives, in the order of `ranking`:
            new configurations (`primitives`), those seen before dropped; if one is better than the best: the fastest
            else go on from each of them, the fastest first

Recomputation is not searched: it is chosen greedily in every evaluation (`recompute`).
"""

import heapq
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace

from solver_plan.parallelism.choices import MicroBatch, device_counts
from solver_plan.parallelism.heuristics.aceso.configuration import Configuration, plan_of
from solver_plan.parallelism.heuristics.aceso.fine_tune import fine_tuned
from solver_plan.parallelism.heuristics.aceso.full_costs import FullStageCosts
from solver_plan.parallelism.heuristics.aceso.pipeline import Evaluated, Pipelines
from solver_plan.parallelism.heuristics.aceso.primitives import Tried
from solver_plan.parallelism.heuristics.aceso.ranking import ordered_groups
from solver_plan.parallelism.heuristics.aceso.stage_costs import AcesoStageCosts, StageCosts
from solver_plan.parallelism.plan import ParallelismPlan
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.solving import Clock

SOURCE = "heuristic:aceso"
MOST_HOPS = 7
MOST_STAGES = 16
PATIENCE = 30
"""New configurations after which a trial that brought nothing better is given up."""
POOL_FACTOR = 1.2
"""Configurations within this factor of the best time are kept for restarts."""
MOST_EXPANSIONS = 5
"""Times that adaptive restarts expand a configuration."""
TURN = 400
"""Stage evaluations until the next number of stages has its turn."""
EAGERNESS = 8
"""A number of stages whose best plan takes x times the best of all has turns of x ** -EAGERNESS the length."""
LEAST_SHARE = 0.1
"""The least part of a turn that a number of stages gets."""
STAGE_COST_S = 2e-4
"""Deterministic seconds that the evaluation of a stage counts."""
STEP_COST_S = 3e-4
"""Deterministic seconds that one expansion of a configuration by a group of primitives counts beside."""

Offer = Callable[[ParallelismPlan, str], bool]
"""Takes a plan and its source, and evaluates it independently: `Incumbent.offer`."""


@dataclass(frozen=True, slots=True)
class AcesoOutcome:
    """How the search ended."""

    evaluations: int
    """Stages evaluated."""
    completed: bool
    """It ended by itself or at the limit of evaluations, not by the clock."""


def aceso_search(
    problem: ParallelismProblem,
    batches: Sequence[MicroBatch],
    clock: Clock,
    offer: Offer,
    *,
    evaluation_limit: int | None = None,
) -> AcesoOutcome:
    """Search for plans and offer each one that is better than those before.

    Parameters
    ----------
    problem
        What to plan.
    batches
        Every micro-batch size with its choices.
    clock
        Ends the search; evaluations spend deterministic time.
    offer
        Is called with each better plan.
    evaluation_limit
        Stages to evaluate at most; None: until the search ends by itself or the clock does.
    """
    if problem.cost_model == "aceso":
        return AcesoSearch(problem, batches, clock, offer, evaluation_limit).run()
    outcomes = []
    for sharding in problem.space.sharding:
        sharded = [batch for batch in (_sharded(batch, sharding) for batch in batches) if batch.choices]
        limit = None if evaluation_limit is None else max(1, evaluation_limit // len(problem.space.sharding))
        ordered = sorted(sharded, key=lambda batch: batch.size)
        outcomes.append(AcesoSearch(problem, ordered, clock, offer, limit, FullStageCosts(problem, ordered)).run())
    return AcesoOutcome(sum(one.evaluations for one in outcomes), all(one.completed for one in outcomes))


def _sharded(batch: MicroBatch, sharding: int) -> MicroBatch:
    """Return the choices with one way of sharding, which Aceso's primitives do not know; one replica has any."""
    return replace(
        batch,
        choices=tuple(
            replace(costs, choice=replace(costs.choice, sharding=sharding))
            for costs in batch.choices
            if costs.choice.data_parallel == 1 or costs.choice.sharding == sharding
        ),
    )


class AcesoSearch:
    """The search over all numbers of stages."""

    def __init__(
        self,
        problem: ParallelismProblem,
        batches: Sequence[MicroBatch],
        clock: Clock,
        offer: Offer,
        evaluation_limit: int | None = None,
        costs: StageCosts | None = None,
    ) -> None:
        ordered = sorted(batches, key=lambda batch: batch.size)
        self.problem = problem
        self.costs = costs if costs is not None else AcesoStageCosts(problem, ordered)
        self.pipelines = Pipelines(problem, ordered, self.costs)
        self.best: Evaluated | None = None
        self._clock = clock
        self._offer = offer
        self._limit = evaluation_limit
        self._spent = 0

    @property
    def over(self) -> bool:
        """Whether a limit was reached."""
        return self._clock.expired or (self._limit is not None and self.costs.evaluations >= self._limit)

    def run(self) -> AcesoOutcome:
        """Search until nothing is left to try or a limit is reached."""
        searches = [StageCountSearch(self, stages) for stages in self._stage_counts()]
        waiting = [(search, search.steps()) for search in searches]
        while waiting and not self.over:
            waiting = [(search, steps) for search, steps in waiting if self._turn(search, steps)]
        self._spend()
        return AcesoOutcome(self.costs.evaluations, completed=not self._clock.expired)

    def found(self, evaluated: Evaluated) -> None:
        """Offer a configuration that fits, if it is the best so far."""
        if self.best is None or evaluated.iteration_ms < self.best.iteration_ms:
            self.best = evaluated
            marks = self.pipelines.marks(evaluated.configuration)
            self._offer(plan_of(self.problem, self.pipelines.batches, evaluated.configuration, marks), SOURCE)

    def _stage_counts(self) -> range:
        counts = device_counts(self.problem)
        most = self.problem.cluster.devices // counts[0] if counts else 0
        limit = self.problem.space.max_stages or MOST_STAGES
        return range(1, min(most, limit, len(self.problem.operators)) + 1)

    def _turn(self, search: "StageCountSearch", steps: Iterator[None]) -> bool:
        """Let one number of stages search for a while; False when it has ended.

        Aceso gives each number of stages a process and equal time. Where they share one budget, the turns of those that
        are behind are shorter.
        """
        share = 1.0
        if self.best is not None and search.best is not None:
            share = (self.best.iteration_ms / search.best.iteration_ms) ** EAGERNESS if search.best.fits else 0.0
        end = self.costs.evaluations + TURN * max(LEAST_SHARE, share)
        while self.costs.evaluations < end and not self.over:
            self._clock.spend(STEP_COST_S)
            if next(steps, self) is self:
                return False
            self._spend()
        return True

    def _spend(self) -> None:
        self._clock.spend(STAGE_COST_S * (self.costs.evaluations - self._spent))
        self._spent = self.costs.evaluations


Steps = Generator[None, None, Evaluated | None]
"""Pauses after each group of primitives, and returns what was found."""


class StageCountSearch:
    """The search for one number of stages."""

    def __init__(self, search: AcesoSearch, stages: int) -> None:
        self._search = search
        self._stages = stages
        self._pipelines = search.pipelines
        self.seen: set[Configuration] = set()
        """Configurations generated so far."""
        self._targets: set[tuple[Configuration, int]] = set()
        self._tried: dict[tuple[Configuration, int, str], Tried] = {}
        self._pool: list[tuple[tuple[bool, float, float], int, Evaluated]] = []
        self._expanded: list[tuple[tuple[bool, float, float], int, Evaluated]] = []
        self._count = 0
        self._best_of_trial: Evaluated | None = None
        self._trial_end = 0
        self.best: Evaluated | None = None
        """The best so far, or the one that comes closest to fitting."""

    def steps(self) -> Iterator[None]:
        """Search; each step of the iterator is one group of primitives on one configuration."""
        current = self._pipelines.start(self._stages)
        if current is None:
            return
        self.seen.add(current.configuration)
        self._improve(current)
        while current is not None:
            before, self._best_of_trial, self._trial_end = self.best, None, len(self.seen) + PATIENCE
            for _ in range(self._stages):
                better = yield from self._multi_hop(current, 0)
                if better is not None:
                    self._improve(better)
                    break
            if self._best_of_trial is not None and self._best_of_trial.fits:
                yield from self._fine_tune(self._best_of_trial)
            current = self.best if self.best is not before else self._restart()
            yield

    def _improve(self, evaluated: Evaluated) -> None:
        if self.best is None or evaluated.order < self.best.order:
            self.best = evaluated
            self.seen.add(evaluated.configuration)
            if evaluated.fits:
                self._search.found(evaluated)

    def _fine_tune(self, evaluated: Evaluated) -> Iterator[None]:
        tuned = None
        for tuned in fine_tuned(self._pipelines, evaluated):
            self._improve(tuned)
            yield
        if tuned is not None and tuned.configuration not in self.seen:
            self.seen.add(tuned.configuration)
            self._remember(self._pool, tuned)

    def _multi_hop(self, current: Evaluated, hop: int) -> Steps:
        """Return a configuration better than the best, found within the hops that are left; None if there is none."""
        assert self.best is not None
        target = self._next_target(current)
        if hop == MOST_HOPS or target is None or len(self.seen) > self._trial_end:
            return None
        self._remember(self._expanded, current)
        current.expansions += 1
        for group in ordered_groups(current, target):
            fresh = []
            for primitive in group:
                tried = self._tried.setdefault((current.configuration, target, primitive.name), set())
                for configuration in primitive.apply(self._pipelines, current, target, tried):
                    if configuration not in self.seen:
                        self.seen.add(configuration)
                        evaluated = self._pipelines.evaluate(configuration)
                        if evaluated is not None:
                            fresh.append(evaluated)
            fresh.sort(key=lambda evaluated: evaluated.order)
            for evaluated in fresh:
                self._remember(self._pool, evaluated)
            if fresh and (self._best_of_trial is None or fresh[0].order < self._best_of_trial.order):
                self._best_of_trial = fresh[0]
            yield
            if fresh and fresh[0].order < self.best.order:
                return fresh[0]
            for evaluated in fresh:
                found = yield from self._multi_hop(evaluated, hop + 1)
                if found is not None:
                    return found
        return None

    def _next_target(self, current: Evaluated) -> int | None:
        """Return the worst stage that was no target from this configuration yet (Heuristic-1), and take note of it."""
        for stage in current.bottlenecks():
            if (current.configuration, stage) not in self._targets:
                self._targets.add((current.configuration, stage))
                return stage
        return None

    def _remember(self, pool: list[tuple[tuple[bool, float, float], int, Evaluated]], evaluated: Evaluated) -> None:
        if self._near(evaluated):
            self._count += 1
            heapq.heappush(pool, (evaluated.order, self._count, evaluated))

    def _near(self, evaluated: Evaluated) -> bool:
        assert self.best is not None
        return not self.best.fits or (evaluated.fits and evaluated.iteration_ms < POOL_FACTOR * self.best.iteration_ms)

    def _restart(self) -> Evaluated | None:
        """Return where to go on: the best configuration never expanded, or else an expanded one with a clean slate."""
        while self._pool:
            evaluated = heapq.heappop(self._pool)[2]
            if evaluated.expansions == 0 and self._near(evaluated):
                return evaluated
        while self._expanded:
            evaluated = heapq.heappop(self._expanded)[2]
            if evaluated.expansions < MOST_EXPANSIONS and self._near(evaluated):
                for stage in range(self._stages):
                    self._targets.discard((evaluated.configuration, stage))
                return evaluated
        return None
