"""Streamed states as a flow: one after the other they come, are updated and go, as fast as link and staging allow.

For a trial period the copies in follow each other from just before the first streamed update may start. Whenever the
link is free and the staging has room, the next state to come is, among those that can be updated by the time they are
there, the one that is needed first (earliest deadline); where none can, the one that can be updated soonest. Updates
follow their copies in, copies out the updates.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from solver_plan.offload.operations import Placement
from solver_plan.offload.problem import OffloadProblem

Slot = int
"""Where a streamed update stands in the device's work: slot s >= 0 right after the backward of layer s; slot s < 0
right before the next forward of layer -s. Slot 0 is the idle time between the last backward and the next forward."""

Program = Mapping[int, Slot]
"""Slot of each streamed layer; of layer l any s with -l <= s <= l."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFlow:
    """When each streamed state comes, is updated and goes; times from the first forward at 0."""

    copy_in_ms: dict[int, float]
    update_ms: dict[int, float]
    copy_out_ms: dict[int, float]
    program: dict[int, Slot]


def state_flow(problem: OffloadProblem, placement: Placement, period_ms: float) -> StateFlow:
    """Return the flow of the states of the streamed layers of a placement."""
    count = len(problem.layers)
    forward_ms, now = [0.0] * count, 0.0
    for layer in range(count):
        forward_ms[layer] = now
        now += problem.layers[layer].forward_ms
    now += problem.other_micro_steps_ms
    backward_end_ms = [0.0] * count
    for layer in reversed(range(count)):
        now += problem.layers[layer].backward_ms
        backward_end_ms[layer] = now
    last_backward_ms = now
    streamed = [layer for layer, place in enumerate(placement) if place == "gpu_streamed"]
    ready_ms = {layer: last_backward_ms if problem.clip_gradients else backward_end_ms[layer] for layer in streamed}
    flow = StateFlow(copy_in_ms={}, update_ms={}, copy_out_ms={}, program={})
    if not streamed:
        return flow
    to_device_ms = min(ready_ms.values()) - _prefetched_ms(problem, streamed, ready_ms)
    to_host_ms = device_ms = -float("inf")
    held: list[tuple[float, int]] = []
    """End of the copy out and size of the states that have come, in the order of their ends."""
    waiting = set(streamed)
    while waiting:
        layer = _next(problem, waiting, ready_ms, to_device_ms)
        start_ms, room = to_device_ms, problem.staging_bytes - sum(size for _, size in held)
        while room < problem.state_bytes(layer) and held:
            gone_ms, size = held.pop(0)
            start_ms, room = max(start_ms, gone_ms), room + size
        better = _next(problem, waiting, ready_ms, start_ms)
        if problem.state_bytes(better) <= room:
            layer = better  # while it waited for room, a more urgent one became ready
        waiting.remove(layer)
        flow.copy_in_ms[layer] = start_ms
        to_device_ms = start_ms + problem.state_copy_in_ms(layer)
        update_ms = max(to_device_ms, ready_ms[layer], device_ms)
        flow.program[layer], update_ms = _slot(
            problem, layer, update_ms, backward_end_ms, forward_ms, last_backward_ms, period_ms
        )
        flow.update_ms[layer] = update_ms
        device_ms = update_ms + problem.gpu_update_ms(layer)
        flow.copy_out_ms[layer] = max(to_host_ms, device_ms)
        to_host_ms = flow.copy_out_ms[layer] + problem.state_copy_out_ms(layer)
        held.append((to_host_ms, problem.state_bytes(layer)))
    return flow


def _prefetched_ms(problem: OffloadProblem, streamed: list[int], ready_ms: dict[int, float]) -> float:
    """Return how long before the first update the copies in begin: for all that the staging holds at once."""
    room, total_ms = problem.staging_bytes, 0.0
    for layer in sorted(streamed, key=lambda layer: (ready_ms[layer], layer)):
        room -= problem.state_bytes(layer)
        if room < 0:
            break
        total_ms += problem.state_copy_in_ms(layer)
    return total_ms


def _next(problem: OffloadProblem, waiting: set[int], ready_ms: dict[int, float], now: float) -> int:
    """Return the state that comes next."""
    prompt = [layer for layer in waiting if ready_ms[layer] <= now + problem.state_copy_in_ms(layer) + 1e-9]
    return min(prompt) if prompt else min(waiting, key=lambda layer: (ready_ms[layer], layer))


def _slot(
    problem: OffloadProblem,
    layer: int,
    update_ms: float,
    backward_end_ms: list[float],
    forward_ms: list[float],
    last_backward_ms: float,
    period_ms: float,
) -> tuple[Slot, float]:
    """Return the slot at or after a time, and when it begins: between two operations of the device's other work."""
    if update_ms < last_backward_ms - 1e-9 and not problem.clip_gradients:
        # the backward that runs then, or has just ended; never before the layer's own
        after = next(other for other in reversed(range(layer + 1)) if backward_end_ms[other] >= update_ms - 1e-9)
        return after, max(update_ms, backward_end_ms[after])
    if update_ms < period_ms:
        return 0, update_ms
    for other in range(1, layer + 1):
        if period_ms + forward_ms[other] >= update_ms:
            return -other, update_ms
    return -layer, update_ms
