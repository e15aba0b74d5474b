"""Best pipeline through a stage graph: labels (maximum, sum) from the last stage to the first."""

from dataclasses import dataclass

import numpy as np

from solver_plan.parallelism.stage_graph import Arcs, StageGraph

MOST_LABELS = 64
"""Labels kept at a node; more would be needed for exactness only in contrived graphs (the constraint program is exact)."""


@dataclass(frozen=True, slots=True)
class _Label:
    slowest_ms: float
    total_ms: float
    arc: int
    """The arc that leaves the node to the stages behind; -1 at the end of the pipeline."""
    next: "_Label | None"


def best_path(graph: StageGraph, arcs: Arcs) -> list[int]:
    """Return the indices of the arcs of the best pipeline found, from the first stage to the last; empty if none."""
    counts = np.array([costs.choice.devices for costs in graph.batch.choices])[arcs.choice]
    time = arcs.time_ms
    operators, devices = len(graph.problem.operators), graph.problem.cluster.devices
    exact = graph.problem.space.use_all_devices
    labels: dict[tuple[int, int, int], list[_Label]] = {}
    ends = [0] if exact else range(devices)
    for u in ends:
        labels[0, operators, u] = [_Label(0.0, 0.0, -1, None)]
    order = np.lexsort((arcs.devices_behind, arcs.behind))
    for arc in order:
        behind = labels.get((int(arcs.behind[arc]), int(arcs.end[arc]), int(arcs.devices_behind[arc])))
        if not behind or not np.isfinite(time[arc]):
            continue
        node = (int(arcs.behind[arc]) + 1, int(arcs.first[arc]), int(arcs.devices_behind[arc] + counts[arc]))
        here = labels.setdefault(node, [])
        for label in behind:
            slowest, total = max(label.slowest_ms, float(time[arc])), label.total_ms + float(time[arc])
            if any(other.slowest_ms <= slowest and other.total_ms <= total for other in here):
                continue
            here[:] = [other for other in here if other.slowest_ms < slowest or other.total_ms < total]
            here.append(_Label(slowest, total, int(arc), label))
            if len(here) > MOST_LABELS:
                here.sort(key=lambda label: label.slowest_ms)
                del here[MOST_LABELS:]
    scale = graph.batch.count - 1
    goals = [
        label
        for (_, x, u), found in labels.items()
        if x == 0 and (u == devices or not exact)
        for label in found
        if label.arc >= 0
    ]
    if not goals:
        return []
    label = min(goals, key=lambda label: scale * label.slowest_ms + label.total_ms)
    path: list[int] = []
    at: _Label | None = label
    while at is not None and at.arc >= 0:
        path.append(at.arc)
        at = at.next
    return path
