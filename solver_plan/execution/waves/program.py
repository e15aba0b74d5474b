"""The program of a wavefront plan, as data: what every rank does in one iteration.

Slices and losses are numbered in one row: site k is slice k, behind the slices come the losses. A link joins two sites
and lists which rows go from which rank to which; where both lie alike on their devices nothing moves, and the tensors
are handed over in place. `actions` is one order for all: each rank does those it takes part in, in this order.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Annotated, Literal

from annotated_types import Len

from solver_plan.documents import Bytes, Count, Index, Milliseconds, Name, ProgramDocument, Range, document
from solver_plan.execution.program import Group, ranges
from solver_plan.execution.transfers import Side, Transfer
from solver_plan.execution.waves.actions import WaveAction, WaveActionKind, WaveActionText, parse_wave_action


@document
class ComponentProgram:
    """One component."""

    name: Name
    task: Name
    layers: Count
    batch: Count
    """Samples of one iteration."""
    weights: Index
    """The first component that has the same weights; itself, where it shares them with none before it."""
    trained: bool
    """False: frozen, it has no backward."""


@document
class SliceProgram:
    """Consecutive layers of a component on devices."""

    component: Index
    layers: Range
    devices: Annotated[tuple[Index, ...], Len(1)]
    """Increasing; replica j, tensor rank k is ``devices[j * tensor_parallel + k]``."""
    tensor_parallel: Count
    data_parallel: Count
    tensor_groups: tuple[Index | None, ...]
    """Group of each replica's tensor ranks; None: of one rank."""
    forward_ms: Milliseconds
    """Of all its layers, as the problem says."""
    backward_ms: Milliseconds

    @property
    def side(self) -> Side:
        """Where its tensors lie."""
        return Side(self.devices, self.data_parallel, self.tensor_parallel)


@document
class LossProgram:
    """The loss of a task, on the devices of the component that ends it last."""

    task: Name
    slices: Annotated[tuple[Index, ...], Len(1)]
    """Last slices of the components that nothing follows, in the order of the problem."""
    slice: Index
    """The one among them whose devices and layout the loss has."""
    data_groups: tuple[Index | None, ...]
    """Group of the replicas of each tensor rank, for losses that need the whole batch."""


@document
class Link:
    """What moves between two sites."""

    before: Index
    """A slice."""
    after: Index
    """A slice, or a loss."""
    forward: tuple[Transfer, ...]
    """Empty: both sites lie alike, the tensors are handed over in place."""
    backward: tuple[Transfer, ...]
    """Empty also where no gradient comes back, from or to a frozen component."""
    ms: Milliseconds
    """Of one direction, as the problem says."""


@document
class Reduction:
    """Gradients that a set of ranks sums, all in one go."""

    group: Index | None
    """None: copies of one rank."""
    layers: Annotated[tuple[tuple[Index, Index], ...], Len(1)]
    """(component that has the weights, layer)."""
    tensor_rank: Index | None
    """Which part of the weights the ranks sum; None: the copies are split unequally, whole gradients are summed."""


@document
class WaveProgram(ProgramDocument):
    """What every rank does in one iteration."""

    kind: Literal["wavefront"] = "wavefront"
    model: Name | None
    world_size: Count
    components: Annotated[tuple[ComponentProgram, ...], Len(1)]
    edges: tuple[tuple[Index, Index], ...]
    """(predecessor, successor), in the order in which a successor takes what its predecessors give."""
    groups: tuple[Group, ...]
    slices: Annotated[tuple[SliceProgram, ...], Len(1)]
    losses: tuple[LossProgram, ...]
    links: tuple[Link, ...]
    reductions: tuple[Reduction, ...]
    actions: tuple[WaveActionText, ...]
    predicted_makespan_ms: Milliseconds | None = None
    """As the plan says."""
    predicted_memory_bytes: tuple[Bytes, ...] | None = None
    """Of each device, as the plan says."""

    @cached_property
    def order(self) -> tuple[WaveAction, ...]:
        """The actions, parsed."""
        return tuple(parse_wave_action(text) for text in self.actions)

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks."""
        return tuple(dict.fromkeys(component.task for component in self.components))

    @property
    def task_samples(self) -> dict[str, int]:
        """Samples of each task in one iteration."""
        found: dict[str, int] = {}
        for component in self.components:
            found.setdefault(component.task, component.batch)
        return found

    @property
    def global_batch(self) -> int:
        """Samples of all tasks in one iteration."""
        return sum(self.task_samples.values())

    @cached_property
    def slices_of_component(self) -> tuple[tuple[int, ...], ...]:
        """Slices of each component, in the order of its layers."""
        found: list[list[int]] = [[] for _ in self.components]
        for index in sorted(range(len(self.slices)), key=lambda index: self.slices[index].layers):
            found[self.slices[index].component].append(index)
        return tuple(map(tuple, found))

    @cached_property
    def links_into(self) -> dict[int, tuple[int, ...]]:
        """Links into each site, in order."""
        return self._links(lambda link: link.after)

    @cached_property
    def links_out_of(self) -> dict[int, tuple[int, ...]]:
        """Links out of each slice, in order."""
        return self._links(lambda link: link.before)

    def _links(self, end: Callable[[Link], int]) -> dict[int, tuple[int, ...]]:
        found: dict[int, list[int]] = {site: [] for site in range(len(self.slices) + len(self.losses))}
        for index, link in enumerate(self.links):
            found[end(link)].append(index)
        return {site: tuple(links) for site, links in found.items()}

    def side(self, site: int) -> Side:
        """Return where the tensors of a site lie."""
        return self.slices[self.slice_of(site)].side

    def slice_of(self, site: int) -> int:
        """Return the slice whose devices a site has."""
        return site if site < len(self.slices) else self.losses[site - len(self.slices)].slice

    def task_of(self, site: int) -> str:
        """Return the task of a site."""
        if site >= len(self.slices):
            return self.losses[site - len(self.slices)].task
        return self.components[self.slices[site].component].task

    def batch_of(self, site: int) -> int:
        """Return the samples of a site."""
        return self.components[self.slices[self.slice_of(site)].component].batch

    def in_place(self, link: Link) -> bool:
        """Tell whether both sites of a link lie alike, so that nothing moves."""
        return self.side(link.before) == self.side(link.after)

    def needs_gradient(self, link: Link) -> bool:
        """Tell whether gradients come back over a link."""
        into_frozen = link.after < len(self.slices) and not self.trained(link.after)
        return self.trained(link.before) and not into_frozen

    def trained(self, index: int) -> bool:
        """Tell whether a slice has a backward."""
        return self.components[self.slices[index].component].trained

    def holders(self, weights: int, layer: int) -> tuple[int, ...]:
        """Return the slices that run a layer with these weights."""
        return self._holders[weights, layer]

    @cached_property
    def _holders(self) -> dict[tuple[int, int], tuple[int, ...]]:
        found: dict[tuple[int, int], list[int]] = {}
        for index, piece in enumerate(self.slices):
            for layer in range(*piece.layers):
                found.setdefault((self.components[piece.component].weights, layer), []).append(index)
        return {key: tuple(slices) for key, slices in found.items()}

    def ranks_of(self, action: WaveAction) -> frozenset[int]:
        """Return the ranks that take part in an action."""
        kind, number = action.kind, action.number
        if kind in (WaveActionKind.FORWARD, WaveActionKind.BACKWARD):
            return frozenset(self.slices[number].devices)
        if kind is WaveActionKind.LOSS:
            return frozenset(self.side(len(self.slices) + number).devices)
        if kind in (WaveActionKind.MOVE_FORWARD, WaveActionKind.MOVE_BACKWARD):
            link = self.links[number]
            moved = link.forward if kind is WaveActionKind.MOVE_FORWARD else link.backward
            return frozenset(rank for transfer in moved for rank in (transfer.source, transfer.destination))
        if kind is WaveActionKind.REDUCE:
            return frozenset(reducing_ranks(self, self.reductions[number]))
        return frozenset(range(self.world_size))

    def actions_of(self, rank: int) -> tuple[WaveAction, ...]:
        """Return what a rank does in one iteration, in order."""
        return tuple(action for action in self.order if rank in self.ranks_of(action))


def reducing_ranks(program: WaveProgram, reduction: Reduction) -> tuple[int, ...]:
    """Return the ranks of a reduction."""
    if reduction.group is not None:
        return program.groups[reduction.group].ranks
    holder = program.slices[program.holders(*reduction.layers[0])[0]]
    return (holder.devices[reduction.tensor_rank or 0],)


def copies_of(program: WaveProgram, weights: int, layer: int) -> dict[tuple[int, ...], int]:
    """Return the copies of a layer: ranks over which each is split, and a slice that runs it so."""
    found: dict[tuple[int, ...], int] = {}
    for index in program.holders(weights, layer):
        piece = program.slices[index]
        for replica in range(piece.data_parallel):
            ranks = tuple(piece.side.rank(replica, k) for k in range(piece.tensor_parallel))
            found.setdefault(ranks, index)
    return found


def reduced_parts(program: WaveProgram, weights: int, layer: int) -> list[tuple[tuple[int, ...], int | None]]:
    """Return which ranks sum which part of the gradients of a layer; empty where it has one copy."""
    copies = copies_of(program, weights, layer)
    if len(copies) == 1:
        return []
    degrees = {len(ranks) for ranks in copies}
    if len(degrees) > 1:
        return [(tuple(sorted({rank for ranks in copies for rank in ranks})), None)]
    return [(tuple(sorted({ranks[k] for ranks in copies})), k) for k in range(degrees.pop())]


def describe_waves(program: WaveProgram) -> str:
    """Return the program as text for a terminal: groups, slices, losses, reductions, and the order of the actions."""
    moving = sum(not program.in_place(link) for link in program.links)
    lines = [
        f"{program.world_size} ranks, {len(program.groups)} process groups, {len(program.slices)} slices, "
        f"{moving} of {len(program.links)} links move data, {len(program.reductions)} reductions"
    ]
    for index, piece in enumerate(program.slices):
        component = program.components[piece.component]
        split = f"tensor {piece.tensor_parallel} x data {piece.data_parallel}"
        frozen = "" if component.trained else ", frozen"
        lines.append(
            f"slice {index}: {component.name}, layers {piece.layers[0]}-{piece.layers[1] - 1}, "
            f"ranks {ranges(piece.devices)}, {split}{frozen}"
        )
    for number, loss in enumerate(program.losses):
        lines.append(f"loss {number}: {loss.task}, on the ranks of slice {loss.slice}")
    for number, link in enumerate(program.links):
        if not program.in_place(link):
            slices = len(program.slices)
            into = f"slice {link.after}" if link.after < slices else f"loss {link.after - slices}"
            lines.append(f"link {number}: slice {link.before} to {into}, {link.ms:.3f} ms")
    for number, reduction in enumerate(program.reductions):
        ranks = reducing_ranks(program, reduction)
        lines.append(f"reduction {number}: {len(reduction.layers)} layers over ranks {ranges(ranks)}")
    shown = program.actions if len(program.actions) <= 60 else (*program.actions[:40], "…", *program.actions[-16:])
    lines.append(f"{len(program.actions)} actions: {' '.join(shown)}")
    return "\n".join(lines)
