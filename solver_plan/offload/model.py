"""The constraint program without streaming: placement and the order of three queues, with CP-SAT.

Without streaming the device's own timeline is fixed (see `flow.py`); with the first forward at 0, r_l the end of layer
l's backward, f_l the start of its forward, G the end of the last backward:

    min T
    x_l = 1 if layer l is updated on the CPU                                                     (a constant if fixed)
    for every layer l and chunk c: starts d_lc, a_lc, e_lc of gradient copy, update, weight copy (optional by x_l)

    chain      d_lc >= r_l,  a_lc >= d_lc + o_l,  e_lc >= a_lc + c_l,  e_lc + h_l <= T + f_l    if x_l   `_chain`
    clipping   a_lc >= G                                                                         if x_l   `_chain`
    queues     no overlap among d, among a, among e                                                       `_queues`
    chunks     in order: d_l0 <= d_l1 <= ..., the same for a and e (chunks of a layer are equal)          `_chain`
    rows       every inequality of `bounds.py`, with room: sum state_l (1 - x_l) <= gpu_state_bytes       `_rows`

Time is counted in ticks. Durations and releases are rounded down, next forwards up: rounding the starts of any valid
plan down gives a solution, so the solver's bound holds for every valid plan; plans are made by keeping the solution's
orders and recomputing the times exactly. Every chain constraint holds only if its layer is on the CPU: an
unconditional precedence on an absent chain would silently raise T.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ortools.sat.python import cp_model

from solver_plan.offload.bounds import Inequality
from solver_plan.offload.flow import Order, Orders, Rule, device_timeline
from solver_plan.offload.operations import Iteration, Placement, all_on
from solver_plan.offload.problem import OffloadProblem
from solver_plan.offload.retiming import Timing

TICKS = 10**8
"""Ticks in the period of the plan at hand: finer than what is claimed (1e-6), for chains of a hundred roundings."""

Job = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowModel:
    """The model with its variables."""

    model: cp_model.CpModel
    period: cp_model.IntVar
    on_cpu: tuple[cp_model.IntVar, ...]
    starts: tuple[dict[Job, cp_model.IntVar], dict[Job, cp_model.IntVar], dict[Job, cp_model.IntVar]]
    """Of gradient copies, CPU updates and weight copies, of the layers that may be on the CPU."""
    tick_ms: float

    def hint(self, placement: Placement, iteration: Iteration, timing: Timing) -> dict[cp_model.IntVar, int]:
        """Return the value of every variable for a plan in which the device works without a break from 0."""
        values = {self.period: min(TICKS, math.floor(timing.period_ms / self.tick_ms + 1e-6))}
        for variable, place in zip(self.on_cpu, placement, strict=True):
            values[variable] = int(place == "cpu")
        made = (iteration.gradient_copy, iteration.cpu_update, iteration.weight_copy)
        for starts, operations in zip(self.starts, made, strict=True):
            at = {
                (layer, chunk): math.floor(timing.starts_ms[index] / self.tick_ms)
                for layer, chunks in operations.items()
                for chunk, index in enumerate(chunks)
            }
            for job, variable in starts.items():
                values[variable] = at.get(job, 0)
        return values

    def solution(self, value: Callable[[cp_model.IntVar], int]) -> tuple[Placement, Orders]:
        """Return the placement and the orders of a solution."""
        placement: Placement = tuple("cpu" if value(variable) else "gpu" for variable in self.on_cpu)

        def order(starts: dict[Job, cp_model.IntVar]) -> Order:
            jobs = [(value(start), *job) for job, start in starts.items() if placement[job[0]] == "cpu"]
            return tuple((layer, chunk) for _, layer, chunk in sorted(jobs))

        return placement, Orders(*(order(starts) for starts in self.starts))


def flow_model(
    problem: OffloadProblem,
    rows: Sequence[Inequality],
    *,
    longest_ms: float,
    bound_ms: float | None,
    fixed: Placement | None = None,
) -> FlowModel:
    """Build the model.

    Parameters
    ----------
    problem
        The problem; nothing is streamed.
    rows
        The inequalities of `bounds.py`.
    longest_ms
        Period of a known plan; only plans that are no longer are looked for.
    bound_ms
        A proven lower bound.
    fixed
        Plan only this placement.
    """
    tick_ms = longest_ms / TICKS
    model = cp_model.CpModel()
    lowest = 0 if bound_ms is None else min(TICKS, math.floor(bound_ms / tick_ms))
    period = model.new_int_var(lowest, TICKS, "period")
    count = len(problem.layers)
    on_cpu = []
    for layer in range(count):
        if fixed is not None:
            on_cpu.append(model.new_constant(int(fixed[layer] == "cpu")))
        else:
            on_cpu.append(model.new_bool_var(f"cpu_{layer}"))
    starts: tuple[dict[Job, cp_model.IntVar], ...] = ({}, {}, {})
    device = device_timeline(problem, all_on("cpu", count), Rule())
    for layer in range(count):
        if fixed is None or fixed[layer] == "cpu":
            ready_ms = device.backward_ms[layer] + problem.layers[layer].backward_ms
            gate_ms = device.end_ms if problem.clip_gradients else 0.0
            times = (ready_ms, gate_ms, device.forward_ms[layer])
            _chain(model, problem, layer, times, tick_ms, period, on_cpu[layer], starts)
    _queues(model, problem, tick_ms, on_cpu, starts)
    _rows(model, problem, rows, tick_ms, period, on_cpu, fixed)
    model.minimize(period)
    return FlowModel(model=model, period=period, on_cpu=tuple(on_cpu), starts=starts, tick_ms=tick_ms)  # type: ignore[arg-type]


def _lengths(problem: OffloadProblem, layer: int, tick_ms: float) -> tuple[int, int, int]:
    whole = (problem.gradient_copy_ms(layer), problem.cpu_update_ms(layer), problem.weight_copy_ms(layer))
    gradient, update, weight = (math.floor(length / problem.chunks_per_layer / tick_ms) for length in whole)
    return gradient, update, weight


def _chain(
    model: cp_model.CpModel,
    problem: OffloadProblem,
    layer: int,
    times_ms: tuple[float, float, float],
    tick_ms: float,
    period: cp_model.IntVar,
    on_cpu: cp_model.IntVar,
    starts: tuple[dict[Job, cp_model.IntVar], ...],
) -> None:
    ready_ms, gate_ms, forward_ms = times_ms
    ready, gate = math.floor(ready_ms / tick_ms), math.floor(gate_ms / tick_ms)
    next_forward = math.ceil(forward_ms / tick_ms)
    lengths = _lengths(problem, layer, tick_ms)
    latest = TICKS + next_forward
    for chunk in range(problem.chunks_per_layer):
        # an absent chain keeps the whole domain, so that it binds nothing and any hint of it fits
        copy, update, weight = (model.new_int_var(0, latest, f"{queue}_{layer}_{chunk}") for queue in "dae")
        for queue, variable in zip(starts, (copy, update, weight), strict=True):
            if chunk:
                model.add(variable >= queue[layer, chunk - 1]).only_enforce_if(on_cpu)
            queue[layer, chunk] = variable
        model.add(copy >= ready).only_enforce_if(on_cpu)
        model.add(update >= copy + lengths[0]).only_enforce_if(on_cpu)
        if gate:
            model.add(update >= gate).only_enforce_if(on_cpu)
        model.add(weight >= update + lengths[1]).only_enforce_if(on_cpu)
        model.add(weight + lengths[2] <= period + next_forward).only_enforce_if(on_cpu)


def _queues(
    model: cp_model.CpModel,
    problem: OffloadProblem,
    tick_ms: float,
    on_cpu: Sequence[cp_model.IntVar],
    starts: tuple[dict[Job, cp_model.IntVar], ...],
) -> None:
    for queue, jobs in enumerate(starts):
        intervals = []
        for (layer, chunk), start in jobs.items():
            length = _lengths(problem, layer, tick_ms)[queue]
            if length:  # what has no length occupies nothing
                name = f"{'dae'[queue]}_{layer}_{chunk}"
                intervals.append(model.new_optional_fixed_size_interval_var(start, length, on_cpu[layer], name))
        model.add_no_overlap(intervals)


def _rows(
    model: cp_model.CpModel,
    problem: OffloadProblem,
    rows: Sequence[Inequality],
    tick_ms: float,
    period: cp_model.IntVar,
    on_cpu: Sequence[cp_model.IntVar],
    fixed: Placement | None,
) -> None:
    if fixed is not None:
        largest_ms = max(row.value_ms(fixed) for row in rows)
        model.add(period >= math.floor(largest_ms / tick_ms - 1e-6))
        return
    for row in rows:
        scaled = [math.floor(value / tick_ms - 1e-6) if value else 0 for value in row.cpu_ms]
        kept = [(variable, value) for variable, value in zip(on_cpu, scaled, strict=True) if value]
        total = cp_model.LinearExpr.weighted_sum([variable for variable, _ in kept], [value for _, value in kept])
        model.add(period >= math.floor(row.constant_ms / tick_ms - 1e-6) + total)
    states = [problem.state_bytes(layer) for layer in range(len(problem.layers))]
    divisor = math.gcd(*states, problem.gpu_state_bytes) or 1
    excess = sum(states) - problem.gpu_state_bytes
    if excess > 0:
        sizes = [state // divisor for state in states]
        model.add(cp_model.LinearExpr.weighted_sum(list(on_cpu), sizes) >= -(-excess // divisor))
