"""What a model file tells the planner of a model of several tasks: the operators of all of them, as one graph."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import networkx as nx

    from solver_plan.wavefront.contraction import OperatorNode


@dataclass(frozen=True, kw_only=True)
class MultitaskDescription:
    """A model of several tasks to train."""

    name: str
    operators: "nx.DiGraph[OperatorNode]"
    """What planning needs; `problem_from_operators` makes a problem of it."""
    modules: Callable[[], object] | None = None
    """Imports torch and returns the `solver_plan.execution.waves.model.MultitaskModel` that trains it; None: planned,
    but not run."""
