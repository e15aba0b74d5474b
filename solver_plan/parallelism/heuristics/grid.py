"""The uniform grid of Megatron-LM: every stage has the same layout and as equal a number of blocks as possible.

Exhaustive over the number of stages p, tensor parallel degree t, data parallel degree d, micro-batch size, and
recomputation of nothing or of every block. What comes before the first block start is part of the first stage, what
follows the last block of the last.
"""

import itertools
from collections.abc import Iterator

from solver_plan.parallelism.blocks import block_ranges
from solver_plan.parallelism.choices import Choice, MicroBatch
from solver_plan.parallelism.drafts import DraftStage, draft_plan
from solver_plan.parallelism.plan import ParallelismPlan
from solver_plan.parallelism.problem import ParallelismProblem


def grid_plans(problem: ParallelismProblem, batch: MicroBatch) -> Iterator[ParallelismPlan]:
    """Yield every plan of the grid at one micro-batch size; they may not fit the memory."""
    devices = problem.cluster.devices
    blocks = repeated_blocks(problem)
    for costs in batch.choices:
        stages, rest = divmod(devices, costs.choice.devices)
        if rest and problem.space.use_all_devices:
            continue
        most = min(stages, len(blocks), problem.space.max_stages or stages)
        for count in range(1, most + 1) if not problem.space.use_all_devices else (stages,):
            if count > most:
                continue
            for recompute in (False, True) if problem.space.recompute != "none" else (False,):
                yield draft_plan(problem, batch.size, _uniform(problem, blocks, count, costs.choice, recompute))


def repeated_blocks(problem: ParallelismProblem) -> list[tuple[int, int]]:
    """Return the blocks that begin with a block start; the whole chain if there is none."""
    blocks = [block for block in block_ranges(problem) if problem.operators[block[0]].block_start]
    return blocks or [(0, len(problem.operators))]


def _uniform(
    problem: ParallelismProblem, blocks: list[tuple[int, int]], count: int, choice: Choice, recompute: bool
) -> list[DraftStage]:
    cuts = [0] + [blocks[len(blocks) * number // count][0] for number in range(1, count)] + [len(problem.operators)]
    lengths = {end - first for first, end in blocks[:-1]}
    usual = max(lengths, default=blocks[0][1] - blocks[0][0])
    in_block = [False] * len(problem.operators)
    for first, end in blocks:
        # what follows the last block (final normalisation, head) is not recomputed, as in Megatron-LM
        last = min(end, first + usual) if problem.space.recompute == "operator" else end
        in_block[first:last] = [recompute] * (last - first)
    return [
        DraftStage(first, end, (choice,) * (end - first), tuple(in_block[first:end]))
        for first, end in itertools.pairwise(cuts)
    ]
