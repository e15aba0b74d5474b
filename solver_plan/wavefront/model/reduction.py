"""What several devices that hold the same weights spend on reducing their gradients, as constraints."""

from collections.abc import Sequence

from ortools.sat.python import cp_model

from solver_plan.wavefront.model.ticks import floor_ticks
from solver_plan.wavefront.problem import Cluster


def add_reduction(
    model: cp_model.CpModel,
    cluster: Cluster,
    size_bytes: int,
    holds: Sequence[cp_model.IntVar],
    reduced: Sequence[list[cp_model.LinearExprT]],
    fineness: int,
) -> None:
    """Append to `reduced`, per device, the ticks that a holder spends: r >= 2 (m - 1) / m bytes / bandwidth.

    Variables: q_m whether m devices hold the weights; near, whether all are on one node; r, and r on each device.

    Parameters
    ----------
    model
        Receives variables and constraints.
    cluster
        Its bandwidths.
    size_bytes
        What is reduced.
    holds
        Whether each device holds the weights.
    reduced
        Per device, the terms of its reduction.
    fineness
        Ticks per ms.
    """
    counts = range(cluster.devices + 1)
    number = [model.new_bool_var("") for _ in counts]
    model.add_exactly_one(number)
    model.add(sum(holds) == sum(count * q for count, q in zip(counts, number, strict=True)))

    def ticks(count: int, within: bool) -> int:
        if count < 2:
            return 0
        return floor_ticks(cluster.ms_to_move(2 * (count - 1) / count * size_bytes, within), fineness)

    inside = [ticks(count, True) for count in counts]
    outside = [ticks(count, False) for count in counts]
    one_node = cluster.devices <= cluster.devices_per_node
    least = inside if one_node else [min(pair) for pair in zip(inside, outside, strict=True)]
    longest = max(*inside, *outside)
    length = model.new_int_var(0, longest, "")
    model.add(length >= sum(t * q for t, q in zip(least, number, strict=True)))
    if not one_node and outside != least:
        near = model.new_bool_var("")
        nodes = -(-cluster.devices // cluster.devices_per_node)
        in_node = [model.new_bool_var("") for _ in range(nodes)]
        model.add(sum(in_node) == near)
        for node, only in enumerate(in_node):
            for device, held in enumerate(holds):
                if cluster.node_of(device) != node:
                    model.add_implication(only, ~held)
        model.add(length >= sum(t * q for t, q in zip(outside, number, strict=True))).only_enforce_if(~near)
    for device, held in enumerate(holds):
        here = model.new_int_var(0, longest, "")
        model.add(here >= length).only_enforce_if(held)
        reduced[device].append(here)
