"""Timelines with streaming: copies of whole states around the cycle, the queues of the CPU layers between them.

A state may be copied in before its iteration begins and copied out after the next one has begun, so the timeline is
truly cyclic. It is laid out for a trial period: the device's work first, in the order of a *program* that says where
each streamed update stands; then each state's copy in as late and copy out as early as the link allows, modulo the
period. Without a program the states flow instead (`state_flow.py`), and the updates follow them. Then the CPU layers in
earliest-deadline order in what is left. Nothing here need fit: only the orders count, and `retiming.py` finds their
least period.
"""

import bisect
import heapq
from dataclasses import dataclass

from solver_plan.offload.operations import Iteration, Placement, iteration_of, precedences_of
from solver_plan.offload.plan import RESOURCES, ResourceName
from solver_plan.offload.problem import OffloadProblem
from solver_plan.offload.retiming import Critical, Timing, retime
from solver_plan.offload.state_flow import Program, Slot, StateFlow, state_flow

TRIALS = 4


class Calendar:
    """Busy times of a resource modulo the period."""

    def __init__(self, period_ms: float) -> None:
        self.period_ms = period_ms
        self._starts: list[float] = []
        self._ends: list[float] = []

    def take(self, start_ms: float, length_ms: float) -> None:
        """Mark a time as busy, wherever it lies."""
        if length_ms <= 0:
            return
        begin = start_ms % self.period_ms
        while length_ms > 0:
            piece = min(length_ms, self.period_ms - begin)
            at = bisect.bisect(self._starts, begin)
            self._starts.insert(at, begin)
            self._ends.insert(at, begin + piece)
            length_ms -= piece
            begin = 0.0

    def earliest(self, ready_ms: float, length_ms: float) -> float:
        """Return the first start from `ready_ms` on that is free for that long, within a period; else `ready_ms`."""
        begin = ready_ms % self.period_ms
        base = ready_ms - begin
        at = begin
        for wrap in (0.0, self.period_ms):
            for start, end in zip(self._starts, self._ends, strict=True):
                if end + wrap <= at:
                    continue
                if start + wrap >= at + length_ms - 1e-9:
                    return base + at
                at = max(at, end + wrap)
                if at > begin + self.period_ms:
                    return ready_ms
        return base + at

    def latest(self, due_ms: float, length_ms: float) -> float:
        """Return the last start that ends by `due_ms` and is free, within one period; else the one that ends there."""
        until = due_ms % self.period_ms
        base = due_ms - until
        at = until
        for wrap in (0.0, -self.period_ms):
            for start, end in zip(reversed(self._starts), reversed(self._ends), strict=True):
                if start + wrap >= at:
                    continue
                if end + wrap <= at - length_ms + 1e-9:
                    return base + at - length_ms
                at = min(at, start + wrap)
                if at < until - self.period_ms:
                    return due_ms - length_ms
        return base + at - length_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """A retimed timeline with what it came from."""

    placement: Placement
    program: Program
    iteration: Iteration
    timing: Timing
    critical: Critical


def lay_out(
    problem: OffloadProblem,
    placement: Placement,
    program: Program | None,
    trial_ms: float,
    *,
    in_gradient_order: bool = False,
) -> Streamed | None:
    """Lay a timeline out for a trial period and return it with its least period; None if its orders deadlock.

    Parameters
    ----------
    problem, placement
        What to lay out.
    program
        Where the streamed updates stand; None: where the flow of their states puts them.
    trial_ms
        The period that the layout aims at; raised to the device's work where it is less.
    in_gradient_order
        Serve the CPU layers as their gradients come rather than by earliest deadline.
    """
    iteration = iteration_of(problem, placement)
    period_ms = max(trial_ms, *_work_ms(problem, iteration).values())
    if period_ms <= 0:
        return None
    starts_ms = [0.0] * len(iteration.operations)
    flow = None if program is not None else state_flow(problem, placement, period_ms)
    if program is None:
        assert flow is not None
        program = flow.program
    _device(problem, placement, program, iteration, starts_ms, period_ms, flow)
    to_host, to_device = Calendar(period_ms), Calendar(period_ms)
    if flow is None:
        _stream(iteration, starts_ms, to_host, to_device)
    else:
        for layer, copy in iteration.state_copy_in.items():
            starts_ms[copy] = flow.copy_in_ms[layer]
            to_device.take(starts_ms[copy], iteration.operations[copy].duration_ms)
        for layer, copy in iteration.state_copy_out.items():
            starts_ms[copy] = flow.copy_out_ms[layer]
            to_host.take(starts_ms[copy], iteration.operations[copy].duration_ms)
    _cpu_layers(problem, iteration, starts_ms, to_host, to_device, in_gradient_order)
    retimed = retime(problem, iteration, precedences_of(problem, iteration), Timing(tuple(starts_ms), period_ms))
    if retimed is None:
        return None
    return Streamed(placement=placement, program=program, iteration=iteration, timing=retimed[0], critical=retimed[1])


def best_layout(
    problem: OffloadProblem,
    placement: Placement,
    program: Program | None,
    lower_ms: float,
    *,
    in_gradient_order: bool = False,
) -> Streamed | None:
    """Lay out for several trial periods, from a lower bound towards the least period found; return the best."""
    best: Streamed | None = None
    trial_ms = max(lower_ms, *_work_ms(problem, iteration_of(problem, placement)).values())
    for _ in range(TRIALS):
        found = lay_out(problem, placement, program, trial_ms, in_gradient_order=in_gradient_order)
        if found is not None and (best is None or found.timing.period_ms < best.timing.period_ms):
            best = found
        if best is None:
            trial_ms *= 1.5
            continue
        if best.timing.period_ms <= trial_ms * (1 + 1e-9):
            break
        trial_ms = (trial_ms + best.timing.period_ms) / 2
    return best


def at_once(placement: Placement) -> dict[int, Slot]:
    """Return the program that updates each streamed layer right after its backward."""
    return {layer: layer for layer, place in enumerate(placement) if place == "gpu_streamed"}


def streamed_timing(problem: OffloadProblem, placement: Placement, *, serial: bool = False) -> Timing | None:
    """Return the timing of a rule: streamed updates right after their backward, CPU layers by earliest deadline.

    Serial: CPU layers as their gradients come, streamed updates after the last backward where that is better. The
    waiting that a serial rule adds is not kept, only its orders.
    """
    programs: list[dict[int, Slot]] = [at_once(placement)]
    if serial:
        programs.append(dict.fromkeys(programs[0], 0))
    found = [best_layout(problem, placement, program, 0.0, in_gradient_order=serial) for program in programs]
    return min(
        (layout.timing for layout in found if layout is not None), key=lambda timing: timing.period_ms, default=None
    )


def _work_ms(problem: OffloadProblem, iteration: Iteration) -> dict[ResourceName, float]:
    """Work of each resource in an iteration."""
    work_ms = dict.fromkeys(RESOURCES, 0.0)
    for item in iteration.operations:
        work_ms[item.resource] += item.duration_ms
    work_ms["gpu"] += problem.other_micro_steps_ms
    return work_ms


def _device(
    problem: OffloadProblem,
    placement: Placement,
    program: Program,
    iteration: Iteration,
    starts_ms: list[float],
    period_ms: float,
    flow: StateFlow | None,
) -> None:
    """Forward from 0, backward, the idle time before the next forward; updates where the program says."""
    count = len(problem.layers)
    after: dict[Slot, list[int]] = {}
    for layer, slot in program.items():
        after.setdefault(0 if problem.clip_gradients and slot > 0 else slot, []).append(layer)
    now = 0.0
    for layer in range(count):
        for update in sorted(after.get(-layer, ())) if layer else ():
            starts_ms[iteration.gpu_update[update]] = now + period_ms
            now += problem.gpu_update_ms(update)
        starts_ms[iteration.forward[layer]] = now
        now += problem.layers[layer].forward_ms
    now += problem.other_micro_steps_ms
    for layer in reversed(range(count)):
        starts_ms[iteration.backward[layer]] = now
        now += problem.layers[layer].backward_ms
        if layer:
            for update in sorted(after.get(layer, ())):
                starts_ms[iteration.gpu_update[update]] = now
                now += problem.gpu_update_ms(update)
    resident = [layer for layer, place in enumerate(placement) if place == "gpu"]
    idle = sorted(after.get(0, ()))
    for update in resident:
        starts_ms[iteration.gpu_update[update]] = now
        now += problem.gpu_update_ms(update)
    # spread over the idle time, so that one state's copies can follow another's
    spare_ms = period_ms - now - sum(problem.gpu_update_ms(update) for update in idle)
    if flow is not None:
        idle.sort(key=lambda update: flow.update_ms[update])
        spare_ms = 0.0
    for update in idle:
        if flow is not None:
            now = max(now, flow.update_ms[update])
        starts_ms[iteration.gpu_update[update]] = now
        now += problem.gpu_update_ms(update) + max(0.0, spare_ms) / len(idle)


def _stream(iteration: Iteration, starts_ms: list[float], to_host: Calendar, to_device: Calendar) -> None:
    operations = iteration.operations
    updates = sorted((starts_ms[iteration.gpu_update[layer]], layer) for layer in iteration.state_copy_in)
    for start, layer in reversed(updates):
        copy = iteration.state_copy_in[layer]
        starts_ms[copy] = to_device.latest(start, operations[copy].duration_ms)
        to_device.take(starts_ms[copy], operations[copy].duration_ms)
    for start, layer in updates:
        copy = iteration.state_copy_out[layer]
        ready_ms = start + operations[iteration.gpu_update[layer]].duration_ms
        starts_ms[copy] = to_host.earliest(ready_ms, operations[copy].duration_ms)
        to_host.take(starts_ms[copy], operations[copy].duration_ms)


def _cpu_layers(
    problem: OffloadProblem,
    iteration: Iteration,
    starts_ms: list[float],
    to_host: Calendar,
    to_device: Calendar,
    in_gradient_order: bool,
) -> None:
    """The three queues, each by earliest deadline among the ready jobs, in the gaps of its calendar."""
    operations = iteration.operations
    gate_ms = starts_ms[iteration.backward[0]] + problem.layers[0].backward_ms if problem.clip_gradients else 0.0
    ready = {
        (layer, chunk): starts_ms[iteration.backward[layer]] + problem.layers[layer].backward_ms
        for layer, copies in iteration.gradient_copy.items()
        for chunk in range(len(copies))
    }
    for made, calendar, floor_ms in (
        (iteration.gradient_copy, to_host, 0.0),
        (iteration.cpu_update, Calendar(to_host.period_ms), gate_ms),
        (iteration.weight_copy, to_device, 0.0),
    ):
        arrivals = sorted((max(at, floor_ms), -layer, chunk) for (layer, chunk), at in ready.items())
        waiting: list[tuple[int, int, int]] = []
        now, arrived = 0.0, 0
        ready = {}
        while arrived < len(arrivals) or waiting:
            if not waiting:
                now = max(now, arrivals[arrived][0])
            while arrived < len(arrivals) and arrivals[arrived][0] <= now:
                _, negative, chunk = arrivals[arrived]
                heapq.heappush(waiting, (arrived if in_gradient_order else -negative, -negative, chunk))
                arrived += 1
            _, layer, chunk = waiting[0]
            index = made[layer][chunk]
            length_ms = operations[index].duration_ms
            free_ms = calendar.earliest(now, length_ms)
            if free_ms > now and arrived < len(arrivals) and arrivals[arrived][0] < free_ms:
                now = arrivals[arrived][0]  # a more urgent job may come before the gap
                continue
            now = free_ms
            heapq.heappop(waiting)
            starts_ms[index] = now
            calendar.take(now, length_ms)
            now += length_ms
            ready[layer, chunk] = now
