"""A second opinion for the tests: the exact problem without streaming as a MILP with a variable for each order."""

import itertools

import pulp

from solver_plan.offload.flow import Rule, device_timeline
from solver_plan.offload.operations import all_on
from solver_plan.offload.problem import OffloadProblem
from solver_plan.solving.budget import Budget, Clock
from solver_plan.solving.milp import solve_milp


def least_period_ms(problem: OffloadProblem, longest_ms: float) -> float:
    """Return the least period over all placements and orders; `longest_ms` is one that can be reached."""
    count, chunks = len(problem.layers), problem.chunks_per_layer
    device = device_timeline(problem, all_on("cpu", count), Rule())
    horizon = 2 * longest_ms
    program = pulp.LpProblem("exact", pulp.LpMinimize)
    period = pulp.LpVariable("period", lowBound=0, upBound=longest_ms)
    program += period
    on_cpu = [pulp.LpVariable(f"cpu_{layer}", cat=pulp.LpBinary) for layer in range(count)]
    resident = pulp.lpSum(problem.state_bytes(layer) * (1 - on_cpu[layer]) for layer in range(count))
    program += resident <= problem.gpu_state_bytes
    updates = pulp.lpSum(problem.gpu_update_ms(layer) * (1 - on_cpu[layer]) for layer in range(count))
    program += period >= problem.compute_ms + problem.other_micro_steps_ms + updates
    jobs = [(layer, chunk) for layer in range(count) for chunk in range(chunks)]
    starts = [
        {job: pulp.LpVariable(f"{queue}_{job[0]}_{job[1]}", lowBound=0, upBound=horizon) for job in jobs}
        for queue in "dae"
    ]
    lengths = [
        [whole(layer) / chunks for layer in range(count)]
        for whole in (problem.gradient_copy_ms, problem.cpu_update_ms, problem.weight_copy_ms)
    ]
    for job in jobs:
        layer, absent = job[0], horizon * (1 - on_cpu[job[0]])
        copy, update, weight = (queue[job] for queue in starts)
        program += copy >= device.backward_ms[layer] + problem.layers[layer].backward_ms - absent
        program += update >= copy + lengths[0][layer] - absent
        if problem.clip_gradients:
            program += update >= device.end_ms - absent
        program += weight >= update + lengths[1][layer] - absent
        program += weight + lengths[2][layer] <= period + device.forward_ms[layer] + absent
    for queue, length in zip(starts, lengths, strict=True):
        for one, other in itertools.combinations(jobs, 2):
            first = pulp.LpVariable(f"first_{queue[one].name}_{queue[other].name}", cat=pulp.LpBinary)
            absent = horizon * (2 - on_cpu[one[0]] - on_cpu[other[0]])
            program += queue[other] >= queue[one] + length[one[0]] - horizon * (1 - first) - absent
            program += queue[one] >= queue[other] + length[other[0]] - horizon * first - absent
    outcome = solve_milp(program, Clock(Budget(time_limit_s=60.0, workers=1)))
    assert outcome.status == "optimal"
    assert outcome.objective is not None
    return outcome.objective
