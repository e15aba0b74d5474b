"""Where the cuts of a pipeline below a cutoff can lie: a relaxed stage graph that only knows in which block a cut is.

Node      (s, k, u): a cut somewhere in block k (before any of its operators), s stages and u devices behind it
Arc       a stage from a cut in block k to a cut in block m holds at least the blocks between them whole, so it takes at
          least as long as those, without transfers

Blocks in which no pipeline below the cutoff can be cut need not be looked at operator by operator: with a thousand
layers, nearly all.
"""

from dataclasses import replace

import numpy as np

from solver_plan.parallelism.choices import Bools, ChoiceCosts, Floats
from solver_plan.parallelism.stage_graph import Arcs, ChoiceTable, Integers, StageGraph
from solver_plan.parallelism.stage_table import Spans


class WindowGraph(StageGraph):
    """The relaxed stage graph over blocks."""

    def cuts(self, arcs: Arcs) -> Bools:
        """Return where a cut of a pipeline over the arcs may be, shape (operators + 1,)."""
        allowed = np.zeros(len(self._shape.classes) + 1, dtype=np.bool_)
        blocks = self._shape.blocks
        for block in np.unique(np.concatenate([arcs.first, arcs.end])):
            if block < len(blocks):
                allowed[blocks[block][0] : blocks[block][1]] = True
        allowed[[0, -1]] = True
        return allowed

    @property
    def positions(self) -> int:
        """Number of blocks."""
        return len(self._shape.blocks)

    @property
    def _widened(self) -> bool:
        return True

    @property
    def _cut_at_0(self) -> bool:
        return True  # position 0 is a cut anywhere in the first block

    def _table(self, number: int, costs: ChoiceCosts, longest: float, cuts: Bools) -> ChoiceTable:
        inner = self._spans(costs, longest, cuts)
        blocks = len(self._shape.blocks)
        last = len(self._shape.classes)
        block_of = np.append(self._shape.block_of, blocks)
        # whole blocks a..m-1 lie between a cut in block a - 1 and one in block m; the first cut is exactly at 0
        front = np.maximum(block_of[inner.first] - 1, 0)
        starts_at_0 = inner.first == 0
        behind = block_of[inner.end]
        # a stage between cuts in the same or in neighbouring blocks may hold no whole block
        near = np.arange(blocks)
        one_on = np.arange(blocks)
        first = np.concatenate([front[~starts_at_0], front[starts_at_0], near, one_on])
        end = np.concatenate([behind[~starts_at_0], behind[starts_at_0], near, one_on + 1])
        order = np.concatenate([np.flatnonzero(~starts_at_0), np.flatnonzero(starts_at_0)])
        none = np.zeros(2 * blocks, dtype=np.int64)
        empty = none.astype(np.float64)
        held = Spans(
            np.concatenate([inner.first[order], none]),
            np.concatenate([inner.end[order], none + last]),
            *(
                np.concatenate([values[order], empty])
                for values in (
                    inner.busy_ms,
                    inner.input_and_held_bytes,
                    inner.fixed_bytes,
                    inner.forward_ms,
                    inner.once_ms,
                )
            ),
        )
        by_end = np.lexsort((first, end))
        true = held.select(by_end)
        nodes = replace(true, first=first[by_end], end=end[by_end])
        offset = np.searchsorted(nodes.end, np.arange(blocks + 2))
        return ChoiceTable(costs, nodes, self._bound(number, true), offset)

    def _work_bounds(self) -> tuple[Floats, Floats]:
        device_ms, total_ms = super()._work_bounds()
        starts = [*(first for first, _ in self._shape.blocks), len(self._shape.classes)]
        return device_ms[starts], total_ms[starts]

    def _transfers(
        self, costs: ChoiceCosts, s: int, u: int, devices: int, first: Integers, end: Integers
    ) -> tuple[Floats, Floats]:
        return np.zeros(len(first)), np.zeros(len(first))
