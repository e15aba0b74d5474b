"""The one order of all actions of a wavefront program, from the times of its plan.

A slice stands at its planned start, what moves out of it at its planned end, the loss of a task where its last
component ends. Backward actions of a plan with fused phases stand in the mirror image: time t of the forward at 2 T - t
with T the latest end. Whatever the times say, an action stands behind all that it needs: the order is a topological one
that takes the earliest of the actions that are ready. Reductions stand behind all of this, and the update at the end.

One order for all ranks cannot deadlock, even if every send waited for its receive and every collective for all its
ranks: all before the first unfinished action is done, so every rank that takes part in it has arrived there.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from solver_plan.execution.waves.actions import WaveAction, WaveActionKind
from solver_plan.execution.waves.program import WaveProgram
from solver_plan.wavefront.plan import Slice

FORWARD, BACKWARD, LOSS = WaveActionKind.FORWARD, WaveActionKind.BACKWARD, WaveActionKind.LOSS
MOVE_FORWARD, MOVE_BACKWARD = WaveActionKind.MOVE_FORWARD, WaveActionKind.MOVE_BACKWARD


def needs(program: WaveProgram) -> dict[WaveAction, tuple[WaveAction, ...]]:
    """Return every action of the forward and backward, and what must stand before it."""
    found: dict[WaveAction, tuple[WaveAction, ...]] = {}
    losses_from = len(program.slices)
    for index in range(len(program.slices)):
        found[WaveAction(FORWARD, index)] = _arrivals(program, program.links_into[index], forward=True)
        if program.trained(index):
            outgoing = [link for link in program.links_out_of[index] if program.needs_gradient(program.links[link])]
            found[WaveAction(BACKWARD, index)] = (
                WaveAction(FORWARD, index),
                *_arrivals(program, outgoing, forward=False),
            )
    for number in range(len(program.losses)):
        found[WaveAction(LOSS, number)] = _arrivals(program, program.links_into[losses_from + number], forward=True)
    for number, link in enumerate(program.links):
        if program.in_place(link):
            continue
        found[WaveAction(MOVE_FORWARD, number)] = (WaveAction(FORWARD, link.before),)
        if program.needs_gradient(link):
            found[WaveAction(MOVE_BACKWARD, number)] = (_gradient_maker(program, link.after),)
    return found


def _arrivals(program: WaveProgram, links: Iterable[int], *, forward: bool) -> tuple[WaveAction, ...]:
    """Return what brings tensors over links: the move, or where nothing moves what makes them."""
    found: list[WaveAction] = []
    for number in links:
        link = program.links[number]
        if not program.in_place(link):
            found.append(WaveAction(MOVE_FORWARD if forward else MOVE_BACKWARD, number))
        elif forward:
            found.append(WaveAction(FORWARD, link.before))
        else:
            found.append(_gradient_maker(program, link.after))
    return tuple(found)


def _gradient_maker(program: WaveProgram, site: int) -> WaveAction:
    losses_from = len(program.slices)
    return WaveAction(BACKWARD, site) if site < losses_from else WaveAction(LOSS, site - losses_from)


def planned_order(program: WaveProgram, slices: Sequence[Slice]) -> tuple[WaveAction, ...]:
    """Return the order of all actions of a program.

    Parameters
    ----------
    program
        Complete but for its actions.
    slices
        Of its plan, numbered as in the program.
    """
    before = needs(program)
    order = list(_topological(before, _times(program, before, slices)))
    order += [WaveAction(WaveActionKind.REDUCE, number) for number in range(len(program.reductions))]
    return (*order, WaveAction(WaveActionKind.UPDATE, 0))


def _times(
    program: WaveProgram, actions: Iterable[WaveAction], slices: Sequence[Slice]
) -> dict[WaveAction, tuple[float, int]]:
    """Return when each action is planned, and whether it stands before (0) or behind (1) others of that moment."""
    latest = max(piece.end_ms for piece in slices)

    def backward(piece: Slice) -> tuple[float, float]:
        if piece.backward_start_ms is None or piece.backward_end_ms is None:
            return 2 * latest - piece.end_ms, 2 * latest - piece.start_ms
        return piece.backward_start_ms, piece.backward_end_ms

    def loss_ms(number: int) -> float:
        return max(slices[index].end_ms for index in program.losses[number].slices)

    found: dict[WaveAction, tuple[float, int]] = {}
    for action in actions:
        kind, number = action.kind, action.number
        if kind is FORWARD:
            found[action] = slices[number].start_ms, 1
        elif kind is BACKWARD:
            found[action] = backward(slices[number])[0], 1
        elif kind is LOSS:
            found[action] = loss_ms(number), 0
        elif kind is MOVE_FORWARD:
            found[action] = slices[program.links[number].before].end_ms, 0
        else:
            after = program.links[number].after
            losses_from = len(slices)
            time_ms = backward(slices[after])[1] if after < losses_from else loss_ms(after - losses_from)
            found[action] = time_ms, 0
    return found


def _topological(
    before: Mapping[WaveAction, Sequence[WaveAction]], times: Mapping[WaveAction, tuple[float, int]]
) -> Iterable[WaveAction]:
    waiting = {action: len(needed) for action, needed in before.items()}
    behind: dict[WaveAction, list[WaveAction]] = {action: [] for action in before}
    for action, needed in before.items():
        for each in needed:
            behind[each].append(action)
    ready = [(times[action], action) for action, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    while ready:
        _, action = heapq.heappop(ready)
        yield action
        for after in behind[action]:
            waiting[after] -= 1
            if waiting[after] == 0:
                heapq.heappush(ready, (times[after], after))


@dataclass(frozen=True)
class TimedWork:
    """A forward or backward of a slice in planned time."""

    action: WaveAction
    start_ms: float
    end_ms: float


def play_in_time(program: WaveProgram) -> tuple[TimedWork, ...]:
    """Return when each forward and backward runs if all take the time that the problem says.

    Each action starts as soon as its ranks have done what stands before it and its data has arrived; what moves takes
    the time of its link and occupies nobody, losses take none.
    """
    before = needs(program)
    free = [0.0] * program.world_size
    done: dict[WaveAction, float] = {}
    found: list[TimedWork] = []
    for action in program.order:
        if action not in before:
            break
        start = max((done[each] for each in before[action]), default=0.0)
        if action.kind in (MOVE_FORWARD, MOVE_BACKWARD):
            done[action] = start + program.links[action.number].ms
            continue
        if action.kind is LOSS:
            done[action] = start
            continue
        piece = program.slices[action.number]
        length = piece.forward_ms if action.kind is FORWARD else piece.backward_ms
        start = max(start, *(free[device] for device in piece.devices))
        done[action] = start + length
        for device in piece.devices:
            free[device] = done[action]
        found.append(TimedWork(action, start, done[action]))
    return tuple(found)
