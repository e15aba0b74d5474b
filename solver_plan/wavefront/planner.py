"""Plans a wavefront problem: baselines, bounds, annealed list schedules, then the constraint program.

The plan returned is the best of all of them, evaluated by `check` outside every solver.
"""

import dataclasses
import logging
from functools import partial

from solver_plan.solving import Budget, Clock, Incumbent, Planned, Progress, silent
from solver_plan.solving.cp_sat import cp_sat_version
from solver_plan.solving.milp import highs_version
from solver_plan.solving.outcome import Effort
from solver_plan.wavefront.bounds import allotment_bound, closed_form_bound
from solver_plan.wavefront.check import evaluate
from solver_plan.wavefront.heuristics.allotted import allotted_lists
from solver_plan.wavefront.heuristics.annealing import anneal
from solver_plan.wavefront.heuristics.baselines import sequential, task_groups
from solver_plan.wavefront.heuristics.placement import place_waves
from solver_plan.wavefront.heuristics.spindle import SETTINGS, spindle_waves
from solver_plan.wavefront.instance import Instance, instance_of
from solver_plan.wavefront.plan import WavefrontPlan
from solver_plan.wavefront.problem import WavefrontProblem
from solver_plan.wavefront.schedule import Segment, plan_of, with_devices

log = logging.getLogger(__name__)
HEURISTICS = ("sequential", "task-groups", "spindle", "annealing")


def plan(
    problem: WavefrontProblem, budget: Budget, heuristic: str | None = None, on_progress: Progress = silent
) -> Planned[WavefrontPlan]:
    """Find a plan within a budget."""
    clock = Clock(budget)
    instance = instance_of(problem)
    incumbent: Incumbent[WavefrontPlan] = Incumbent(partial(evaluate, problem), clock, on_progress)
    search = Search(instance, clock, incumbent)
    with clock.interruptible():
        search.run(heuristic)
    solver = f"{cp_sat_version()}, {highs_version()}, {budget.worker_count} workers, seed {budget.seed}"
    certificate = incumbent.certificate(solver)
    assert incumbent.plan is not None
    first = next(step.seconds for step in incumbent.trace if step.objective is not None)
    effort = Effort(wall_s=clock.seconds, deterministic_s=clock.deterministic_seconds, first_plan_s=first)
    return Planned(plan=dataclasses.replace(incumbent.plan, certificate=certificate), effort=effort)


class Search:
    """The steps of the search on one instance."""

    def __init__(self, instance: Instance, clock: Clock, incumbent: Incumbent[WavefrontPlan]) -> None:
        self.instance = instance
        self.clock = clock
        self.incumbent = incumbent
        self.lists: list[tuple[float, list[Segment]]] = []

    def run(self, heuristic: str | None) -> None:
        instance, clock, incumbent = self.instance, self.clock, self.incumbent
        total = clock.remaining
        for name, schedule in (("sequential", sequential), ("task-groups", task_groups)):
            incumbent.offer(plan_of(instance, schedule(instance)), f"heuristic:{name}")
        incumbent.raise_bound(closed_form_bound(instance), "closed-form:area and paths")
        waves = sorted((spindle_waves(instance, setting) for setting in SETTINGS), key=lambda w: w[-1].end_ms)
        schedule, fits = place_waves(instance, waves[0])
        if fits:
            incumbent.offer(plan_of(instance, schedule), "heuristic:spindle")
        bound = allotment_bound(instance, clock, whole=False)
        if bound.value_ms is not None:
            incumbent.raise_bound(bound.value_ms, bound.source)
        starts = allotted_lists(instance, clock)
        starts.append((waves[0][-1].end_ms, [s for w in waves[0] for s in w.segments]))
        starts.sort(key=lambda each: each[0])
        best = starts[0][1]
        out, makespan = anneal(instance, best, clock, min(1.0, total * 0.1), clock.budget.seed)
        incumbent.offer(plan_of(instance, with_devices(instance, out)), "heuristic:annealing")
        bound = allotment_bound(instance, clock, whole=True, limit=total * 0.2, node_limit=500)
        if bound.value_ms is not None:
            incumbent.raise_bound(bound.value_ms, bound.source)
        for round_ in range(4):
            out, makespan = anneal(
                instance, starts[round_ % len(starts)][1], clock, total * 0.2, clock.budget.seed + round_
            )
            log.info("annealing %d: %g", round_, makespan)
            incumbent.offer(plan_of(instance, with_devices(instance, out)), "heuristic:annealing")
