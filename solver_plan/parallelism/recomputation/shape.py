"""The chain as recomputation sees it: blocks, and pieces short enough that every pattern can be listed.

A block runs from one block start to the next. A block that itself repeats (the decoder of T5 has no block starts) is
cut where its first repeated operator stands: *virtual* cuts, across which a run of recomputation goes on. Blocks too
long to list are cut into pieces, virtually too, where little is held: what a run across a virtual cut saves is not
modelled exactly but bounded (`StageRecomputation`).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solver_plan.parallelism.problem import ParallelismProblem

Integers = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

LONGEST_PIECE = 15
"""Operators of a piece: 15 have 3329 patterns."""
SHORTEST_PIECE = 4


@dataclass(frozen=True, slots=True, eq=False)
class ChainShape:
    """What all choices share: blocks, pieces, and which operators are equal."""

    blocks: tuple[tuple[int, int], ...]
    pieces: tuple[tuple[int, int], ...]
    block_of: Integers
    """(operators,): number of the block."""
    piece_of: Integers
    """(operators,): number of the piece."""
    classes: Integers
    """(operators,): equal numbers for operators with the same profile and activation factor."""
    virtual: Bools
    """(operators,): a piece begins here that is no block start."""
    shares_buffer: Bools
    block_start: Bools
    whole_blocks: bool
    """Only whole blocks may be recomputed."""
    allowed: bool
    """Recomputation is allowed at all."""

    @property
    def block_cuts(self) -> Bools:
        """Where blocks begin or end, shape (operators + 1,)."""
        cuts = np.zeros(len(self.classes) + 1, dtype=np.bool_)
        for first, end in self.blocks:
            cuts[[first, end]] = True
        return cuts

    def key(self, first: int, end: int) -> tuple[bytes, bytes]:
        """Return what tells spans apart: the classes of the operators and where pieces begin among them."""
        return self.classes[first:end].tobytes(), self.virtual[first + 1 : end].tobytes()


def chain_shape(problem: ParallelismProblem, blocks: Sequence[tuple[int, int]]) -> ChainShape:
    """Return the shape of a problem's chain.

    Parameters
    ----------
    problem
        The problem.
    blocks
        Its blocks, from block start to block start.
    """
    numbers: dict[tuple[str, float], int] = {}
    classes = np.array(
        [
            numbers.setdefault((operator.profile, operator.activation_factor), len(numbers))
            for operator in problem.operators
        ],
        dtype=np.int64,
    )
    held = np.array([_typical_held(problem, index) for index in range(len(problem.operators))])
    whole = problem.space.recompute == "block"
    layers: list[tuple[int, int]] = []
    pieces: list[tuple[int, int]] = []
    for first, end in blocks:
        cut = [(first, end)] if whole else _repeats(classes, first, end)
        layers.extend(cut)
        for begin, stop in cut:
            pieces.extend([(begin, stop)] if whole else _short(held, begin, stop))
    starts = {first for first, _ in blocks}
    virtual = np.zeros(len(classes), dtype=np.bool_)
    virtual[[first for first, _ in pieces if first not in starts]] = True
    return ChainShape(
        blocks=tuple(layers),
        pieces=tuple(pieces),
        block_of=_number_of(layers, len(classes)),
        piece_of=_number_of(pieces, len(classes)),
        classes=classes,
        virtual=virtual,
        shares_buffer=np.array([operator.activation_factor != 1 for operator in problem.operators]),
        block_start=np.array([operator.block_start for operator in problem.operators]),
        whole_blocks=whole,
        allowed=problem.space.recompute != "none",
    )


def _typical_held(problem: ParallelismProblem, index: int) -> float:
    operator = problem.operators[index]
    return problem.profiles[operator.profile][0].activation_bytes * operator.activation_factor


def _number_of(parts: Sequence[tuple[int, int]], count: int) -> Integers:
    number = np.zeros(count, dtype=np.int64)
    for index, (first, end) in enumerate(parts):
        number[first:end] = index
    return number


def _repeats(classes: Integers, first: int, end: int) -> list[tuple[int, int]]:
    """Cut a block that is too long to list before each occurrence of its first operator that occurs again."""
    if end - first <= LONGEST_PIECE:
        return [(first, end)]
    values, counts = np.unique(classes[first:end], return_counts=True)
    repeated = set(values[counts > 1].tolist())
    leader = next((int(value) for value in classes[first:end] if int(value) in repeated), None)
    if leader is None:
        return [(first, end)]
    at = [first + int(index) for index in np.flatnonzero(classes[first:end] == leader)]
    cuts = [first, *[index for index in at if index > first], end]
    return list(itertools.pairwise(cuts))


def _short(held: Floats, first: int, end: int) -> list[tuple[int, int]]:
    """Cut a block into as few pieces as its length demands, where the operators before the cuts hold least."""
    count = -(-(end - first) // LONGEST_PIECE)
    if count <= 1:
        return [(first, end)]
    # least total held before the cuts: best[k][x] for the first x operators in k pieces
    length = end - first
    best = np.full((count + 1, length + 1), np.inf)
    choice = np.zeros((count + 1, length + 1), dtype=np.int64)
    best[0, 0] = 0.0
    shortest = min(SHORTEST_PIECE, length // count)
    for k in range(1, count + 1):
        for x in range(1, length + 1):
            for size in range(shortest, min(LONGEST_PIECE, x) + 1):
                value = best[k - 1, x - size] + (held[first + x - 1] if x < length else 0.0)
                if value < best[k, x]:
                    best[k, x], choice[k, x] = value, size
    cuts = [length]
    for k in range(count, 0, -1):
        cuts.append(cuts[-1] - int(choice[k, cuts[-1]]))
    cuts = [first + cut for cut in reversed(cuts)]
    return list(itertools.pairwise(cuts))
