"""Stages of one choice under the `full` cost model, before recomputation: time, memory, and what comes once.

The times are lower bounds where communication hides behind a backward that recomputation makes longer; otherwise those
of `costs.full_plan`.
"""

from collections.abc import Sequence

import numpy as np

from solver_plan.parallelism.choices import Bools, ChoiceCosts, Floats
from solver_plan.parallelism.costs.full import CONTENTION, Ring
from solver_plan.parallelism.costs.full_plan import bytes_per_parameter, replica_ring, shared_ms
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.parallelism.stage_table import Spans, largest, prefix_difference, span_ranges

FOREVER_MS = 1e15
"""Everything hides behind it."""


def full_spans(
    problem: ParallelismProblem, costs: ChoiceCosts, longest_ms: float, cuts: Bools, *, widened: bool = False
) -> Spans:
    """Return the spans whose operators take at most `longest_ms`, without recomputation and communication.

    `widened`: bounds on all stages that hold a span, and parts of the blocks beside it, too.
    """
    first, end, forward, backward = span_ranges(costs, longest_ms, cuts)
    choice = costs.choice
    ring = choice_ring(problem, costs)
    weights = prefix_difference(costs.weight_bytes, first, end)
    shared_once = np.zeros(len(first))
    for number, other in shared_weights(problem):
        size = costs.weight_bytes[number]
        together = (first <= other) & (end > number)
        weights = weights - np.where(together, size, 0.0)
        apart = (first > other) & (first <= number) & (end > number)
        shared_once += np.where(apart, shared_ms(problem, float(size), problem.cluster.intra_node), 0.0)
    starts = np.array([operator.block_start for operator in problem.operators], dtype=np.float64)
    pieces = np.maximum(1.0, prefix_difference(starts, first, end) + (2 if widened else 0))
    each = bytes_per_parameter(problem)
    gradients, state = (weights / each.weight * size for size in (each.gradient, each.optimizer_state))
    gather, scatter = _gather_ms(ring, weights), _gather_ms(ring, gradients)
    longest_backward = backward + forward if problem.space.recompute != "none" else backward
    longest_forward = forward
    if widened:
        shared_once = np.zeros(len(first))
        longest_forward = longest_backward = np.full(len(first), FOREVER_MS)
    z = choice.sharding if choice.data_parallel > 1 else 0
    overlapped = problem.overlap.reduction
    loaded_forward, loaded_backward = forward, backward
    once = shared_once
    reduction = np.zeros(len(first))
    once_pieces = pieces if overlapped else np.ones(len(first))
    if z <= 1:
        sent = 2 * scatter if z == 0 else scatter
        reduction = _exposed(sent, longest_backward * overlapped, once_pieces)
    if z in (1, 2):
        once = once + _exposed(gather, longest_forward * overlapped, once_pieces)
    if z == 2:
        loaded_backward = backward + _exposed(scatter, longest_backward, pieces)
    if z == 3:
        loaded_forward = forward + _exposed(gather, forward, pieces)
        loaded_backward = backward + _exposed(gather + scatter, longest_backward, pieces)
    rate = problem.cluster.device_memory_bytes_per_s
    if rate is not None:
        shards = choice.data_parallel if z >= 1 else 1
        once = once + (2 * gradients + 2 * state + weights) / shards / rate * 1e3
    # the first stage ends the iteration: its reduction comes behind everything
    once = once + np.where(first == 0, reduction, 0.0)
    d = choice.data_parallel
    kept_weights = weights / d + 2 * weights / pieces if z == 3 else weights
    fixed = kept_weights + gradients / (d if z >= 2 else 1) + state / (d if z >= 1 else 1)
    workspace = largest(costs.forward_reserved_bytes + costs.backward_reserved_bytes, first, end)
    return Spans(
        first=first,
        end=end,
        busy_ms=loaded_forward + loaded_backward,
        input_and_held_bytes=costs.input_bytes[first] + prefix_difference(costs.held_bytes, first, end),
        fixed_bytes=fixed + workspace,
        forward_ms=loaded_forward,
        once_ms=once,
    )


def choice_ring(problem: ParallelismProblem, costs: ChoiceCosts) -> Ring:
    """Return the data-parallel ring of a stage: within a node, or over whole nodes."""
    choice, per_node = costs.choice, problem.cluster.devices_per_node
    members = choice.data_parallel if choice.devices <= per_node else max(1, per_node // choice.tensor_parallel)
    return replica_ring(problem.cluster, choice.data_parallel, members)


def shared_weights(problem: ParallelismProblem) -> Sequence[tuple[int, int]]:
    """Return (operator, earlier operator with the same weights)."""
    number_of = {operator.name: number for number, operator in enumerate(problem.operators)}
    return [
        (number, number_of[operator.shares_weights_with])
        for number, operator in enumerate(problem.operators)
        if operator.shares_weights_with is not None
    ]


def _gather_ms(ring: Ring, size_bytes: Floats) -> Floats:
    if ring.devices == 1:
        return np.zeros(len(size_bytes))
    moved = (ring.devices - 1) / ring.devices * size_bytes / ring.bus_bytes_per_s * 1e3
    return np.where(size_bytes > 0, ring.latency_ms + moved, 0.0)


def _exposed(communication_ms: Floats, computation_ms: Floats, pieces: Floats) -> Floats:
    """`costs.full.exposed_ms` for arrays."""
    share = 1 / pieces
    left = np.maximum(communication_ms * share, communication_ms - computation_ms * (1 - share))
    return np.asarray(left + CONTENTION * (communication_ms - left))
