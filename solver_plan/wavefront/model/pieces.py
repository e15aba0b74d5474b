"""Pieces: consecutive layers of a component that the constraint programs place as one, fixed as they are or free."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from solver_plan.wavefront.instance import Instance
from solver_plan.wavefront.schedule import Run, Schedule


@dataclass(frozen=True, slots=True)
class PieceSpec:
    """Consecutive layers of a component; `run` says how they run now, `free` whether that may change."""

    run: Run
    free: bool


def whole_problem(instance: Instance, schedule: Schedule) -> list[PieceSpec]:
    """Return a free piece for each layer, as the schedule runs it, component by component."""
    single = [
        PieceSpec(Run(run.component, layer, layer + 1, run.choice, run.devices), True)
        for run in schedule.runs
        for layer in range(run.first, run.end)
    ]
    return sorted(single, key=lambda piece: (piece.run.component, piece.run.first))


def neighbourhood(schedule: Schedule, free: frozenset[int], parts: int) -> list[PieceSpec]:
    """Return the runs of a schedule as pieces, those of free components cut into at most `parts` equal pieces."""
    found = []
    for run in schedule.runs:
        if run.component not in free:
            found.append(PieceSpec(run, False))
            continue
        layers = run.end - run.first
        count = min(parts, layers)
        cuts = [run.first + layers * part // count for part in range(count + 1)]
        for first, end in itertools.pairwise(cuts):
            found.append(PieceSpec(Run(run.component, first, end, run.choice, run.devices), True))
    return found


def pieces_of(instance: Instance, pieces: Sequence[PieceSpec]) -> list[list[int]]:
    """Return the indices of each component's pieces, in the order of their layers."""
    found: list[list[int]] = [[] for _ in instance.components]
    for index in sorted(range(len(pieces)), key=lambda index: pieces[index].run.first):
        found[pieces[index].run.component].append(index)
    return found


def dependencies(instance: Instance, of: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Yield (earlier, later) for pieces that follow one another in a component or along an edge."""
    for component, own in enumerate(of):
        yield from itertools.pairwise(own)
        for after in instance.successors[component]:
            yield own[-1], of[after][0]


def blocks(instance: Instance, pieces: Sequence[PieceSpec]) -> Iterator[tuple[int, list[int]]]:
    """Yield (number of layers, pieces that run all of them) for each run of layers of some weights that none cuts."""
    sharing: dict[int, list[int]] = {}
    for index, piece in enumerate(pieces):
        sharing.setdefault(instance.parameters[piece.run.component], []).append(index)
    for _, users in sorted(sharing.items()):
        cuts = sorted({cut for index in users for cut in (pieces[index].run.first, pieces[index].run.end)})
        for first, end in itertools.pairwise(cuts):
            yield end - first, [i for i in users if pieces[i].run.first <= first and end <= pieces[i].run.end]
