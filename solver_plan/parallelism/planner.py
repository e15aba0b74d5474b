"""The planner: baselines, the stage graph of every micro-batch size, and the constraint program over what is left.

    1. grid        the uniform grid gives a first plan (`heuristics/grid`)
    2. coarse      stages cut at block starts only: a near-optimal plan within a second or two
    3. fine        stages cut anywhere, pruned by the incumbent; paths of the relaxed graph are evaluated exactly, and
                   each better plan prunes further, until all stages that are left are exact
    4. program     CP-SAT over the stages of all micro-batch sizes proves the optimum (`model`)
    5. refined     where layouts are mixed within stages, while time is left: more paths are evaluated, and 4 repeated

The bound is valid for the whole space at every moment: what is dropped is dropped because no pipeline through it beats
the incumbent, and a micro-batch size that was not looked at yet counts with its work bound.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from ortools.sat.python import cp_model

from solver_plan.documents.certificate import AGREEMENT
from solver_plan.errors import InfeasibleProblemError, InputError
from solver_plan.parallelism.blocks import block_ranges
from solver_plan.parallelism.bounds import batch_work_bound_ms
from solver_plan.parallelism.check import evaluate_checked
from solver_plan.parallelism.choices import Bools, Floats, MicroBatch, micro_batches
from solver_plan.parallelism.drafts import draft_plan, finished
from solver_plan.parallelism.heuristics.aceso import aceso_search
from solver_plan.parallelism.heuristics.grid import grid_points
from solver_plan.parallelism.heuristics.interleaved import best_plan, interleavings, least_ms
from solver_plan.parallelism.infeasible import explain
from solver_plan.parallelism.model import PipelineModel, SizedArcs, build, hint_of
from solver_plan.parallelism.nothing_found import why_nothing
from solver_plan.parallelism.paths import best_path
from solver_plan.parallelism.plan import ParallelismPlan
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.parallelism.recomputation.shape import ChainShape, chain_shape
from solver_plan.parallelism.schedule import MOST_ACTIONS, action_count, play_cost_s
from solver_plan.parallelism.schedule_model import build_schedule_model
from solver_plan.parallelism.sources import StageKey, StageSource, stage_source
from solver_plan.parallelism.stage_graph import Arcs, StageGraph
from solver_plan.parallelism.windows import WindowGraph
from solver_plan.solving import Budget, Clock, Incumbent, OutOfTimeError, Planned, Progress, silent, solve_cp_sat
from solver_plan.solving.cp_sat import cp_sat_version
from solver_plan.solving.outcome import Effort

log = logging.getLogger(__name__)

HEURISTICS = ("grid", "aceso")
EVALUATION_COST_S = 0.002
"""Deterministic seconds that the evaluation of a plan counts, at least: where its schedule is played, a long one counts
what playing does."""
WARM_START_EVALUATIONS = 2_000
"""Stages that Aceso's search may evaluate for a first good plan."""
MIXED_WARM_START_EVALUATIONS = 8_000
"""The same where every operator has a layout of its own: there the search is longer, and worth more."""
MOST_NODES = 100_000_000
"""Nodes of a stage graph that are looked at; each has two potentials of 8 bytes in each direction."""
MOST_PLAYED = 40
"""Pipelines of the constraint program that are played, one after the other, under `full`."""
WIDENING = (1.3, 1.8, 3.0, 8.0, 100.0)
"""While no plan is known: cutoffs tried, as multiples of the work bound."""


@dataclass(slots=True)
class _Size:
    """What is known of one micro-batch size."""

    source: StageSource
    work_bound_ms: float
    """Every pipeline of this size takes at least so long, from the work alone."""
    bound_ms: float = 0.0
    """Every pipeline of this size with devices in rank order takes at least so long."""
    any_order_bound_ms: float = 0.0
    """The same with devices in any order."""
    graph: StageGraph | None = None
    arcs: Arcs | None = None
    real: dict[StageKey, float] = field(default_factory=dict)
    """Extra time of the stages that were found; infinite: none was."""

    @property
    def batch(self) -> MicroBatch:
        """The micro-batch size and the choices that the graph tells apart."""
        return self.source.batch


class Planner:
    """One search for a plan of one problem."""

    def __init__(
        self, problem: ParallelismProblem, budget: Budget, on_progress: Progress = silent, clock: Clock | None = None
    ) -> None:
        _require_planned_space(problem)
        self.problem = problem
        self.clock = clock or Clock(budget)
        self.incumbent: Incumbent[ParallelismPlan] = Incumbent(self._evaluate, self.clock, on_progress)
        self._shape: ChainShape = chain_shape(problem, block_ranges(problem))
        self._interleaved_bound_ms = np.inf
        """Every plan with more than one virtual stage takes at least so long."""

    def run(self, heuristic: str | None) -> Planned[ParallelismPlan]:
        """Search within the budget.

        Raises
        ------
        InfeasibleProblemError
            If no plan exists, with the reason.
        NoPlanFoundError
            If the limit came first, or what was searched holds none.
        """
        with self.clock.interruptible():
            try:
                self._search(heuristic)
            except OutOfTimeError:
                log.info("the limit came within a computation")
        budget = self.clock.budget
        solvers = {"grid": "exhaustive grid", "aceso": "iterative bottleneck alleviation"}
        certificate = self.incumbent.certificate(
            solvers[heuristic]
            if heuristic is not None
            else f"{cp_sat_version()}, {budget.worker_count} workers, seed {budget.seed}",
            completed=not self.clock.expired,
        )
        assert self.incumbent.plan is not None
        return Planned(
            plan=finished(self.problem, self.incumbent.plan, certificate),
            effort=Effort(
                wall_s=self.clock.seconds,
                deterministic_s=self.clock.deterministic_seconds,
                first_plan_s=self.incumbent.trace[0].seconds if self.incumbent.trace else None,
            ),
        )

    def _search(self, heuristic: str | None) -> None:
        if heuristic == "aceso":
            if self.problem.space.same_layout:
                raise InputError(
                    "space.same_layout: found true; Aceso's search changes the layout of single stages: give false, or "
                    "another heuristic"
                )
            aceso_search(self.problem, self._batches, self.clock, self.incumbent.offer)
            return
        self._grid()
        if heuristic is None:
            if self.incumbent.objective is None and not self.clock.expired:
                shortage = explain(self.problem, self._batches, self._shape, self.clock.work)
                if shortage is not None:
                    raise InfeasibleProblemError(shortage)
            sizes = self._sizes(self._batches)
            try:
                self._interleave()
                limit = WARM_START_EVALUATIONS if sizes[0].source.finds_all else MIXED_WARM_START_EVALUATIONS
                if not self.problem.space.same_layout:
                    aceso_search(self.problem, self._batches, self.clock, self.incumbent.offer, evaluation_limit=limit)
                if self.problem.cost_model == "full" and self.problem.cluster.nodes > 1:
                    self._alike_first()
                self._coarse(sizes)
                if self.problem.cost_model == "full":
                    sizes = self._rough(sizes)
                self._fine(sizes)
                self._program(sizes)
                while self._refine(sizes):
                    self._program(sizes)
            finally:
                if not self.incumbent.closed:
                    self._raise_bound(sizes)
            if self.incumbent.objective is None and not self.clock.expired:
                raise why_nothing(self.problem, self._least_ms(sizes), self._not_searched(sizes), self._has_plan)

    def _evaluate(self, plan: ParallelismPlan) -> float:
        # one with too many actions is refused, not played
        playable = self.problem.cost_model == "full" and action_count(plan) <= MOST_ACTIONS
        played_s = play_cost_s(plan) if playable else 0.0
        self.clock.spend(max(EVALUATION_COST_S, played_s))
        return evaluate_checked(self.problem, plan).iteration_ms

    @cached_property
    def _batches(self) -> list[MicroBatch]:
        batches = micro_batches(self.problem)
        if not batches:
            raise InputError(
                f"global_batch: no micro-batch size that the profiles and the space allow divides "
                f"{self.problem.global_batch}; choose another global batch, or profile more batch sizes"
            )
        if self.problem.cost_model == "full":
            largest = max(batch.size for batch in batches)
            batches = [batch for batch in batches if 2 * batch.count <= MOST_ACTIONS]
            if not batches:
                raise InputError(
                    f"global_batch: found {self.problem.global_batch}, which is {self.problem.global_batch // largest} "
                    f"micro-batches of {largest}, the largest size; the full cost model plays at most "
                    f"{MOST_ACTIONS // 2}: choose a smaller global batch, or profile larger batch sizes"
                )
        return batches

    def _sizes(self, batches: Sequence[MicroBatch]) -> list[_Size]:
        sizes = []
        for batch in batches:
            entry = _Size(stage_source(self.problem, self._shape, batch, self.clock.work), 0.0)
            least_ms = batch_work_bound_ms(self.problem, entry.batch)
            entry.work_bound_ms = entry.bound_ms = entry.any_order_bound_ms = least_ms
            sizes.append(entry)
        return sorted(sizes, key=lambda entry: (entry.bound_ms, entry.batch.size))

    def _cutoff(self) -> float:
        return self.incumbent.objective if self.incumbent.objective is not None else np.inf

    def _grid(self) -> None:
        """Offer the best plan of the grid: in the order of their least times, until none can be better."""
        points = [point for batch in self._batches for point in grid_points(self.problem, batch)]
        for point in sorted(points, key=lambda point: (point.least_ms, point.micro_batch_size)):
            if self.clock.expired or point.least_ms >= self._cutoff():
                return
            self.incumbent.offer(point.plan(self.problem), "heuristic:grid")

    def _worth(self, size: _Size, cutoff_ms: float, positions: int) -> bool:
        """Return whether a size may have a pipeline below the cutoff, and its graph is not too large to search."""
        if self.clock.expired or size.bound_ms >= cutoff_ms:
            return False
        devices = self.problem.cluster.devices // StageGraph.unit_of(self.problem, size.batch)
        nodes = positions * devices * min(self.problem.space.max_stages or devices, devices, positions)
        if nodes > MOST_NODES:
            log.warning("micro-batch %d: %d nodes of a stage graph are too many to search", size.batch.size, nodes)
        return nodes <= MOST_NODES

    def _interleave(self) -> None:
        """Offer every way to interleave that may be better, the most promising first."""
        if max(self.problem.space.virtual_stages) == 1:
            return
        found = interleavings(self.problem, self._batches, self._shape)
        self._interleaved_bound_ms = min((one.work_ms for one in found), default=np.inf)
        bounds: list[float] = []
        for number, one in enumerate(found):
            if self.clock.expired or one.work_ms >= self._cutoff():
                break
            least = least_ms(self.problem, self._shape, one, self.clock.work, self._cutoff())
            bounds.append(max(one.work_ms, least))
            if bounds[-1] < self._cutoff():
                plan = best_plan(self.problem, self._shape, one, self.clock.work)
                if plan is not None:
                    self.incumbent.offer(plan, "heuristic:interleaved")
            following = [other.work_ms for other in found[number + 1 : number + 2]]
            self._interleaved_bound_ms = min([*bounds, *following])

    # -- stage graphs -------------------------------------------------------------------------------------------

    def _graph(self, size: _Size, cutoff_ms: float, cuts: Bools) -> StageGraph:
        return StageGraph(self.problem, self._shape, size.batch, size.source.bound, cutoff_ms, cuts, self.clock.work)

    def _alike_first(self) -> None:
        """Look for plans whose stages have one layout: on several nodes they are good, and found in seconds."""
        if self.problem.space.same_layout:
            return
        alike = replace(self.problem, space=replace(self.problem.space, same_layout=True))
        sizes = self._sizes(micro_batches(alike))
        self._coarse(sizes)
        for size in sizes:
            if self._worth(size, self._cutoff(), len(self.problem.operators)):
                self._explore(size, self._cutoff())

    def _rough(self, sizes: list[_Size]) -> list[_Size]:
        """Bound every micro-batch size by what stages of whole blocks take; return the sizes, most promising first."""
        for size in sizes:
            if self._worth(size, self._cutoff(), len(self._shape.blocks)):
                self._windows(size, self._cutoff())
        self._raise_bound(sizes)
        return sorted(sizes, key=lambda entry: (entry.bound_ms, entry.batch.size))

    def _windows(self, size: _Size, cutoff_ms: float) -> Bools:
        """Return where a pipeline below the cutoff may be cut, and raise the bound of the size."""
        bound, work = size.source.bound, self.clock.work
        windows = WindowGraph(self.problem, self._shape, size.batch, bound, cutoff_ms, self._shape.block_cuts, work)
        arcs = windows.arcs()
        size.bound_ms = max(size.bound_ms, min(cutoff_ms, self._lowest(windows, arcs)))
        return windows.cuts(arcs)

    def _coarse(self, sizes: list[_Size]) -> None:
        """Look for good plans whose stages begin at block starts, in wider and wider searches."""
        for factor in WIDENING:
            for size in sizes:
                cutoff = min(self._cutoff(), factor * size.work_bound_ms)
                if self._worth(size, cutoff, len(self._shape.blocks)):
                    graph = self._graph(size, cutoff, self._shape.block_cuts)
                    self._descend(size, graph, graph.arcs(), patience=4)
            if all(self._cutoff() <= max(factor * size.work_bound_ms, size.bound_ms) for size in sizes):
                return

    def _fine(self, sizes: list[_Size]) -> None:
        """Find, for every micro-batch size, the stages that a better plan may use, with exact times."""
        if self.incumbent.objective is None and not self.clock.expired:
            for factor in WIDENING:
                for size in sizes:
                    if self.incumbent.objective is None and self._worth(size, np.inf, len(self.problem.operators)):
                        self._explore(size, factor * size.work_bound_ms)
                if self.incumbent.objective is not None:
                    break
        for number, size in enumerate(sizes):
            if self._worth(size, self._cutoff(), len(self.problem.operators)):
                self._explore(size, self._cutoff())
            if number < len(sizes) - 1:
                self._raise_bound(sizes)
        if not self.problem.in_rank_order:
            self._relax_order(sizes)

    def _refine(self, sizes: list[_Size]) -> bool:
        """Evaluate some more of the best paths where the stages of all arcs cannot be found; True if any was left."""
        known = sum(len(size.real) for size in sizes)
        for size in sizes:
            if size.graph is not None and size.arcs is not None and not size.source.finds_all:
                arcs = size.graph.prune(size.arcs, self._cutoff() * (1 + AGREEMENT))
                size.arcs = self._descend(size, size.graph, arcs, patience=20)
        return sum(len(size.real) for size in sizes) > known and not self.clock.expired

    def _relax_order(self, sizes: list[_Size]) -> None:
        """Find the bounds that hold for devices out of rank order too."""
        everywhere = np.ones(len(self.problem.operators) + 1, dtype=np.bool_)
        for size in sizes:
            cutoff = self._cutoff()
            if size.any_order_bound_ms < cutoff and not self.clock.expired:
                bound, work = size.source.bound, self.clock.work
                graph = StageGraph(
                    self.problem, self._shape, size.batch, bound, cutoff, everywhere, work, any_order=True
                )
                size.any_order_bound_ms = max(size.any_order_bound_ms, min(cutoff, self._lowest(graph, graph.arcs())))

    def _explore(self, size: _Size, cutoff_ms: float) -> None:
        """List the stages that a pipeline of one micro-batch size below the cutoff may have, and make them exact."""
        cuts = np.ones(len(self.problem.operators) + 1, dtype=np.bool_)
        if size.source.has_windows:
            cuts = self._windows(size, cutoff_ms)
        graph = self._graph(size, cutoff_ms, cuts)
        arcs = graph.arcs()
        size.bound_ms = max(size.bound_ms, min(cutoff_ms, self._lowest(graph, arcs)))
        # where stages take long to find, all sizes are bounded first: `_refine` goes on
        arcs = self._descend(size, graph, arcs, patience=10 if size.source.finds_all else 2)
        size.graph, size.arcs = graph, self._complete(size, graph, arcs)
        size.bound_ms = max(size.bound_ms, min(cutoff_ms, self._lowest(graph, size.arcs)))

    def _lowest(self, graph: StageGraph, arcs: Arcs) -> float:
        return float(graph.through(arcs).min(initial=np.inf))

    def _least_ms(self, sizes: list[_Size]) -> float:
        """Return what every plan takes at least; infinite: there is none."""
        bound = min(size.bound_ms if self.problem.in_rank_order else size.any_order_bound_ms for size in sizes)
        return min(bound, self._interleaved_bound_ms)

    def _raise_bound(self, sizes: list[_Size]) -> None:
        bound = self._least_ms(sizes)
        if np.isfinite(bound):
            self.incumbent.raise_bound(min(bound, self._cutoff()), "closed-form:stage-graph")

    def _descend(self, size: _Size, graph: StageGraph, arcs: Arcs, patience: int) -> Arcs:
        """Evaluate best paths until all stages of one were found before, or `patience` paths brought no better plan.

        Stages that were found count with their real time, others with their bound.
        """
        failures = 0
        extra_ms = self._known(size, graph, arcs)
        while failures < patience and len(arcs) and not self.clock.expired:
            path = best_path(graph, arcs.with_recompute(extra_ms))
            keys = graph.keys(arcs)
            if not path or all(keys[index] in size.real for index in path):
                break
            arcs = self._least(size, graph, arcs, path)
            size.real.update(zip((keys[index] for index in path), self._real(size, graph, arcs, path), strict=True))
            extra_ms = self._known(size, graph, arcs)
            failures = 0 if self._offer(size, graph, arcs, path) else failures + 1
            kept = np.flatnonzero(graph.through(arcs) <= self._cutoff() * (1 + AGREEMENT))
            arcs, extra_ms = arcs.select(kept), extra_ms[kept]
        return arcs

    def _known(self, size: _Size, graph: StageGraph, arcs: Arcs) -> Floats:
        """Return the extra time of the arcs, that of a stage that was found, or else a lower bound."""
        known = zip(graph.keys(arcs), arcs.recompute_ms.tolist(), strict=True)
        return np.array([size.real.get(key, least) for key, least in known])

    def _complete(self, size: _Size, graph: StageGraph, arcs: Arcs) -> Arcs:
        """Find the least recomputation of every arc, the most promising first, pruning on the way."""
        batch = 64
        done: set[StageKey] = set()
        while len(arcs) and not self.clock.expired:
            keys = graph.keys(arcs)
            order = np.argsort(graph.through(arcs), kind="stable")
            pending = [int(index) for index in order if keys[index] not in done][:batch]
            if not pending:
                break
            arcs = self._least(size, graph, arcs, pending)
            done.update(keys[index] for index in pending)
            path = best_path(graph, arcs)
            if path and all(keys[index] in done for index in path):
                self._offer(size, graph, arcs, path)
            arcs = graph.prune(arcs, self._cutoff() * (1 + AGREEMENT))
            batch = min(batch * 2, 1024)
        return arcs

    def _least(self, size: _Size, graph: StageGraph, arcs: Arcs, indices: list[int]) -> Arcs:
        """Return the arcs with the least recomputation of those at `indices`, and of all arcs of the same stages."""
        keys = graph.keys(arcs)
        wanted = {keys[index]: size.source.least(keys[index], graph.need_bytes(arcs, index)) for index in indices}
        recompute: Floats = arcs.recompute_ms.copy()
        for index, key in enumerate(keys):
            if key in wanted:
                recompute[index] = wanted[key]
        return arcs.with_recompute(recompute)

    def _real(self, size: _Size, graph: StageGraph, arcs: Arcs, indices: Sequence[int]) -> Floats:
        """Return, for the arcs at `indices`, the extra time of a stage that really fits; infinite: none was found."""
        keys = graph.keys(arcs)
        return np.array([size.source.real(keys[index], graph.need_bytes(arcs, index))[0] for index in indices])

    def _offer(
        self, size: _Size, graph: StageGraph, arcs: Arcs, path: list[int], source: str = "heuristic:stage-graph"
    ) -> bool:
        """Offer the pipeline of a path; its stages have their least recomputation."""
        keys = graph.keys(arcs)
        stages = []
        for index in path:
            stage = size.source.real(keys[index], graph.need_bytes(arcs, index))[1]
            if stage is None:
                return False
            stages.append(replace(stage, devices_behind=int(arcs.devices_behind[index]) * graph.unit))
        found = [stages, size.source.tuned(stages)]
        return any([self.incumbent.offer(draft_plan(self.problem, size.batch.size, one), source) for one in found])

    # -- nothing found ------------------------------------------------------------------------------------------

    def _has_plan(self, problem: ParallelismProblem) -> bool:
        """Return whether any plan of another problem is found within what is left of the limit."""
        other = Planner(problem, self.clock.budget, clock=self.clock)
        try:
            other._grid()
            sizes = other._sizes(other._batches)
            for look in (other._coarse, other._fine):
                if other.incumbent.objective is None:
                    look(sizes)
        except OutOfTimeError:
            pass
        return other.incumbent.objective is not None

    def _not_searched(self, sizes: list[_Size]) -> list[str]:
        """Return which plans were not looked at, as words."""
        found = []
        if not self.problem.in_rank_order:
            found.append("plans with devices out of rank order were not looked at")
        if not all(size.source.finds_all for size in sizes):
            found.append("not all layouts of the operators within a stage were looked at")
        too_large = [size.batch.size for size in sizes if size.graph is None and np.isfinite(size.bound_ms)]
        if too_large:
            found.append(f"micro-batches of {', '.join(map(str, too_large))} have too many pipelines to look at")
        return found

    # -- constraint program -------------------------------------------------------------------------------------

    def _program(self, sizes: list[_Size]) -> None:
        """Prove the optimum over all stages that are left."""
        objective = self.incumbent.objective
        if objective is None:
            return
        left = []
        for size in sizes:
            if size.graph is not None and size.arcs is not None:
                size.arcs = size.graph.prune(size.arcs, objective * (1 + AGREEMENT))
                if len(size.arcs):
                    left.append(size)
        if not left or self.clock.expired or self.incumbent.closed:
            return
        others = min((size.bound_ms for size in sizes if size not in left), default=np.inf)
        others = min(others, self._interleaved_bound_ms)
        relaxed = [
            SizedArcs(size.graph, self._proven(size, size.graph, size.arcs))
            for size in left
            if size.graph is not None and size.arcs is not None
        ]
        self._solve(left, relaxed, min(objective, others))
        self._solve_real(left, relaxed)

    def _proven(self, size: _Size, graph: StageGraph, arcs: Arcs) -> Arcs:
        """Return the arcs with the best bounds that are known."""
        return arcs.with_recompute(np.maximum(arcs.recompute_ms, [size.source.proven(key) for key in graph.keys(arcs)]))

    def _solve_real(self, left: list[_Size], relaxed: list[SizedArcs]) -> None:
        """Solve the program over stages that really fit, where their times are not those of the relaxation."""
        if not all(size.source.finds_all for size in left) or self.incumbent.closed:
            return
        real = [
            SizedArcs(one.graph, one.arcs.with_recompute(self._real(size, one.graph, one.arcs, range(len(one.arcs)))))
            for size, one in zip(left, relaxed, strict=True)
        ]
        if any(
            not np.array_equal(a.arcs.recompute_ms, b.arcs.recompute_ms) for a, b in zip(relaxed, real, strict=True)
        ):
            fitting = [one.fitting() for one in real]
            kept = [(size, one) for size, one in zip(left, fitting, strict=True) if len(one.arcs)]
            if kept and not self.clock.expired and not self.incumbent.closed:
                self._solve([size for size, _ in kept], [one for _, one in kept], None)

    def _solve(self, sizes: list[_Size], arcs: list[SizedArcs], cap_ms: float | None) -> None:
        """Solve the program over some arcs; up to `cap_ms` its bound holds for the whole space (None: not at all).

        Under `full` the program bounds what a pipeline takes, and playing it tells: each pipeline that was played is
        excluded, and the program solved again, until what is left cannot be better than the best.
        """
        assert self.incumbent.objective is not None
        full = self.problem.cost_model == "full"
        program = (build_schedule_model if full else build)(arcs, self.incumbent.objective)

        def take_bound(bound_ms: float) -> None:
            assert self.incumbent.objective is not None
            if cap_ms is not None and self.problem.in_rank_order:
                limit = min(cap_ms, self.incumbent.objective) if full else cap_ms
                self.incumbent.raise_bound(min(bound_ms, limit), "cp-sat")

        for _ in range(MOST_PLAYED if full else 1):
            outcome = solve_cp_sat(
                program.model,
                self.clock,
                hint=None if full else self._hint(program, arcs),
                on_bound=lambda ticks: take_bound(ticks * program.tick_ms),
            )
            log.info("CP-SAT: %s, %d stages", outcome.status, sum(len(one.arcs) for one in arcs))
            if outcome.bound is not None:
                take_bound(outcome.bound * program.tick_ms)
            if outcome.status == "infeasible":
                take_bound(np.inf)  # every pipeline was played
            if outcome.values is None:
                return
            exact = True
            for number, (size, one) in enumerate(zip(sizes, arcs, strict=True)):
                path = [i for i, variable in enumerate(program.chosen[number]) if outcome.values(variable)]
                if path:
                    path = [path[at] for at in np.argsort(-one.arcs.behind[path], kind="stable")]
                    self._offer(size, one.graph, one.arcs, path, "cp-sat")
                    exact &= np.array_equal(self._real(size, one.graph, one.arcs, path), one.arcs.recompute_ms[path])
                    program.model.add(sum(program.chosen[number][index] for index in path) < len(path))
            if not exact or self.clock.expired or self.incumbent.closed:
                return

    def _hint(self, program: PipelineModel, arcs: list[SizedArcs]) -> dict[cp_model.IntVar, int] | None:
        """Return the best path found as a complete hint."""
        best: tuple[float, int, list[int]] | None = None
        for number, one in enumerate(arcs):
            path = best_path(one.graph, one.arcs)
            if path:
                value = one.graph.objective(one.arcs, path)
                if best is None or value < best[0]:
                    best = (value, number, path)
        return None if best is None else hint_of(program, best[1], best[2])


def _require_planned_space(problem: ParallelismProblem) -> None:
    """Refuse what this planner does not search: its bound would not hold there. Raises `InputError`."""
    space = problem.space
    if problem.cost_model == "full":
        if 1 not in space.virtual_stages:
            raise InputError(
                f"space.virtual_stages: found {list(space.virtual_stages)}; plans without interleaving are always "
                "looked at: add 1"
            )
        return
    if space.virtual_stages != (1,):
        raise InputError(
            f"space.virtual_stages: found {list(space.virtual_stages)}; the aceso cost model knows one stage on each "
            "group of devices: give [1], or take the full cost model"
        )
    if problem.sequence_parallel:
        raise InputError(
            "sequence_parallel: found true; the aceso cost model knows no sequence parallelism: give false, or take "
            "the full cost model"
        )
    hidden = [name for name in ("tensor_parallel", "transfers") if getattr(problem.overlap, name)]
    if hidden:
        raise InputError(
            f"overlap.{hidden[0]}: found true; the aceso cost model hides nothing: give false, or take the full cost "
            "model"
        )
    if 0 not in space.sharding:
        raise InputError(
            f"space.sharding: found {list(space.sharding)}; the aceso cost model shards nothing: add 0, or take the "
            "full cost model"
        )
