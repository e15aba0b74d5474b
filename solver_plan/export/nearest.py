"""The configuration of another system that is nearest to a plan.

What the system can be told is kept. What it cannot be told is chosen anew: of all ways that fit the memory the one with
the least predicted iteration, each priced as a plan of the same problem. If nothing fits with the plan's own cuts, they
are moved as well; if nothing fits at all, what exceeds the memory least.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from solver_plan.errors import InvalidPlanError, NotExportableError
from solver_plan.export.configuration import Configuration, Recomputation, plan_of
from solver_plan.export.layers import LayerChain
from solver_plan.export.losses import Kept, plan_cuts, recomputations
from solver_plan.export.target import Target
from solver_plan.parallelism.check import ROUNDING_BYTES, check_structure
from solver_plan.parallelism.costs import Evaluation, evaluate
from solver_plan.parallelism.plan import ParallelismPlan
from solver_plan.parallelism.problem import ParallelismProblem

MOST_EVALUATIONS = 400
"""Plans that are priced before cuts are moved no more."""
MOST_OPERATORS = 500_000
"""The same by their operators: some 8 us each."""
NOTHING = Recomputation("nothing")
Cuts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Priced:
    """A configuration, and what it costs as a plan."""

    configuration: Configuration
    plan: ParallelismPlan
    evaluation: Evaluation
    excess_bytes: float
    """By how much the stages exceed the memory, together."""
    outside: bool
    """The problem's space has no such plan."""

    @property
    def rank(self) -> tuple[float, bool, float]:
        """What fits comes first, then what the problem's space has, then what is fast."""
        return self.excess_bytes, self.outside, self.evaluation.iteration_ms


def nearest(
    problem: ParallelismProblem, plan: ParallelismPlan, chain: LayerChain, target: Target, kept: Kept
) -> Priced:
    """Return the nearest configuration of a target.

    Raises
    ------
    NotExportableError
        If the target has no configuration on as many devices.
    """
    search = _Search(problem, chain, target)
    best: Priced | None = None
    for layout, groups, virtual in _layouts(problem, plan, chain, kept):
        own = kept.layout is not None and groups * virtual == len(plan.stages)
        tensor_parallel, data_parallel, partition = layout
        allowed = target.shardings(groups)
        if kept.sharding in allowed:
            shardings: Sequence[int] = (kept.sharding,)
        else:
            shardings = allowed if problem.cost_model == "full" else allowed[:1]
        for sharding, cuts in itertools.product(
            shardings, _starts(problem, plan, chain, kept, layout, groups, virtual)
        ):
            start = Configuration(
                groups=groups,
                tensor_parallel=tensor_parallel,
                data_parallel=data_parallel,
                partition=partition,
                sharding=sharding,
                micro_batch_size=plan.micro_batch_size,
                micro_batches=plan.micro_batches,
                cuts=cuts,
                recomputation=NOTHING,
                orders=kept.orders,
            )
            fixed = kept.recomputation if own and (kept.cuts or kept.recomputation == NOTHING) else None
            found = search.best_of(start, fixed)
            if fixed is not None and (found is None or found.excess_bytes):
                found = search.best_of(start, None)
            if found is not None and (found.excess_bytes or not (own and kept.cuts)):
                found = search.move_cuts(found)
            if found is not None and (best is None or found.rank < best.rank):
                best = found
    if best is None:
        used = len({device for stage in plan.stages for device in stage.devices})
        raise NotExportableError(
            f"plan: {target.name} has no configuration with one layout for all stages on {used} devices at "
            f"micro-batches of {plan.micro_batch_size}; plan again with space.same_layout"
        )
    return best


def _layouts(
    problem: ParallelismProblem, plan: ParallelismPlan, chain: LayerChain, kept: Kept
) -> Iterator[tuple[tuple[int, int, int], int, int]]:
    """Yield layout, groups of devices and stages of each."""
    if kept.layout is not None:
        yield kept.layout, kept.groups, kept.virtual_stages
        return
    devices = len({device for stage in plan.stages for device in stage.devices})
    used = {one.tensor_parallel for stage in plan.stages for one in stage.layout}
    for groups in range(1, min(devices, len(chain.cuts) + 1) + 1):
        if devices % groups == 0:
            for tensor_parallel in sorted(used):
                data_parallel, rest = divmod(devices // groups, tensor_parallel)
                if data_parallel and not rest and plan.micro_batch_size % data_parallel == 0:
                    yield (tensor_parallel, data_parallel, 0), groups, 1


def _starts(
    problem: ParallelismProblem,
    plan: ParallelismPlan,
    chain: LayerChain,
    kept: Kept,
    layout: tuple[int, int, int],
    groups: int,
    virtual: int,
) -> Iterator[Cuts]:
    """Yield cuts to start from: the plan's own, moved to the nearest layer, and those of equal work."""
    own, stages = plan_cuts(plan), groups * virtual
    if len(own) == stages + 1:
        if kept.cuts:
            yield own
            return
        inner = sorted({min(chain.cuts, key=lambda cut: abs(cut - wanted)) for wanted in own[1:-1]})
        if len(inner) == stages - 1:
            yield (0, *inner, chain.operators)
    balanced = _balanced(_work_ms(problem, chain, layout, plan.micro_batch_size), stages)
    if balanced is not None:
        bounds = (0, *chain.cuts, chain.operators)
        yield tuple(bounds[at] for at in balanced)


def _work_ms(
    problem: ParallelismProblem, chain: LayerChain, layout: tuple[int, int, int], micro_batch_size: int
) -> list[float]:
    """Return forward and backward between neighbouring cuts; 0 where it was not profiled."""
    tensor_parallel, data_parallel, partition = layout
    bounds = (0, *chain.cuts, chain.operators)
    works = []
    for first, end in itertools.pairwise(bounds):
        work = 0.0
        for index in range(first, end):
            entry = problem.profile_of(index, micro_batch_size // data_parallel, tensor_parallel, partition)
            work += 0.0 if entry is None else entry.forward_ms + entry.backward_ms
        works.append(work)
    return works


def _balanced(works: Sequence[float], parts: int) -> Cuts | None:
    """Return where to cut pieces of work into so many parts with the least maximum; None if they are too few."""
    if parts > len(works):
        return None
    low, high = max(works), sum(works)
    for _ in range(40):
        middle = (low + high) / 2
        if len(_filled(works, parts, middle)) <= parts + 1:
            high = middle
        else:
            low = middle
    return _filled(works, parts, high)


def _filled(works: Sequence[float], parts: int, limit: float) -> Cuts:
    """Return cuts of parts of at most this work, each with a piece left for every part behind it."""
    cuts, load = [0], 0.0
    for at, work in enumerate(works):
        left = len(works) - at
        full = load + work > limit * (1 + 1e-12)
        if at > cuts[-1] and (full or left <= parts - len(cuts)):
            cuts.append(at)
            load = 0.0
        load += work
    return (*cuts, len(works))


class _Search:
    """Prices configurations, counting them."""

    def __init__(self, problem: ParallelismProblem, chain: LayerChain, target: Target) -> None:
        self.problem, self.chain, self.target = problem, chain, target
        self.left = min(MOST_EVALUATIONS, MOST_OPERATORS // chain.operators)
        space = replace(
            problem.space,
            max_stages=None,
            device_counts=None,
            micro_batch_sizes=None,
            use_all_devices=False,
            recompute="operator",
            sharding=(0, 1, 2, 3),
            device_order="any",
            partitions=None,
            same_layout=False,
            virtual_stages=tuple(range(1, len(chain.cuts) + 2)),
        )
        # what the user's space leaves out is told, not refused: the plan is to be run elsewhere
        self.anywhere = replace(problem, space=space)

    def price(self, configuration: Configuration) -> Priced | None:
        """Return what a configuration costs; None if it is no plan of the problem, or was not profiled."""
        self.left -= 1
        plan = plan_of(self.problem, self.chain, configuration)
        if check_structure(self.anywhere, plan):
            return None
        try:
            evaluation = evaluate(self.problem, plan)
        except InvalidPlanError:
            return None
        limit = self.problem.cluster.usable_bytes_per_device + ROUNDING_BYTES
        excess = sum(max(0.0, stage.memory_bytes - limit) for stage in evaluation.stages)
        return Priced(configuration, plan, evaluation, excess, bool(check_structure(self.problem, plan)))

    def best_of(self, start: Configuration, fixed: Recomputation | None) -> Priced | None:
        """Return the best recomputation for a configuration."""
        if fixed is not None:
            return self.price(replace(start, recomputation=fixed))
        ways = recomputations(self.chain, self.target, start.cuts)
        steps = [way for way in ways if way.rule == "first_layers"]
        found = [self.price(replace(start, recomputation=way)) for way in ways if way.rule != "first_layers"]
        if steps and not any(one is not None and one.excess_bytes == 0 for one in found[:1]):
            found.append(_least_that(lambda way: self.price(replace(start, recomputation=way)), steps))
        return min((one for one in found if one is not None), key=lambda one: one.rank, default=None)

    def move_cuts(self, best: Priced) -> Priced:
        """Return the best that is reached by moving layers from one stage to another, fewer and fewer at a time."""
        step = max(1, len(self.chain.layers) // (4 * best.configuration.stages))
        while step and self.left > 0:
            improved = False
            for giver, taker in _moves(best.evaluation):
                cuts = self._moved(best.configuration.cuts, giver, taker, step)
                if cuts is None or self.left <= 0:
                    continue
                found = self.best_of(replace(best.configuration, cuts=cuts), None)
                if found is not None and found.rank < best.rank:
                    best, improved = found, True
            step = step if improved else step // 2
        return best

    def _moved(self, cuts: Cuts, giver: int, taker: int, step: int) -> Cuts | None:
        """Return the cuts after a stage gave so many layers to another, those between passing them on."""
        bounds = (0, *self.chain.cuts, self.chain.operators)
        between = range(giver + 1, taker + 1) if giver < taker else range(taker + 1, giver + 1)
        way = -step if giver < taker else step
        places = [bounds.index(cut) + (way if number in between else 0) for number, cut in enumerate(cuts)]
        if any(one >= two for one, two in itertools.pairwise(places)):
            return None
        return tuple(bounds[place] for place in places)


def _moves(evaluation: Evaluation) -> list[tuple[int, int]]:
    """Return (giver, taker): the slowest and the fullest stage give to any, every stage to its neighbours."""
    stages = range(len(evaluation.stages))
    slowest = max(stages, key=lambda stage: evaluation.stages[stage].stage_ms)
    fullest = max(stages, key=lambda stage: evaluation.stages[stage].memory_bytes)
    moves = [(giver, taker) for giver in (slowest, fullest) for taker in stages if giver != taker]
    moves += [(giver, taker) for giver in stages for taker in (giver - 1, giver + 1) if taker in stages]
    return list(dict.fromkeys(moves))


def _least_that(price: Callable[[Recomputation], Priced | None], steps: Sequence[Recomputation]) -> Priced | None:
    """Return the first step that fits the memory: more layers take more time and less memory; the last if none does."""
    low, high = 0, len(steps) - 1
    best = price(steps[high])
    while low < high:
        middle = (low + high) // 2
        found = price(steps[middle])
        if found is not None and found.excess_bytes == 0:
            best, high = found, middle
        else:
            low = middle + 1
    return best
