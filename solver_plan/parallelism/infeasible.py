"""Why no plan exists, and the smallest change that makes one: least memory over all pipelines, found by solving.

The least memory of a stage is a lower bound that recomputation attains but for rounding: fixed + (b + 1) * held - most
saved. The pipeline that minimises the largest of them, over all cuts, choices and micro-batch sizes, is a bottleneck
path through the same stage graph as for time (`MemoryGraph`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from solver_plan.parallelism.choices import Bools, ChoiceCosts, Floats, MicroBatch
from solver_plan.parallelism.paths import best_path
from solver_plan.parallelism.pipeline_value import SlowestAndSum
from solver_plan.parallelism.problem import Cluster, ParallelismProblem
from solver_plan.parallelism.recomputation.shape import ChainShape
from solver_plan.parallelism.sources import StageSource, stage_source
from solver_plan.parallelism.stage_graph import Arcs, ChoiceTable, Integers, StageGraph
from solver_plan.parallelism.stage_table import SpanBound, Spans

MEGABYTE = 2**20
MOST_REFUTATIONS = 300
"""Pipelines whose stages turn out to need more than their lower bound before a micro-batch size is given up."""
MOST_NODES = 8
"""More nodes tried, as multiples, when looking for a cluster that is large enough."""


class MemoryGraph(StageGraph):
    """The stage graph with the memory of a stage in place of its time, and the largest one as objective."""

    def __init__(
        self,
        problem: ParallelismProblem,
        shape: ChainShape,
        batch: MicroBatch,
        bound: Callable[[int, Spans], SpanBound],
        cutoff_bytes: float,
        cuts: Bools,
        work: Callable[[float], None],
    ) -> None:
        super().__init__(problem, shape, batch, bound, np.inf, cuts, work, any_order=not problem.in_rank_order)
        self._cutoff = cutoff_bytes
        self._pipeline = SlowestAndSum(1.0, 0.0)

    def _work_bounds(self) -> tuple[Floats, Floats]:
        """Return the least bytes of state of the operators in front of each cut, summed over devices."""
        if self._full:  # weights may be shared, and their state sharded
            return np.zeros(self.positions + 1), np.zeros(self.positions + 1)
        weights = np.stack([np.where(np.isfinite(c.forward_ms), c.weight_bytes, np.inf) for c in self.batch.choices])
        state = (weights * self.device_counts[:, None]).min(axis=0) * self.problem.state_bytes_per_weight_byte
        total = np.concatenate([np.zeros(1), np.cumsum(state)])
        return total, np.zeros(len(total))

    def _constant_part(self, table: ChoiceTable) -> Floats:
        return table.spans.fixed_bytes

    def _variable_part(self, table: ChoiceTable, behind: int, candidates: Integers) -> Floats:
        behind = self.held_behind(behind)
        held = (behind + 1) * table.spans.input_and_held_bytes[candidates]
        return held - table.bound.most_saved_bytes(behind, candidates)

    def _transfers(
        self, costs: ChoiceCosts, s: int, u: int, devices: int, first: Integers, end: Integers
    ) -> tuple[Floats, Floats]:
        return np.zeros(len(first)), np.zeros(len(first))


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The pipeline that needs the least memory."""

    batch: MicroBatch
    memory_bytes: float
    """A plan fits into so much, and none into a MB less; or a lower bound on what any plan needs."""
    stage: int
    stages: int
    arcs: Arcs
    worst: int
    """Index of the arc that needs most."""


def explain(
    problem: ParallelismProblem,
    batches: Sequence[MicroBatch],
    shape: ChainShape,
    work: Callable[[float], None] = lambda deterministic_seconds: None,
) -> str | None:
    """Return one line that says why no plan exists, or None if memory forbids none.

    The line names the stage of the best attempt, how many bytes it is short, the smallest memory (to 1 MB) at which a
    plan exists, and a number of nodes at which one does. `work` is told the deterministic seconds that were spent, and
    may raise to end a long computation.
    """
    limit = problem.cluster.usable_bytes_per_device
    best = _least_memory(problem, batches, shape, work, fine=True)
    if best is None:
        return (
            f"no pipeline of whole stages covers {len(problem.operators)} operators on {problem.cluster.devices} "
            "devices with the device counts, stages and profiled layouts that the space allows; allow other "
            "device_counts, cross_node_stages or idle devices, or profile more layouts"
        )
    if best.memory_bytes <= limit:
        return None
    first, end = int(best.arcs.first[best.worst]), int(best.arcs.end[best.worst])
    choice = best.batch.choices[int(best.arcs.choice[best.worst])].choice
    return (
        f"no plan fits the memory: even the attempt that needs least (micro-batch {best.batch.size}, {best.stages} "
        f"stages) is {math.ceil(best.memory_bytes - limit)} bytes short on stage {best.stage} "
        f"(operators {first} to {end - 1}, tensor parallel {choice.tensor_parallel}, data parallel "
        f"{choice.data_parallel}); a plan exists from {_whole_mb(problem.cluster, best.memory_bytes)} MB per device"
        f"{_nodes_that_suffice(problem, batches, shape, work)}"
    )


def _whole_mb(cluster: Cluster, usable_bytes: float) -> int:
    """Return the least memory of a device, in MB, of which so many bytes are usable."""
    usable = 1 - cluster.memory_margin
    megabytes = math.ceil(usable_bytes / usable / MEGABYTE) - 1
    while int(megabytes * MEGABYTE * usable) < usable_bytes:  # as `Cluster.usable_bytes_per_device` rounds
        megabytes += 1
    return megabytes


def _nodes_that_suffice(
    problem: ParallelismProblem, batches: Sequence[MicroBatch], shape: ChainShape, work: Callable[[float], None]
) -> str:
    factor = 2
    while factor <= MOST_NODES:
        larger = replace(problem, cluster=replace(problem.cluster, nodes=problem.cluster.nodes * factor))
        attempt = _least_memory(larger, batches, shape, work, fine=False)
        if attempt is not None and attempt.memory_bytes <= problem.cluster.usable_bytes_per_device:
            return f", or on {larger.cluster.devices} devices ({larger.cluster.nodes} nodes)"
        factor *= 2
    return ""


def _least_memory(
    problem: ParallelismProblem,
    batches: Sequence[MicroBatch],
    shape: ChainShape,
    work: Callable[[float], None],
    *,
    fine: bool,
) -> _Attempt | None:
    everywhere = np.ones(len(problem.operators) + 1, dtype=np.bool_)
    best: _Attempt | None = None
    for cuts in (shape.block_cuts, everywhere) if fine else (shape.block_cuts,):
        if best is not None and best.memory_bytes <= problem.cluster.usable_bytes_per_device:
            return best
        for batch in batches:
            source = stage_source(problem, shape, batch, work)
            cutoff = np.inf if best is None else best.memory_bytes
            graph = MemoryGraph(problem, shape, source.batch, source.bound, cutoff, cuts, work)
            arcs = graph.arcs()
            for _ in range(MOST_REFUTATIONS if source.finds_all else 1):
                # of the many ways to use little memory, keep those that use the least
                through = graph.through(arcs)
                least = arcs.select(np.flatnonzero(through <= through.min(initial=np.inf) * (1 + 1e-12)))
                path = best_path(graph, least)
                if not path:
                    break
                memory = least.time_ms[path]
                if best is not None and memory.max() >= best.memory_bytes:
                    break
                raised = _attained(problem, graph, source, least, path)
                if np.array_equal(raised, memory):
                    worst = int(np.argmax(memory))
                    best = _Attempt(source.batch, float(memory[worst]), worst, len(path), least, path[worst])
                    break
                arcs = _with_memory(arcs, least, path, raised)
    return best


def _attained(
    problem: ParallelismProblem,
    graph: MemoryGraph,
    source: StageSource,
    arcs: Arcs,
    path: Sequence[int],
) -> Floats:
    """Return the memory into which the stages of a path really fit, to a byte, shape (stages,).

    The lower bounds themselves where they are attained, or lie below the largest that is: almost always.
    """
    raised = arcs.time_ms[list(path)].copy()
    top = raised.max()
    for number, index in enumerate(path):
        key = (int(arcs.choice[index]), int(arcs.first[index]), int(arcs.end[index]), int(arcs.behind[index]))
        without = graph.need_bytes(arcs, index) + problem.cluster.usable_bytes_per_device
        if source.fits(key, without - top):
            continue  # that it fits into less does not matter
        short, enough = math.floor(top), math.ceil(without)
        while enough - short > 1:
            middle = (short + enough) // 2
            if source.fits(key, without - middle):
                enough = middle
            else:
                short = middle
        raised[number] = enough
    return raised


def _with_memory(arcs: Arcs, least: Arcs, path: Sequence[int], raised: Floats) -> Arcs:
    """Return the arcs with the raised memory of the stages on a path, wherever their devices lie."""
    memory = arcs.recompute_ms.copy()
    for number, index in enumerate(path):
        same = (
            (arcs.choice == least.choice[index])
            & (arcs.first == least.first[index])
            & (arcs.end == least.end[index])
            & (arcs.behind == least.behind[index])
        )
        memory[same] += raised[number] - least.time_ms[index]
    return arcs.with_recompute(memory)
