"""Good pipelines through a stage graph: the least sum among stages below a threshold, for a few thresholds.

With many micro-batches the slowest stage decides, so the best pipeline is found at or just above the least possible
maximum; in general this is a heuristic, and the constraint program is exact.
"""

import numpy as np

from solver_plan.parallelism.pipeline_value import SlowestAndSum
from solver_plan.parallelism.stage_graph import Arcs, StageGraph

THRESHOLDS = (1.0, 1.0005, 1.002, 1.01, 1.04, 1.2, np.inf)
"""Multiples of the least maximum that are tried."""


def best_path(graph: StageGraph, arcs: Arcs) -> list[int]:
    """Return the indices of the arcs of a good pipeline, from the first stage to the last; empty if there is none."""
    if not len(arcs):
        return []
    maxima, _ = graph.potentials_behind(arcs, SlowestAndSum(1.0, 0.0))
    least = min(graph.at_first_node(level) for level in maxima[1:])
    if not np.isfinite(least):
        return []
    best: list[int] = []
    best_value = np.inf
    time = arcs.time_ms
    for factor in THRESHOLDS:
        below = np.flatnonzero(time <= least * factor * (1 + 1e-12)) if np.isfinite(factor) else np.arange(len(arcs))
        path = [int(below[index]) for index in _least_sum(graph, arcs.select(below))]
        value = graph.objective(arcs, path) if path else np.inf
        if value < best_value:
            best, best_value = path, value
    return best


def _least_sum(graph: StageGraph, arcs: Arcs) -> list[int]:
    """Return the pipeline with the least sum of times."""
    _, sums = graph.potentials_behind(arcs)
    totals = [graph.at_first_node(level) for level in sums[1:]]
    if not totals or not np.isfinite(min(totals)):
        return []
    exact = graph.problem.space.use_all_devices
    s, x, u = int(np.argmin(totals)) + 1, 0, graph.devices
    front = arcs.devices_behind + graph.device_counts[arcs.choice]
    stacked = np.stack(sums)
    total = arcs.times().through_ms + stacked[arcs.behind, arcs.end, arcs.devices_behind]
    path: list[int] = []
    while s > 0:
        here = np.flatnonzero((arcs.behind == s - 1) & (arcs.first == x) & (front == u if exact else front <= u))
        index = int(here[np.argmin(total[here])])
        path.append(index)
        s, x, u = s - 1, int(arcs.end[index]), int(arcs.devices_behind[index])
    return path
