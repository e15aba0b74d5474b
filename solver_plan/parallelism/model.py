"""The constraint program over precomputed stages (CP-SAT).

Sets        micro-batch sizes B with N_B micro-batches; arcs A_B: stages a with time t_a between nodes (s, x, u), a cut
            before operator x with s stages and u devices behind it (`stage_graph`)
Variables   x_a in {0, 1}: the stage is part of the pipeline; M_B >= 0: time of the slowest stage at size B
Objective   min sum_B (N_B - 1) M_B + sum_a t_a x_a                                                    → build
Constraints
  one       over all B, one pipeline leaves a first node (s, 0, all devices)                         → add_one_pipeline
  flow      at every inner node, stages that end there = stages that begin there                       → add_flow
  slowest   M_B >= sum over a with s stages behind of t_a x_a, for every B and s                       → _add_slowest

At most one stage of a pipeline has s stages behind it, so `slowest` is the maximum, and tighter than one row per arc.
Times are rounded down to ticks, so the optimum is a lower bound; the plan is evaluated again outside the solver.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from solver_plan.parallelism.stage_graph import Arcs, StageGraph

TICKS_OF_OBJECTIVE = 1e10
"""Resolution: an objective of the size of the incumbent has so many ticks."""


@dataclass(frozen=True, slots=True, eq=False)
class SizedArcs:
    """The arcs of one micro-batch size, with exact times."""

    graph: StageGraph
    arcs: Arcs

    def fitting(self) -> "SizedArcs":
        """Return the arcs that fit."""
        return SizedArcs(self.graph, self.arcs.select(np.flatnonzero(np.isfinite(self.arcs.time_ms))))


@dataclass(frozen=True, slots=True, eq=False)
class PipelineModel:
    """The program and its variables."""

    model: cp_model.CpModel
    chosen: list[list[cp_model.IntVar]]
    """(sizes, arcs of the size)."""
    slowest: list[cp_model.IntVar]
    tick_ms: float
    ticks: list[list[int]]


def build(sizes: Sequence[SizedArcs], objective_ms: float) -> PipelineModel:
    """Return the program over the arcs of all micro-batch sizes.

    Parameters
    ----------
    sizes
        Micro-batch sizes that still have arcs.
    objective_ms
        Objective of the incumbent; sets the length of a tick.
    """
    tick_ms = objective_ms / TICKS_OF_OBJECTIVE
    model = cp_model.CpModel()
    chosen: list[list[cp_model.IntVar]] = []
    slowest: list[cp_model.IntVar] = []
    ticks: list[list[int]] = []
    terms: list[cp_model.LinearExpr] = []
    for sized in sizes:
        times = [int(value) for value in np.floor(sized.arcs.time_ms / tick_ms)]
        size = sized.graph.batch.size
        variables = [model.new_bool_var(f"stage_{size}_{index}") for index in range(len(times))]
        maximum = model.new_int_var(0, max(times), f"slowest_{size}")
        chosen.append(variables)
        slowest.append(maximum)
        ticks.append(times)
        add_flow(model, sized, variables)
        _add_slowest(model, sized, variables, times, maximum)
        terms.append((sized.graph.batch.count - 1) * maximum)
        terms.append(cp_model.LinearExpr.weighted_sum(variables, times))
    add_one_pipeline(model, sizes, chosen)
    model.minimize(cp_model.LinearExpr.sum(terms))
    return PipelineModel(model, chosen, slowest, tick_ms, ticks)


def _nodes(sized: SizedArcs) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """Return the node behind and the node in front of each arc."""
    arcs = sized.arcs
    counts = sized.graph.device_counts[arcs.choice]
    behind = list(zip(arcs.behind.tolist(), arcs.end.tolist(), arcs.devices_behind.tolist(), strict=True))
    front = list(
        zip((arcs.behind + 1).tolist(), arcs.first.tolist(), (arcs.devices_behind + counts).tolist(), strict=True)
    )
    return behind, front


def add_flow(model: cp_model.CpModel, sized: SizedArcs, variables: list[cp_model.IntVar]) -> None:
    """Make the chosen stages of one micro-batch size meet at nodes."""
    behind, front = _nodes(sized)
    operators = len(sized.graph.problem.operators)
    ending: dict[tuple[int, int, int], list[cp_model.IntVar]] = {}
    beginning: dict[tuple[int, int, int], list[cp_model.IntVar]] = {}
    for variable, after, before in zip(variables, behind, front, strict=True):
        beginning.setdefault(before, []).append(variable)
        ending.setdefault(after, []).append(variable)
    idle_allowed = not sized.graph.problem.space.use_all_devices
    for node, incoming in ending.items():
        s, x, u = node
        if x == operators:
            continue
        outgoing = list(beginning.get(node, []))
        if idle_allowed:  # devices between the stages may stay idle
            outgoing += [v for (s2, x2, u2), found in beginning.items() if (s2, x2) == (s, x) and u2 < u for v in found]
        model.add(cp_model.LinearExpr.sum(incoming) <= cp_model.LinearExpr.sum(outgoing))
    for (s, x, u), outgoing in beginning.items():
        if x == 0:
            continue
        incoming = list(ending.get((s, x, u), []))
        if idle_allowed:
            incoming += [v for (s2, x2, u2), found in ending.items() if (s2, x2) == (s, x) and u2 > u for v in found]
        model.add(cp_model.LinearExpr.sum(outgoing) <= cp_model.LinearExpr.sum(incoming))


def _add_slowest(
    model: cp_model.CpModel,
    sized: SizedArcs,
    variables: list[cp_model.IntVar],
    times: list[int],
    maximum: cp_model.IntVar,
) -> None:
    for s in np.unique(sized.arcs.behind):
        at = np.flatnonzero(sized.arcs.behind == s)
        model.add(maximum >= cp_model.LinearExpr.weighted_sum([variables[i] for i in at], [times[i] for i in at]))


def add_one_pipeline(model: cp_model.CpModel, sizes: Sequence[SizedArcs], chosen: list[list[cp_model.IntVar]]) -> None:
    """Choose one first stage over all micro-batch sizes."""
    first_stages = [
        variables[index]
        for sized, variables in zip(sizes, chosen, strict=True)
        for index in np.flatnonzero(sized.arcs.first == 0)
    ]
    model.add_exactly_one(first_stages)


def hint_of(program: PipelineModel, size_index: int, path: Sequence[int]) -> dict[cp_model.IntVar, int]:
    """Return the complete hint of a pipeline: the arcs of one micro-batch size."""
    hint: dict[cp_model.IntVar, int] = {}
    on_path = set(path)
    for number, variables in enumerate(program.chosen):
        for index, variable in enumerate(variables):
            hint[variable] = int(number == size_index and index in on_path)
        hint[program.slowest[number]] = (
            max(program.ticks[number][index] for index in path) if number == size_index else 0
        )
    return hint
