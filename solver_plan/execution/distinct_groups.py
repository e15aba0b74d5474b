"""Sets of ranks that communicate, each once. No torch."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from solver_plan.execution.program import Group


@dataclass
class DistinctGroups:
    """The distinct sets of ranks met so far, in the order in which all ranks will create them."""

    index_of: dict[tuple[int, ...], int] = field(default_factory=dict)
    serves: list[list[str]] = field(default_factory=list)

    def index(self, ranks: Iterable[int], serves: str) -> int | None:
        """Return the index of a group, new or known; None for a single rank."""
        members = tuple(ranks)
        if len(members) == 1:
            return None
        if members not in self.index_of:
            self.index_of[members] = len(self.serves)
            self.serves.append([])
        self.serves[self.index_of[members]].append(serves)
        return self.index_of[members]

    def documents(self) -> tuple[Group, ...]:
        """Return the groups in the order in which they are created."""
        return tuple(
            Group(ranks=ranks, serves=tuple(dict.fromkeys(self.serves[index])))
            for ranks, index in self.index_of.items()
        )
