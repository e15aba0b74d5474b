"""The constraint program under `full`: a lower bound on 1F1B over precomputed stages (CP-SAT).

Sets        micro-batch sizes B with N_B micro-batches; arcs A_B as in `model`; levels s: stages behind
Variables   x_a in {0, 1}: the stage is part of the pipeline; u_s in {0, 1}: the pipeline has a stage at level s
            T_B >= 0: time of the schedule; O_B >= 0: what comes once; P_s, Q_s >= 0: waits while filling, draining
Given       t_a, f_a, b_a: time, forward and backward of one micro-batch; o_a: once an iteration
            a_a, l_a: transfers of input and gradient that overlap computation, h = t + a + l the way of a micro-batch
            t_s = sum over a at level s of t_a x_a, likewise f_s, …;  S_s = l_s + sum of h_r, r < s;  k = min(s, N - 1)
Objective   min sum_B T_B + O_B                                                              → build_schedule_model
Constraints
  one, flow   as in `model`
  used        u_s = sum over a at level s of x_a
  filling     P_s >= S_s - k f_s                                                             → _add_levels
  draining    Q_s >= S_s - k b_s                                                             → _add_levels
  schedule    u_s: T >= sum_{r > s} h_r + a_s + N t_s + P_s + Q_s  (N <= s + 1: P_s, Q_s alone)   → _add_levels
  once        O >= sum over a at level s of o_a x_a                                          → _add_levels

`pipeline_value` says why every 1F1B schedule takes so long. Times are rounded down to ticks, those that are subtracted
up: the optimum is a lower bound; its pipeline is a candidate, played outside the solver.
"""

from collections.abc import Sequence

import numpy as np
from ortools.sat.python import cp_model

from solver_plan.parallelism.choices import Floats, Integers
from solver_plan.parallelism.model import TICKS_OF_OBJECTIVE, PipelineModel, SizedArcs, add_flow, add_one_pipeline


def build_schedule_model(sizes: Sequence[SizedArcs], objective_ms: float) -> PipelineModel:
    """Return the program over the arcs of all micro-batch sizes; the incumbent's objective sets a tick's length."""
    tick_ms = objective_ms / TICKS_OF_OBJECTIVE
    model = cp_model.CpModel()
    chosen: list[list[cp_model.IntVar]] = []
    schedules: list[cp_model.IntVar] = []
    terms: list[cp_model.LinearExpr] = []
    most = 4 * int(TICKS_OF_OBJECTIVE)
    for sized in sizes:
        size = sized.graph.batch.size
        variables = [model.new_bool_var(f"stage_{size}_{index}") for index in range(len(sized.arcs))]
        schedule = model.new_int_var(0, most, f"schedule_{size}")
        once = model.new_int_var(0, most, f"once_{size}")
        chosen.append(variables)
        schedules.append(schedule)
        add_flow(model, sized, variables)
        _add_levels(model, sized, variables, schedule, once, tick_ms)
        terms += [schedule, once]
    add_one_pipeline(model, sizes, chosen)
    model.minimize(cp_model.LinearExpr.sum(terms))
    return PipelineModel(model, chosen, schedules, tick_ms, [])


def _add_levels(
    model: cp_model.CpModel,
    sized: SizedArcs,
    variables: list[cp_model.IntVar],
    schedule: cp_model.IntVar,
    once: cp_model.IntVar,
    tick_ms: float,
) -> None:
    arcs, size, count = sized.arcs, sized.graph.batch.size, sized.graph.batch.count
    most = 4 * int(TICKS_OF_OBJECTIVE)
    backward_ms = arcs.time_ms - arcs.forward_ms
    levels = [int(level) for level in np.unique(arcs.behind)]

    def total(at: Integers, values: Floats) -> cp_model.LinearExpr:
        return cp_model.LinearExpr.weighted_sum(
            [variables[index] for index in at], [int(values[index]) for index in at]
        )

    times = arcs.times()
    down, way, once_down, arrive, leave = (
        np.floor(values / tick_ms)
        for values in (times.time_ms, times.through_ms, times.once_ms, times.arrive_ms, times.leave_ms)
    )
    forward_up, backward_up = np.ceil(arcs.forward_ms / tick_ms), np.ceil(backward_ms / tick_ms)
    for s in levels:
        at = np.flatnonzero(arcs.behind == s)
        behind, front = np.flatnonzero(arcs.behind < s), np.flatnonzero(arcs.behind > s)
        used = model.new_bool_var(f"used_{size}_{s}")
        filling, draining = (model.new_int_var(0, most, f"{name}_{size}_{s}") for name in ("filling", "draining"))
        others = min(s, count - 1)
        model.add(cp_model.LinearExpr.sum([variables[index] for index in at]) == used)
        round_trip = total(behind, way) + total(at, leave)
        model.add(filling >= round_trip - others * total(at, forward_up))
        model.add(draining >= round_trip - others * total(at, backward_up))
        model.add(once >= total(at, once_down))
        work = total(front, way) + total(at, arrive) + count * total(at, down)
        if count > s + 1:
            model.add(schedule >= work + filling + draining).only_enforce_if(used)
        else:
            model.add(schedule >= work + filling).only_enforce_if(used)
            model.add(schedule >= work + draining).only_enforce_if(used)
