"""The chain of operators as other systems see it: what stands before the layers, the layers, what stands behind.

Other systems cut a model between transformer layers only, and recompute whole layers. A layer is a block of the chain:
from one `block_start` to the next; behind the last one follows what is in no layer (last normalisation, head).
"""

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from solver_plan.errors import NotExportableError
from solver_plan.parallelism.blocks import block_ranges
from solver_plan.parallelism.problem import ParallelismProblem

_CORE_ATTENTION = re.compile(r"(.*[.])?(enc-)?attention[-_](scores?|softmax|dropout|context|core)([.]\d+)?")
"""Names of the operators between the product that makes queries, keys and values and the one behind them: those of
`models/transformer.py` (``layer3.attention_softmax``) and of Aceso's database (``enc-attention-softmax.3``)."""


@dataclass(frozen=True)
class LayerChain:
    """Operator ranges [first, end) of the layers."""

    operators: int
    """Of the whole chain."""
    layers: tuple[tuple[int, int], ...]
    equal: bool
    """All layers consist of the same operators."""
    core_attention: frozenset[int]
    """Operators of the attention between its products with weights; empty if their names do not tell."""

    @property
    def front(self) -> int:
        """Number of operators before the first layer."""
        return self.layers[0][0]

    @property
    def tail(self) -> int:
        """First operator behind the last layer; the number of operators if there is none."""
        return self.layers[-1][1]

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """Where a stage may end: operators before which a layer, or what follows the last layer, begins."""
        starts = {first for first, _ in self.layers} | {self.tail}
        return tuple(sorted(starts - {0, self.operators}))

    def within(self, first: int, end: int) -> tuple[tuple[int, int], ...]:
        """Return the layers of a stage whose ends are cuts."""
        return tuple(layer for layer in self.layers if first <= layer[0] and layer[1] <= end)


def layer_chain(problem: ParallelismProblem) -> LayerChain:
    """Return the layers of a problem's chain.

    Raises
    ------
    NotExportableError
        If no operator starts a block.
    """
    if not any(operator.block_start for operator in problem.operators):
        raise NotExportableError(
            "operators: found no block_start; other systems cut between layers, mark the first operator of each"
        )
    ranges = [(first, end) for first, end in block_ranges(problem) if problem.operators[first].block_start]
    profiles = [operator.profile for operator in problem.operators]
    # the last block has what follows the layers: as long as other blocks that begin alike it is a layer
    first, end = ranges[-1]
    alike = Counter(stop - start for start, stop in ranges[:-1] if profiles[start] == profiles[first])
    if alike:
        length = alike.most_common(1)[0][0]
        ranges[-1] = (first, min(end, first + length))
    contents = {tuple(profiles[first:end]) for first, end in ranges}
    return LayerChain(
        operators=len(profiles),
        layers=tuple(ranges),
        equal=len(contents) == 1,
        core_attention=frozenset(
            index
            for first, end in ranges
            for index in range(first, end)
            if _CORE_ATTENTION.fullmatch(problem.operators[index].name)
        ),
    )
