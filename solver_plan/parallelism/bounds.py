"""Lower bounds in closed form, and their confirmation by whoever reads a certificate.

Work bound     N micro-batches at one size, D devices, operators j, choices c on g_c devices, busy = forward + backward:
                   (N - 1) * (sum_j min_c g_c busy_cj) / D + sum_j min_c busy_cj                 → work_bound_ms
               The slowest stage takes at least the device time per device; the sum of the stages at least all work.
Stage graph    No pipeline takes less than L: every stage, with its least recomputation, lies only on paths whose
               (N - 1) * max + sum exceeds L (`stage_graph`).                                     → no_pipeline_below
"""

import numpy as np

from solver_plan.parallelism.blocks import block_ranges
from solver_plan.parallelism.choices import MicroBatch, micro_batch, micro_batch_sizes
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.parallelism.recomputation.shape import chain_shape
from solver_plan.parallelism.sources import StageKey, StageSource, stage_source
from solver_plan.parallelism.stage_graph import StageGraph

MARGIN = 1e-9
"""Relative: floating-point error of a bound that is computed again, in another order."""
STAGES_AT_ONCE = 256
"""Stages whose recomputation is found between two rounds of pruning."""


def work_bound_ms(problem: ParallelismProblem) -> float | None:
    """Return the least work bound of all micro-batch sizes; None if no size has a layout for every operator."""
    batches = [micro_batch(problem, size) for size in micro_batch_sizes(problem)]
    bounds = [batch_work_bound_ms(batch, problem.cluster.devices) for batch in batches if batch.choices]
    return min((bound for bound in bounds if np.isfinite(bound)), default=None)


def batch_work_bound_ms(batch: MicroBatch, devices: int) -> float:
    """Return the work bound of one micro-batch size; infinite if an operator has no layout."""
    busy = np.stack([costs.forward_ms + costs.backward_ms for costs in batch.choices])
    total = float(busy.min(axis=0).sum())
    if not np.isfinite(total):
        return np.inf
    counts = np.array([costs.choice.devices for costs in batch.choices])
    per_device = float((busy * counts[:, None]).min(axis=0).sum()) / devices
    return (batch.count - 1) * per_device + total


def no_pipeline_below(problem: ParallelismProblem, bound_ms: float) -> bool:
    """Return whether the stage graphs confirm that every pipeline takes at least so long, but for `MARGIN`."""
    shape = chain_shape(problem, block_ranges(problem))
    everywhere = np.ones(len(problem.operators) + 1, dtype=np.bool_)
    cutoff = bound_ms * (1 - MARGIN)
    for size in micro_batch_sizes(problem):
        batch = micro_batch(problem, size)
        if not batch.choices:
            continue
        source = stage_source(problem, shape, batch, lambda deterministic_seconds: None)
        graph = StageGraph(
            problem, shape, source.batch, source.bound, cutoff, everywhere, any_order=not problem.in_rank_order
        )
        if not _empties(graph, source, cutoff):
            return False
    return True


def _empties(graph: StageGraph, source: StageSource, cutoff_ms: float) -> bool:
    """Return whether no pipeline below the cutoff is left once the stages have their least recomputation."""
    arcs = graph.arcs()
    known: dict[StageKey, float] = {}
    while len(arcs):
        keys = list(
            zip(arcs.choice.tolist(), arcs.first.tolist(), arcs.end.tolist(), arcs.behind.tolist(), strict=True)
        )
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
