"""Operator graphs of multi-task models, contracted into components (Spindle, ASPLOS 2025, section 3.1).

Operators i -> j merge where i has no other successor, j no other predecessor, and both have the same type, input size
and task. What results is a graph of chains of equal layers: the components of a wavefront problem.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import networkx as nx

from solver_plan.documents.fields import LARGEST_NUMBER
from solver_plan.documents.reading import short
from solver_plan.errors import InputError

LEAST_OF_FIELD = {
    "batch": 1,
    "sequence": 1,
    "hidden": 1,
    "parameters": 0,
    "forward_flops": 0,
    "output_bytes": 0,
    "activation_bytes": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorNode:
    """One operator, such as a transformer layer, of one task; sizes and work are of its whole batch."""

    name: str
    task: str
    kind: str
    """Type: only operators of one type merge."""
    batch: int
    sequence: int
    """Tokens of a sample."""
    hidden: int
    weights: str
    """Key of its parameters; operators with equal keys share them."""
    parameters: int
    """Number of parameters."""
    forward_flops: float
    output_bytes: int
    activation_bytes: int
    """Kept for the backward."""
    frozen: bool = False
    """Its parameters are not trained and nothing before it needs a gradient: no backward."""

    def __post_init__(self) -> None:
        for field, least in LEAST_OF_FIELD.items():
            value = getattr(self, field)
            kinds = int | float if field == "forward_flops" else int
            if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= LARGEST_NUMBER:
                raise InputError(
                    f"operator {self.name}: {field}: found {short(value)}; "
                    f"{'a number' if kinds is not int else 'a whole number'} from {least} to {LARGEST_NUMBER:g}"
                )

    @property
    def alike(self) -> tuple[object, ...]:
        """What must be equal for two operators to merge."""
        size = self.batch, self.sequence, self.hidden
        return self.task, self.kind, size, self.parameters, self.forward_flops, self.frozen


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Equal operators, one after another."""

    operators: tuple[OperatorNode, ...]

    @property
    def name(self) -> str:
        """Task and the name of the first operator up to its number."""
        return self.operators[0].name.rsplit(".", 1)[0]

    @property
    def weights(self) -> str:
        """Key that equal sequences of weights share."""
        first, last = self.operators[0].weights, self.operators[-1].weights
        return first if first == last else f"{first}..{last}"


def operator_graph(
    operators: Iterable[OperatorNode], edges: Iterable[tuple[OperatorNode, OperatorNode]]
) -> "nx.DiGraph[OperatorNode]":
    """Return the directed graph of operators. Raises `InputError` for a cycle, a name used twice, or none at all."""
    graph: nx.DiGraph[OperatorNode] = nx.DiGraph()
    listed = list(operators)
    graph.add_nodes_from(listed)
    graph.add_edges_from(edges)
    times = Counter(operator.name for operator in [*listed, *(set(graph) - set(listed))])
    if not times:
        raise InputError("the operator graph is empty: describe at least one task")
    twice = next((name for name, count in times.items() if count > 1), None)
    if twice is not None:
        raise InputError(f"operator {twice!r} is in the graph twice: names are unique")
    if not nx.is_directed_acyclic_graph(graph):
        cycle = " -> ".join(before.name for before, _ in nx.find_cycle(graph))
        raise InputError(f"the operator graph has the cycle {cycle}: remove one of its edges")
    return graph


def contract(graph: "nx.DiGraph[OperatorNode]") -> tuple[list[Chain], list[tuple[Chain, Chain]]]:
    """Return the chains of a graph in topological order, and the edges between them."""
    place = {operator: at for at, operator in enumerate(graph)}
    chain_of: dict[OperatorNode, list[OperatorNode]] = {}
    chains: list[list[OperatorNode]] = []
    for operator in nx.lexicographical_topological_sort(graph, key=lambda each: place[each]):
        before = list(graph.predecessors(operator))
        if len(before) == 1 and graph.out_degree(before[0]) == 1 and before[0].alike == operator.alike:
            chain = chain_of[before[0]]
        else:
            chain = []
            chains.append(chain)
        chain.append(operator)
        chain_of[operator] = chain
    made = {id(chain): Chain(operators=tuple(chain)) for chain in chains}
    edges = {
        (id(chain_of[before]), id(chain_of[after])): None
        for before, after in graph.edges
        if chain_of[before] is not chain_of[after]
    }
    return [made[id(chain)] for chain in chains], [(made[before], made[after]) for before, after in edges]
