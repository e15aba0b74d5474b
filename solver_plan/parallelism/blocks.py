"""Blocks of the chain: a block runs from a block start to the next one; what comes before the first is one too."""

from solver_plan.parallelism.problem import ParallelismProblem


def block_ranges(problem: ParallelismProblem) -> list[tuple[int, int]]:
    """Return the operator range [first, end) of each block, in order."""
    count = len(problem.operators)
    starts = [0, *(index for index in range(1, count) if problem.operators[index].block_start)]
    return [(first, end) for first, end in zip(starts, [*starts[1:], count], strict=True)]
