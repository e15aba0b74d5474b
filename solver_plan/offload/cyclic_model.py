"""The constraint program with streaming: a cyclic timeline of unknown period, with CP-SAT.

The first forward starts at 0. For layer l: f_l, b_l starts of forward and backward; x_l, y_l, z_l: updated on the CPU,
streamed, resident (exactly one). An operation o of iteration i starts at s_o + i T; s_o = p_o + k_o T with a position
p_o in one turn of the resource. Turns begin at 0 on the GPU (no operation straddles the start of the first forward) and
at b_L on the link. Only differences of the k are ever needed.

    min T
    compute    f_l+1 >= f_l + F_l,  b_L >= f_L + F_L + (N - 1) S,  b_l-1 >= b_l + B_l                   `_compute`
    device     no overlap among f, b and updates u_l (if y_l or z_l), all within [0, T)                  `_updates`
               u_l >= b_l + B_l (clipping: every backward ended)  or  u_l + |u_l| <= f_l                 `_updates`
    cpu        d_lc >= b_l + B_l, a_lc >= d_lc + o_l, e_lc >= a_lc + c_l, e_lc + h_l <= f_l + T   if x_l `_cpu_layer`
               no overlap among a (never around the cycle: see `flow.py`)
    streamed   positions i_l, w_l in [b_L, b_L + T) of copy in and out, v = turns from in to update,
               v' = turns from update to out:                                                   if y_l `_streamed_layer`
               i_l + |i_l| <= u_l + v T,  u_l + |u_l| <= w_l + v' T,  w_l + |w_l| <= i_l + (1 - v - v') T
    link       no overlap among d and w and the w one period earlier; among e and i and the i one period earlier
    staging    stays [i_l, end of w_l), and one period earlier: cumulative, states at most staging_bytes
    rows       every inequality of `bounds.py`; sum state_l z_l <= gpu_state_bytes                       `_rows`

Time is counted in ticks, durations rounded down. For given orders the least period is a cycle ratio, which rounding
down does not raise, and at every whole period from there on whole starts exist; so the least T of the model is below
the least real period plus one tick: the bound is one tick less than the solver's.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ortools.sat.python import cp_model

from solver_plan.offload.bounds import Inequality
from solver_plan.offload.operations import Iteration, Placement, iteration_of, precedences_of
from solver_plan.offload.plan import PLACES, Place
from solver_plan.offload.problem import OffloadProblem
from solver_plan.offload.retiming import Arc, Deadlock, Graph, Timing, arcs_of

TICKS = 10**4
"""Ticks in the period of the plan at hand. Cyclic constraints tighten bounds tick by tick: a million took minutes."""
TURNS_TO_UPDATE = (0, 1, 2)
TURNS_TO_COPY_OUT = (-1, 0, 1)

Variable = cp_model.IntVar


@dataclass(kw_only=True)
class CyclicModel:
    """The model with its variables, by layer or by (layer, chunk)."""

    problem: OffloadProblem
    model: cp_model.CpModel
    tick_ms: float
    period: Variable
    place: dict[tuple[int, Place], Variable] = field(default_factory=dict)
    forward: dict[int, Variable] = field(default_factory=dict)
    backward: dict[int, Variable] = field(default_factory=dict)
    update: dict[int, Variable] = field(default_factory=dict)
    update_late: dict[int, Variable] = field(default_factory=dict)
    """1 if the update runs before the next forward of its layer, in the turn after its backward's."""
    gradient_copy: dict[tuple[int, int], Variable] = field(default_factory=dict)
    cpu_update: dict[tuple[int, int], Variable] = field(default_factory=dict)
    weight_copy: dict[tuple[int, int], Variable] = field(default_factory=dict)
    copy_in: dict[int, Variable] = field(default_factory=dict)
    copy_out: dict[int, Variable] = field(default_factory=dict)
    copy_in_before: dict[int, Variable] = field(default_factory=dict)
    """One period earlier."""
    copy_out_before: dict[int, Variable] = field(default_factory=dict)
    stay: dict[int, Variable] = field(default_factory=dict)
    """How long the state is on the device."""
    stay_end: dict[int, Variable] = field(default_factory=dict)
    stay_end_before: dict[int, Variable] = field(default_factory=dict)
    turns: dict[tuple[int, int, int], Variable] = field(default_factory=dict)
    """1 for (layer, turns to the update, turns from it to the copy out)."""

    def ticks(self, length_ms: float) -> int:
        """Return a duration in ticks, rounded down."""
        return math.floor(length_ms / self.tick_ms)

    def placement_of(self, value: Callable[[Variable], int]) -> Placement:
        """Return the placement of a solution."""
        places: list[Place] = []
        for layer in range(len(self.problem.layers)):
            places.append(next(place for place in PLACES if value(self.place[layer, place])))
        return tuple(places)

    def timing_of(self, value: Callable[[Variable], int]) -> tuple[Placement, Iteration, Timing]:
        """Return placement and timing of a solution, in rounded times: only the orders are exact."""
        placement = self.placement_of(value)
        iteration = iteration_of(self.problem, placement)
        period = value(self.period)
        starts = [0] * len(iteration.operations)
        for layer, index in enumerate(iteration.forward):
            starts[index] = value(self.forward[layer])
            starts[iteration.backward[layer]] = value(self.backward[layer])
        for layer, index in iteration.gpu_update.items():
            starts[index] = value(self.update[layer]) + period * value(self.update_late[layer])
        for made, variables in (
            (iteration.gradient_copy, self.gradient_copy),
            (iteration.cpu_update, self.cpu_update),
            (iteration.weight_copy, self.weight_copy),
        ):
            for layer, chunks in made.items():
                for chunk, index in enumerate(chunks):
                    starts[index] = value(variables[layer, chunk])
        for layer, index in iteration.state_copy_in.items():
            chosen = [key for key, literal in self.turns.items() if key[0] == layer and value(literal)]
            _, to_update, to_copy_out = chosen[0]
            late = value(self.update_late[layer])
            starts[index] = value(self.copy_in[layer]) + period * (late - to_update)
            starts[iteration.state_copy_out[layer]] = value(self.copy_out[layer]) + period * (late + to_copy_out)
        return placement, iteration, Timing(tuple(start * self.tick_ms for start in starts), period * self.tick_ms)

    def hint(self, placement: Placement, timing: Timing) -> dict[Variable, int] | None:
        """Return the value of every variable for a plan of at most the longest period; None if rounding spoils it."""
        problem = self.problem
        iteration = iteration_of(problem, placement)
        starts = self._whole_starts(iteration, timing)
        if starts is None:
            return None
        period = TICKS
        last = starts[iteration.backward[-1]]
        values: dict[Variable, int] = {self.period: period}
        for layer, place in enumerate(placement):
            for name in PLACES:
                values[self.place[layer, name]] = int(name == place)
            values[self.forward[layer]] = starts[iteration.forward[layer]]
            values[self.backward[layer]] = starts[iteration.backward[layer]]
            update = starts[iteration.gpu_update[layer]] if layer in iteration.gpu_update else 0
            late = update // period
            values[self.update[layer]] = update - late * period
            values[self.update_late[layer]] = late
            for made, variables in (
                (iteration.gradient_copy, self.gradient_copy),
                (iteration.cpu_update, self.cpu_update),
                (iteration.weight_copy, self.weight_copy),
            ):
                for chunk in range(problem.chunks_per_layer):
                    at = starts[made[layer][chunk]] if layer in made else 0
                    values[variables[layer, chunk]] = at
            if layer not in self.copy_in:
                continue
            copy_in = copy_out = stay = 0
            to_update = to_copy_out = 0
            if layer in iteration.state_copy_in:
                real_in = starts[iteration.state_copy_in[layer]]
                real_out = starts[iteration.state_copy_out[layer]]
                copy_in = last + (real_in - last) % period
                copy_out = last + (real_out - last) % period
                to_update = late - (real_in - copy_in) // period
                to_copy_out = (real_out - copy_out) // period - late
                stay = real_out + self.ticks(problem.state_copy_out_ms(layer)) - real_in
            values[self.copy_in[layer]] = copy_in
            values[self.copy_out[layer]] = copy_out
            values[self.copy_in_before[layer]] = copy_in - period
            values[self.copy_out_before[layer]] = copy_out - period
            values[self.stay[layer]] = stay
            values[self.stay_end[layer]] = copy_in + stay
            values[self.stay_end_before[layer]] = copy_in + stay - period
            for to, out in ((to, out) for to in TURNS_TO_UPDATE for out in TURNS_TO_COPY_OUT):
                chosen = layer in iteration.state_copy_in and (to, out) == (to_update, to_copy_out)
                values[self.turns[layer, to, out]] = int(chosen)
        return values

    def _whole_starts(self, iteration: Iteration, timing: Timing) -> list[int] | None:
        """Starts in ticks at a period of `TICKS`, the first forward at 0."""
        precedences = precedences_of(self.problem, iteration)
        arcs, wraps = arcs_of(self.problem, iteration, precedences, timing)
        whole = [Arc(arc.before, arc.after, float(self.ticks(arc.weight_ms)), arc.height) for arc in arcs]
        try:
            graph = Graph(len(iteration.operations), whole)
        except Deadlock:
            return None
        found, cycle = graph.longest_path(float(TICKS))
        if cycle is not None:
            return None
        starts = [round(start) + wrap * TICKS for start, wrap in zip(found, wraps, strict=True)]
        first = starts[iteration.forward[0]]
        return [start - first for start in starts]


def cyclic_model(
    problem: OffloadProblem,
    rows: Sequence[Inequality],
    *,
    longest_ms: float,
    bound_ms: float | None,
    fixed: Placement | None = None,
) -> CyclicModel:
    """Build the model.

    Parameters
    ----------
    problem
        The problem.
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
    lowest = 1 if bound_ms is None else max(1, min(TICKS, math.floor(bound_ms / tick_ms)))
    made = CyclicModel(problem=problem, model=model, tick_ms=tick_ms, period=model.new_int_var(lowest, TICKS, "period"))
    for layer in range(len(problem.layers)):
        for place in PLACES:
            made.place[layer, place] = model.new_bool_var(f"{place}_{layer}")
        model.add_exactly_one(made.place[layer, place] for place in PLACES)
        if fixed is not None:
            model.add(made.place[layer, fixed[layer]] == 1)
    _compute(made)
    _updates(made)
    to_host: list[cp_model.IntervalVar] = []
    to_device: list[cp_model.IntervalVar] = []
    on_cpu: list[cp_model.IntervalVar] = []
    for layer in range(len(problem.layers)):
        _cpu_layer(made, layer, to_host, on_cpu, to_device)
    stays: list[tuple[cp_model.IntervalVar, int]] = []
    for layer in range(len(problem.layers)):
        if problem.may_stream(layer):
            _streamed_layer(made, layer, to_host, to_device, stays)
        else:
            model.add(made.place[layer, "gpu_streamed"] == 0)
    for intervals in (to_host, on_cpu, to_device):
        model.add_no_overlap(intervals)
    unit = math.gcd(*(problem.state_bytes(layer) for layer in range(len(problem.layers)))) or 1
    model.add_cumulative(
        [interval for interval, _ in stays], [state // unit for _, state in stays], problem.staging_bytes // unit
    )
    _rows(made, rows)
    model.minimize(made.period)
    return made


def _interval(made: CyclicModel, start: Variable, length: int, present: Variable, name: str) -> cp_model.IntervalVar:
    return made.model.new_optional_fixed_size_interval_var(start, length, present, name)


def _compute(made: CyclicModel) -> None:
    problem, model = made.problem, made.model
    count = len(problem.layers)
    for layer in range(count):
        made.forward[layer] = model.new_int_var(0, TICKS if layer else 0, f"f_{layer}")
        made.backward[layer] = model.new_int_var(0, TICKS, f"b_{layer}")
    for layer in range(count - 1):
        forward, backward = problem.layers[layer].forward_ms, problem.layers[layer + 1].backward_ms
        model.add(made.forward[layer + 1] >= made.forward[layer] + made.ticks(forward))
        model.add(made.backward[layer] >= made.backward[layer + 1] + made.ticks(backward))
    turn_ms = problem.layers[-1].forward_ms + problem.other_micro_steps_ms
    model.add(made.backward[count - 1] >= made.forward[count - 1] + made.ticks(turn_ms))
    model.add(made.period >= made.backward[0] + made.ticks(problem.layers[0].backward_ms))


def _updates(made: CyclicModel) -> None:
    problem, model = made.problem, made.model
    intervals: list[cp_model.IntervalVar] = []
    last_end = made.backward[0] + made.ticks(problem.layers[0].backward_ms)
    for layer, item in enumerate(problem.layers):
        for start, length_ms in ((made.forward[layer], item.forward_ms), (made.backward[layer], item.backward_ms)):
            if made.ticks(length_ms):
                intervals.append(model.new_fixed_size_interval_var(start, made.ticks(length_ms), f"{start.name}_run"))
        length = made.ticks(problem.gpu_update_ms(layer))
        update = model.new_int_var(0, TICKS, f"u_{layer}")
        late = model.new_bool_var(f"late_{layer}")
        here = ~made.place[layer, "cpu"]
        made.update[layer], made.update_late[layer] = update, late
        if length:
            intervals.append(model.new_optional_fixed_size_interval_var(update, length, here, f"u_{layer}_run"))
        model.add(update + length <= made.period).only_enforce_if(here)
        model.add(update + length <= made.forward[layer]).only_enforce_if(here, late)
        ready = last_end if problem.clip_gradients else made.backward[layer] + made.ticks(item.backward_ms)
        model.add(update >= ready).only_enforce_if(here, ~late)
        model.add_implication(made.place[layer, "cpu"], ~late)
    model.add_no_overlap(intervals)


def _cpu_layer(
    made: CyclicModel,
    layer: int,
    to_host: list[cp_model.IntervalVar],
    on_cpu: list[cp_model.IntervalVar],
    to_device: list[cp_model.IntervalVar],
) -> None:
    problem, model = made.problem, made.model
    present = made.place[layer, "cpu"]
    whole_ms = (problem.gradient_copy_ms(layer), problem.cpu_update_ms(layer), problem.weight_copy_ms(layer))
    lengths = [made.ticks(length / problem.chunks_per_layer) for length in whole_ms]
    ready = made.backward[layer] + made.ticks(problem.layers[layer].backward_ms)
    last_end = made.backward[0] + made.ticks(problem.layers[0].backward_ms)
    made_queues = (made.gradient_copy, made.cpu_update, made.weight_copy)
    for chunk in range(problem.chunks_per_layer):
        copy, update, weight = (model.new_int_var(0, 2 * TICKS, f"{name}_{layer}_{chunk}") for name in "dae")
        for queue, variable, intervals, length in zip(
            made_queues, (copy, update, weight), (to_host, on_cpu, to_device), lengths, strict=True
        ):
            if chunk:
                model.add(variable >= queue[layer, chunk - 1]).only_enforce_if(present)
            queue[layer, chunk] = variable
            if length:
                intervals.append(_interval(made, variable, length, present, f"{variable.name}_run"))
        model.add(copy >= ready).only_enforce_if(present)
        model.add(update >= copy + lengths[0]).only_enforce_if(present)
        if problem.clip_gradients:
            model.add(update >= last_end).only_enforce_if(present)
        model.add(weight >= update + lengths[1]).only_enforce_if(present)
        model.add(weight + lengths[2] <= made.forward[layer] + made.period).only_enforce_if(present)


def _streamed_layer(
    made: CyclicModel,
    layer: int,
    to_host: list[cp_model.IntervalVar],
    to_device: list[cp_model.IntervalVar],
    stays: list[tuple[cp_model.IntervalVar, int]],
) -> None:
    problem, model, period = made.problem, made.model, made.period
    present = made.place[layer, "gpu_streamed"]
    turn = made.backward[len(problem.layers) - 1]
    length_in = made.ticks(problem.state_copy_in_ms(layer))
    length_out = made.ticks(problem.state_copy_out_ms(layer))
    length_update = made.ticks(problem.gpu_update_ms(layer))
    copy_in, copy_out = (model.new_int_var(0, 2 * TICKS, f"{name}_{layer}") for name in ("in", "out"))
    before = []
    for name, copy, length, intervals in (
        ("in", copy_in, length_in, to_device),
        ("out", copy_out, length_out, to_host),
    ):
        earlier = model.new_int_var(-TICKS, 2 * TICKS, f"{name}_{layer}_before")
        model.add(earlier == copy - period)
        model.add(copy >= turn).only_enforce_if(present)
        model.add(copy <= turn + period).only_enforce_if(present)
        if length:
            intervals.append(_interval(made, copy, length, present, f"{name}_{layer}_run"))
            intervals.append(_interval(made, earlier, length, present, f"{name}_{layer}_run_before"))
        before.append(earlier)
    stay = model.new_int_var(0, TICKS, f"stay_{layer}")
    end = model.new_int_var(0, 3 * TICKS, f"stay_end_{layer}")
    end_before = model.new_int_var(-TICKS, 3 * TICKS, f"stay_end_{layer}_before")
    model.add(end == copy_in + stay)
    model.add(end_before == end - period)
    state = problem.state_bytes(layer)
    if state:
        interval = model.new_optional_interval_var(copy_in, stay, end, present, f"stay_{layer}_run")
        earlier_interval = model.new_optional_interval_var(before[0], stay, end_before, present, f"stay_{layer}_before")
        stays += [(interval, state), (earlier_interval, state)]
    literals = []
    for to_update in TURNS_TO_UPDATE:
        for to_copy_out in TURNS_TO_COPY_OUT:
            literal = model.new_bool_var(f"turns_{layer}_{to_update}_{to_copy_out}")
            made.turns[layer, to_update, to_copy_out] = literal
            literals.append(literal)
            total = to_update + to_copy_out
            update = made.update[layer]
            model.add(copy_in + length_in <= update + to_update * period).only_enforce_if(literal)
            model.add(update + length_update <= copy_out + to_copy_out * period).only_enforce_if(literal)
            model.add(copy_out + length_out <= copy_in + (1 - total) * period).only_enforce_if(literal)
            model.add(stay == copy_out + length_out + total * period - copy_in).only_enforce_if(literal)
    model.add(sum(literals) == present)
    made.copy_in[layer], made.copy_out[layer] = copy_in, copy_out
    made.copy_in_before[layer], made.copy_out_before[layer] = before
    made.stay[layer], made.stay_end[layer], made.stay_end_before[layer] = stay, end, end_before


def _rows(made: CyclicModel, rows: Sequence[Inequality]) -> None:
    problem, model = made.problem, made.model
    count = len(problem.layers)
    for row in rows:
        variables: list[Variable] = []
        values: list[int] = []
        for layer in range(count):
            if row.cpu_ms[layer]:
                variables.append(made.place[layer, "cpu"])
                values.append(made.ticks(row.cpu_ms[layer]))
            if row.streamed_ms is not None and row.streamed_ms[layer]:
                variables.append(made.place[layer, "gpu_streamed"])
                values.append(made.ticks(row.streamed_ms[layer]))
        total = cp_model.LinearExpr.weighted_sum(variables, values)
        model.add(made.period >= made.ticks(row.constant_ms) + total)
    states = [problem.state_bytes(layer) for layer in range(count)]
    unit = math.gcd(*states) or 1
    resident = [made.place[layer, "gpu"] for layer in range(count)]
    sizes = [state // unit for state in states]
    model.add(cp_model.LinearExpr.weighted_sum(resident, sizes) <= problem.gpu_state_bytes // unit)
