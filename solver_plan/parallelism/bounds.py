"""Lower bounds in closed form, and their confirmation by whoever reads a certificate.

Work bound     N micro-batches at one size, D devices, operators j, choices c on g_c devices, busy = forward + backward:
                   (N - 1) * (sum_j min_c g_c busy_cj) / D + sum_j min_c busy_cj                 → work_bound_ms
               The slowest stage takes at least the device time per device; the sum of the stages at least all work.
               Under `full` the larger of N times the former and the latter, for every order of forwards and backwards.
Stage graph    No pipeline takes less than L: every stage, with its least recomputation, lies only on paths whose
               (N - 1) * max + sum exceeds L (`stage_graph`).                                     → no_pipeline_below
"""

import numpy as np

from solver_plan.parallelism.blocks import block_ranges
from solver_plan.parallelism.choices import MicroBatch, micro_batches
from solver_plan.parallelism.heuristics.interleaved import interleavings, least_ms
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.parallelism.recomputation.shape import chain_shape
from solver_plan.parallelism.sources import StageKey, StageSource, stage_source
from solver_plan.parallelism.stage_graph import StageGraph
from solver_plan.parallelism.windows import WindowGraph

MARGIN = 1e-9
"""Relative: floating-point error of a bound that is computed again, in another order."""
STAGES_AT_ONCE = 256
"""Stages whose recomputation is found between two rounds of pruning."""


def work_bound_ms(problem: ParallelismProblem) -> float | None:
    """Return the least work bound of all micro-batch sizes; None if no size has a layout for every operator."""
    bounds = [batch_work_bound_ms(problem, batch) for batch in micro_batches(problem)]
    return min((bound for bound in bounds if np.isfinite(bound)), default=None)


def batch_work_bound_ms(problem: ParallelismProblem, batch: MicroBatch) -> float:
    """Return the work bound of one micro-batch size; infinite if an operator has no layout."""
    busy = np.stack([costs.forward_ms + costs.backward_ms for costs in batch.choices])
    total = float(busy.min(axis=0).sum())
    if not np.isfinite(total):
        return np.inf
    counts = np.array([costs.choice.devices for costs in batch.choices])
    if problem.cost_model == "full" and problem.space.same_layout and problem.space.use_all_devices:
        return _equal_stages_ms(batch.count, problem.cluster.devices // int(counts[0]), total)
    per_device = float((busy * counts[:, None]).min(axis=0).sum()) / problem.cluster.devices
    if problem.cost_model == "full":
        return max(batch.count * per_device, total)
    return (batch.count - 1) * per_device + total


def _equal_stages_ms(micro_batches: int, stages: int, total_ms: float) -> float:
    """Return a bound on 1F1B where stages have equally many devices: the least over all times M of the slowest.

    For the slowest stage i, with k < N - 1 behind it, `pipeline_value` gives N M + before_i + 2 S_i - k M, and what the
    others fall short of M together is at most p M - total: T >= (N - 1 - p) M + 2 total. And T >= N M, T >= total.
    With k >= N - 1 it gives N M + before_i + S_i - (N - 1) M / 2.
    """
    count, slowest_ms = micro_batches, total_ms / stages
    if count > stages:
        return (count - 1) * slowest_ms + total_ms
    few_behind = max(total_ms, 2 * count * total_ms / (stages + 1))
    return min(few_behind, total_ms + (count - 1) * slowest_ms / 2)


def _unpaid(deterministic_seconds: float) -> None:
    """Confirming a bound has no limit."""


def no_pipeline_below(problem: ParallelismProblem, bound_ms: float) -> bool:
    """Return whether the stage graphs confirm that every pipeline takes at least so long, but for `MARGIN`."""
    shape = chain_shape(problem, block_ranges(problem))
    everywhere = np.ones(len(problem.operators) + 1, dtype=np.bool_)
    cutoff = bound_ms * (1 - MARGIN)
    batches = micro_batches(problem)
    if max(problem.space.virtual_stages) > 1:
        for one in interleavings(problem, batches, shape):
            if one.work_ms < cutoff and least_ms(problem, shape, one, _unpaid, cutoff) < cutoff:
                return False
    for batch in batches:
        if batch_work_bound_ms(problem, batch) >= cutoff:
            continue
        source = stage_source(problem, shape, batch, _unpaid)
        cuts = everywhere
        if source.has_windows and problem.in_rank_order:
            windows = WindowGraph(problem, shape, source.batch, source.bound, cutoff, shape.block_cuts)
            arcs = windows.arcs()
            if not len(arcs):
                continue
            cuts = windows.cuts(arcs)
        graph = StageGraph(
            problem, shape, source.batch, source.bound, cutoff, cuts, any_order=not problem.in_rank_order
        )
        if not _empties(graph, source, cutoff):
            return False
    return True


def _empties(graph: StageGraph, source: StageSource, cutoff_ms: float) -> bool:
    """Return whether no pipeline below the cutoff is left once the stages have their least recomputation."""
    arcs = graph.arcs()
    known: dict[StageKey, float] = {}
    while len(arcs):
        keys = graph.keys(arcs)
        order = np.argsort(graph.through(arcs), kind="stable")
        pending = {keys[index]: int(index) for index in order if keys[index] not in known}
        for key in list(pending)[:STAGES_AT_ONCE]:
            known[key] = source.least(key, graph.need_bytes(arcs, pending[key]))
        recompute = np.array(
            [known.get(key, bound) for key, bound in zip(keys, arcs.recompute_ms.tolist(), strict=True)]
        )
        left = graph.prune(arcs.with_recompute(recompute), cutoff_ms)
        if not pending and len(left) == len(arcs):
            return False
        arcs = left
    return True
