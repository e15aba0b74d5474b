"""Timelines without streaming: a flow shop of three queues between backward and the next forward.

Where nothing is streamed, copies and CPU updates of consecutive iterations never overlap, and the device does best to
run its forward, its backward and its updates without a break, the idle time at the end: every gradient is then ready as
early and every weight needed as late as can be. With the first forward at 0, f[l] the start of layer l's forward and
C[l] the end of its last weight copy, the least period is

    period = max( end of the device's work,  max over layers l on the CPU of C[l] - f[l] )

and what is left to choose is the order of each queue: gradient copies (d2h), updates (cpu), weight copies (h2d).
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

from solver_plan.offload.operations import Iteration, Placement, iteration_of
from solver_plan.offload.problem import OffloadProblem
from solver_plan.offload.retiming import Timing

Order = tuple[tuple[int, int], ...]
"""Jobs (layer, chunk) of one queue in the order they run."""


class Orders(NamedTuple):
    """The order of each queue."""

    gradient_copies: Order
    cpu_updates: Order
    weight_copies: Order


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How a schedule is run that a person would write by hand."""

    first: Literal["needed_first", "ready_first"] = "needed_first"
    """Which ready job goes first: that of the layer whose forward comes first (earliest deadline), or the oldest."""
    updates_wait: bool = False
    """Updates begin only after the last backward."""
    forward_waits: bool = False
    """The next forward waits for all updates and copies."""
    gpu_updates: Literal["at_once", "at_end"] = "at_end"
    """Updates on the GPU run right after their backward, or after the last one."""


class Device(NamedTuple):
    """What the GPU does in an iteration, the first forward at 0."""

    forward_ms: tuple[float, ...]
    """Start of each layer's forward."""
    backward_ms: tuple[float, ...]
    update_ms: dict[int, float]
    """Start of each update on the GPU."""
    end_ms: float


def device_timeline(problem: OffloadProblem, placement: Placement, rule: Rule) -> Device:
    """Run the GPU's work without a break."""
    layers = problem.layers
    forward_ms = (0.0, *accumulate(layer.forward_ms for layer in layers))
    now = forward_ms[-1] + problem.other_micro_steps_ms
    backward_ms = [0.0] * len(layers)
    update_ms: dict[int, float] = {}
    at_once = rule.gpu_updates == "at_once" and not problem.clip_gradients and not rule.updates_wait
    for layer in reversed(range(len(layers))):
        backward_ms[layer] = now
        now += layers[layer].backward_ms
        if at_once and placement[layer] == "gpu":
            update_ms[layer] = now
            now += problem.gpu_update_ms(layer)
    if not at_once:
        for layer in range(len(layers)):
            if placement[layer] == "gpu":
                update_ms[layer] = now
                now += problem.gpu_update_ms(layer)
    return Device(forward_ms[:-1], tuple(backward_ms), update_ms, now)


def run_rule(problem: OffloadProblem, placement: Placement, rule: Rule) -> tuple[Orders, Timing]:
    """Play one iteration: each queue, when free, takes the ready job that the rule puts first.

    Returns the orders and the timing, whose period is the least for these orders under the rule.
    """
    assert "gpu_streamed" not in placement
    device = device_timeline(problem, placement, rule)
    cpu_layers = [layer for layer, place in enumerate(placement) if place == "cpu"]
    last_backward_ms = device.backward_ms[0] + problem.layers[0].backward_ms
    gate_ms = last_backward_ms if rule.updates_wait or problem.clip_gradients else 0.0
    urgency: Callable[[int, int], int] = _needed_first if rule.first == "needed_first" else _ready_first

    chunks = problem.chunks_per_layer
    jobs = [(layer, chunk) for layer in cpu_layers for chunk in range(chunks)]
    ready = {job: device.backward_ms[job[0]] + problem.layers[job[0]].backward_ms for job in jobs}
    queues: list[dict[tuple[int, int], float]] = []
    for duration, floor_ms in (
        (problem.gradient_copy_ms, 0.0),
        (problem.cpu_update_ms, gate_ms),
        (problem.weight_copy_ms, 0.0),
    ):
        length = {layer: duration(layer) / chunks for layer in cpu_layers}
        starts = _serve({job: max(at, floor_ms) for job, at in ready.items()}, length, urgency)
        queues.append(starts)
        ready = {job: start + length[job[0]] for job, start in starts.items()}
    orders = Orders(*(tuple(sorted(starts, key=lambda job: (starts[job], job))) for starts in queues))
    return orders, _timing(problem, placement, device, queues, rule.forward_waits)


def run_orders(problem: OffloadProblem, placement: Placement, orders: Orders) -> Timing:
    """Return the timing of given orders, each operation as early as they allow, and their least period."""
    device = device_timeline(problem, placement, Rule())
    last_backward_ms = device.backward_ms[0] + problem.layers[0].backward_ms
    gate_ms = last_backward_ms if problem.clip_gradients else 0.0
    chunks = problem.chunks_per_layer
    ready = {job: device.backward_ms[job[0]] + problem.layers[job[0]].backward_ms for job in orders.gradient_copies}
    queues: list[dict[tuple[int, int], float]] = []
    for order, duration, floor_ms in (
        (orders.gradient_copies, problem.gradient_copy_ms, 0.0),
        (orders.cpu_updates, problem.cpu_update_ms, gate_ms),
        (orders.weight_copies, problem.weight_copy_ms, 0.0),
    ):
        starts: dict[tuple[int, int], float] = {}
        after: dict[tuple[int, int], float] = {}
        now = floor_ms
        for job in order:
            length = duration(job[0]) / chunks
            starts[job] = max(now, ready[job]) if length > 0 else max(floor_ms, ready[job])
            if length > 0:
                now = starts[job] + length
            after[job] = starts[job] + length
        queues.append(starts)
        ready = after
    return _timing(problem, placement, device, queues, False)


def orders_of(iteration: Iteration, starts_ms: Sequence[float]) -> Orders:
    """Return the order of each queue in a timeline."""

    def order(operations: dict[int, tuple[int, ...]]) -> Order:
        jobs = [
            (starts_ms[index], layer, chunk) for layer, made in operations.items() for chunk, index in enumerate(made)
        ]
        return tuple((layer, chunk) for _, layer, chunk in sorted(jobs))

    return Orders(order(iteration.gradient_copy), order(iteration.cpu_update), order(iteration.weight_copy))


def _needed_first(layer: int, position: int) -> int:
    return layer


def _ready_first(layer: int, position: int) -> int:
    return position


def _serve(
    ready: dict[tuple[int, int], float],
    length: dict[int, float],
    urgency: Callable[[int, int], int],
) -> dict[tuple[int, int], float]:
    """Serve jobs one at a time; whenever the queue is free it takes the most urgent ready one."""
    arrivals = sorted(ready, key=lambda job: (ready[job], -job[0], job[1]))
    starts: dict[tuple[int, int], float] = {}
    waiting: list[tuple[int, int, tuple[int, int]]] = []
    now, arrived = 0.0, 0
    while arrived < len(arrivals) or waiting:
        if not waiting:
            now = max(now, ready[arrivals[arrived]])
        while arrived < len(arrivals) and ready[arrivals[arrived]] <= now:
            job = arrivals[arrived]
            heapq.heappush(waiting, (urgency(job[0], arrived), arrived, job))
            arrived += 1
        _, _, job = heapq.heappop(waiting)
        starts[job] = now
        now += length[job[0]]
    return starts


def _timing(
    problem: OffloadProblem,
    placement: Placement,
    device: Device,
    queues: Sequence[dict[tuple[int, int], float]],
    forward_waits: bool,
) -> Timing:
    chunks = problem.chunks_per_layer
    period_ms = device.end_ms
    for (layer, _), start in queues[2].items():
        needed_ms = 0.0 if forward_waits else device.forward_ms[layer]
        period_ms = max(period_ms, start + problem.weight_copy_ms(layer) / chunks - needed_ms)
    iteration = iteration_of(problem, placement)
    starts_ms = [0.0] * len(iteration.operations)
    for layer in range(len(problem.layers)):
        starts_ms[iteration.forward[layer]] = device.forward_ms[layer]
        starts_ms[iteration.backward[layer]] = device.backward_ms[layer]
    for layer, start in device.update_ms.items():
        starts_ms[iteration.gpu_update[layer]] = start
    made = (iteration.gradient_copy, iteration.cpu_update, iteration.weight_copy)
    for operations, starts in zip(made, queues, strict=True):
        for (layer, chunk), start in starts.items():
            starts_ms[operations[layer][chunk]] = start
    return Timing(tuple(starts_ms), period_ms)
