"""Check of a wavefront program before any process starts: complete work, matching communication, no deadlock.

One order for all ranks cannot deadlock if every action stands behind what it needs (`order` says why); so that is what
is checked, beside the rows that move and the ranks that sum.
"""

import itertools
from collections import Counter

from solver_plan.execution.verify import fault, require_all_rows, require_distinct, require_group
from solver_plan.execution.waves.actions import WaveAction, WaveActionKind
from solver_plan.execution.waves.order import needs
from solver_plan.execution.waves.program import WaveProgram, reduced_parts, reducing_ranks


def verify_waves(program: WaveProgram) -> None:
    """Raise `NotExecutableError` with the first fault found."""
    _references_exist(program)
    _layers_are_covered(program)
    require_distinct(program.groups)
    _groups_fit(program)
    _links_are_complete(program)
    _reductions_are_complete(program)
    _order_is_complete(program)


def _references_exist(program: WaveProgram) -> None:
    sites = len(program.slices) + len(program.losses)
    for what, indices, count in (
        ("component", [piece.component for piece in program.slices], len(program.components)),
        ("component", [component.weights for component in program.components], len(program.components)),
        ("component", [end for edge in program.edges for end in edge], len(program.components)),
        ("rank", [rank for piece in program.slices for rank in piece.devices], program.world_size),
        ("rank", [rank for group in program.groups for rank in group.ranks], program.world_size),
        ("slice", [index for loss in program.losses for index in (loss.slice, *loss.slices)], len(program.slices)),
        ("slice", [link.before for link in program.links], len(program.slices)),
        ("site", [link.after for link in program.links], sites),
        ("layer of component", [each for r in program.reductions for each, _ in r.layers], len(program.components)),
    ):
        if indices and max(indices) >= count:
            raise fault(f"there is no {what} {max(indices)}, only {count}")


def _layers_are_covered(program: WaveProgram) -> None:
    for component, slices in zip(program.components, program.slices_of_component, strict=True):
        at = 0
        for index in slices:
            piece = program.slices[index]
            if piece.layers[0] != at or piece.layers[1] > component.layers:
                raise fault(f"slice {index} runs layers {list(piece.layers)}, {component.name} goes on at {at}")
            at = piece.layers[1]
            if (
                len(piece.devices) != piece.tensor_parallel * piece.data_parallel
                or component.batch % piece.data_parallel
            ):
                raise fault(f"slice {index} has {len(piece.devices)} ranks, which do not fit its degrees or its batch")
            if list(piece.devices) != sorted(set(piece.devices)):
                raise fault(f"slice {index} has the ranks {list(piece.devices)}: not increasing")
        if at < component.layers:
            raise fault(f"no slice runs layer {at} of {component.name}")


def _groups_fit(program: WaveProgram) -> None:
    for index, piece in enumerate(program.slices):
        for replica, group in enumerate(piece.tensor_groups):
            ranks = tuple(piece.side.rank(replica, k) for k in range(piece.tensor_parallel))
            require_group(program.groups, group, ranks, f"slice {index}")
        if len(piece.tensor_groups) != piece.data_parallel:
            raise fault(f"slice {index} has {len(piece.tensor_groups)} groups for {piece.data_parallel} replicas")
    for number, loss in enumerate(program.losses):
        side = program.slices[loss.slice].side
        for k, group in enumerate(loss.data_groups):
            ranks = tuple(side.rank(replica, k) for replica in range(side.data_parallel))
            require_group(program.groups, group, ranks, f"loss {number}")


def _links_are_complete(program: WaveProgram) -> None:
    of = program.slices_of_component
    expected = Counter((a, b) for slices in of for a, b in itertools.pairwise(slices))
    expected.update((of[before][-1], of[after][0]) for before, after in program.edges)
    expected.update((index, len(program.slices) + n) for n, loss in enumerate(program.losses) for index in loss.slices)
    found = Counter((link.before, link.after) for link in program.links)
    if found != expected:
        before, after = next(iter((expected - found) or (found - expected)))
        raise fault(f"between sites {before} and {after} there are {found[before, after]} links")
    for number, link in enumerate(program.links):
        sender, receiver, rows = program.side(link.before), program.side(link.after), program.batch_of(link.before)
        if program.batch_of(link.after) != rows:
            raise fault(f"link {number} joins {rows} samples to {program.batch_of(link.after)}")
        if program.in_place(link):
            continue
        require_all_rows(f"on link {number}", link.forward, sender, receiver, rows)
        if program.needs_gradient(link):
            require_all_rows(f"on link {number}", link.backward, receiver, sender, rows)


def _reductions_are_complete(program: WaveProgram) -> None:
    """Every part of a layer that has several copies, and is trained by any component, is summed once by its ranks."""
    trained = {component.weights for component in program.components if component.trained}
    expected = Counter(
        (weights, layer, ranks, tensor_rank)
        for weights in trained
        for layer in range(program.components[weights].layers)
        for ranks, tensor_rank in reduced_parts(program, weights, layer)
    )
    found = Counter(
        (weights, layer, reducing_ranks(program, reduction), reduction.tensor_rank)
        for reduction in program.reductions
        for weights, layer in reduction.layers
    )
    if found != expected:
        weights, layer, ranks, _ = next(iter((expected - found) or (found - expected)))
        name = program.components[weights].name
        raise fault(f"the gradients of layer {layer} of {name} are not summed once over the ranks {list(ranks)}")


def _order_is_complete(program: WaveProgram) -> None:
    before = needs(program)
    reductions = [WaveAction(WaveActionKind.REDUCE, number) for number in range(len(program.reductions))]
    update = WaveAction(WaveActionKind.UPDATE, 0)
    counts = Counter(program.order)
    for action in (*before, *reductions, update):
        if counts[action] != 1:
            raise fault(f"{action} stands {counts[action]} times in the order")
    if len(counts) > len(before) + len(reductions) + 1:
        raise fault(f"{next(iter(set(counts) - {*before, *reductions, update}))} is no action of this program")
    place = {action: at for at, action in enumerate(program.order)}
    for action, needed in before.items():
        for each in needed:
            if place[each] > place[action]:
                raise fault(f"{action} stands before {each}, which it needs")
    last = max(place[action] for action in before)
    if any(place[action] < last for action in reductions) or place[update] < len(program.order) - 1:
        raise fault("gradients are summed before they are complete, or weights updated before that")
