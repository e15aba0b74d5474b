"""The uniform grid of Megatron-LM: every stage has the same layout and as equal a number of blocks as possible.

Exhaustive over the number of stages p, tensor parallel degree t, data parallel degree d, micro-batch size, and
recomputation of nothing or of every block. What comes before the first block start is part of the first stage, what
follows the last block of the last.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from solver_plan.parallelism.blocks import block_ranges
from solver_plan.parallelism.choices import Bools, ChoiceCosts, MicroBatch
from solver_plan.parallelism.drafts import DraftStage, draft_plan
from solver_plan.parallelism.plan import ParallelismPlan
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.parallelism.recomputation.shape import ChainShape, chain_shape


@dataclass(frozen=True, slots=True, eq=False)
class GridPoint:
    """A plan of the grid, not yet written down; it may not fit the memory."""

    least_ms: float
    """Its iteration takes at least so long: the operators' time, without communication."""
    micro_batch_size: int
    stages: tuple[DraftStage, ...]

    def plan(self, problem: ParallelismProblem) -> ParallelismPlan:
        """Return the plan."""
        return draft_plan(problem, self.micro_batch_size, self.stages)


def grid_points(problem: ParallelismProblem, batch: MicroBatch) -> Iterator[GridPoint]:
    """Yield every plan of the grid at one micro-batch size."""
    devices = problem.cluster.devices
    shape = chain_shape(problem, block_ranges(problem))
    blocks = repeated_blocks(shape)
    recomputed = _recomputed(shape, blocks, whole=problem.space.recompute == "block")
    for costs in batch.choices:
        stages, rest = divmod(devices, costs.choice.devices)
        if rest and problem.space.use_all_devices:
            continue
        most = min(stages, len(blocks), problem.space.max_stages or stages)
        for count in range(1, most + 1) if not problem.space.use_all_devices else (stages,):
            if count > most:
                continue
            cuts = [0, *(blocks[len(blocks) * number // count][0] for number in range(1, count)), len(shape.classes)]
            for marks in (np.zeros_like(recomputed), recomputed) if problem.space.recompute != "none" else (None,):
                yield _point(batch, costs, cuts, np.zeros_like(recomputed) if marks is None else marks)


def repeated_blocks(shape: ChainShape) -> list[tuple[int, int]]:
    """Return the blocks that begin with a block start, or repeat; the whole chain if there is none."""
    blocks = [block for block in shape.blocks if shape.block_start[block[0]] or shape.virtual[block[0]]]
    return blocks or [(0, len(shape.classes))]


def _recomputed(shape: ChainShape, blocks: list[tuple[int, int]], *, whole: bool) -> Bools:
    """Return, shape (operators,), what is recomputed in full recomputation.

    What follows the last block of its kind (final normalisation, head) is not, as in Megatron-LM.
    """
    leaders = [int(shape.classes[first]) for first, _ in blocks]
    usual = {
        leader: Counter(end - first for (first, end), one in zip(blocks, leaders, strict=True) if one == leader)
        for leader in set(leaders)
    }
    marks = np.zeros(len(shape.classes), dtype=np.bool_)
    for (first, end), leader in zip(blocks, leaders, strict=True):
        length = usual[leader].most_common(1)[0][0]
        marks[first : end if whole else min(end, first + length)] = True
    return marks


def _point(batch: MicroBatch, costs: ChoiceCosts, cuts: list[int], marks: Bools) -> GridPoint:
    time = costs.forward_ms + costs.backward_ms + np.where(marks, costs.forward_ms, 0.0)
    stage_ms = np.add.reduceat(time, cuts[:-1])
    stages = tuple(
        DraftStage(first, end, (costs.choice,) * (end - first), tuple(marks[first:end].tolist()))
        for first, end in itertools.pairwise(cuts)
    )
    total_ms = float(stage_ms.sum())
    # infinite where an operator was not profiled
    least_ms = (batch.count - 1) * float(stage_ms.max()) + total_ms if np.isfinite(total_ms) else np.inf
    return GridPoint(least_ms, batch.size, stages)
