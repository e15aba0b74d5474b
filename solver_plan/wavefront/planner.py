"""Plans a wavefront problem: baselines, Spindle, bounds, annealed list schedules, then the constraint program.

The incumbent is the best of all, evaluated by `check` outside every solver. Shares of the budget are in the clock's own
unit, wall seconds or deterministic ones, so that the deterministic search does the same work every time.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from solver_plan.solving import Budget, Clock, Effort, Incumbent, Planned, Progress, silent
from solver_plan.solving.cp_sat import cp_sat_version
from solver_plan.solving.milp import highs_version
from solver_plan.wavefront.bounds import allotment_bound, closed_form_bound
from solver_plan.wavefront.bounds_in_time import BUCKETS, WORTH_MORE, bucket_bound, suits_buckets
from solver_plan.wavefront.check import evaluate
from solver_plan.wavefront.heuristics.allotted import allotted_lists
from solver_plan.wavefront.heuristics.baselines import sequential, task_groups
from solver_plan.wavefront.heuristics.homes import at_home
from solver_plan.wavefront.heuristics.placement import place_waves
from solver_plan.wavefront.heuristics.spindle import Wave, waves_of_each_setting
from solver_plan.wavefront.heuristics.stages import staged
from solver_plan.wavefront.infeasible import place_or_explain, refuse_what_cannot_fit
from solver_plan.wavefront.instance import Instance, instance_of
from solver_plan.wavefront.plan import WavefrontPlan
from solver_plan.wavefront.problem import WavefrontProblem
from solver_plan.wavefront.schedule import Schedule, Segment, earliest_times, plan_of, with_devices
from solver_plan.wavefront.search_capacity import CapacitySearch
from solver_plan.wavefront.search_devices import DeviceSearch

log = logging.getLogger(__name__)

BASELINES: dict[str, Callable[[Instance], Schedule]] = {"sequential": sequential, "task-groups": task_groups}
HEURISTICS = (*BASELINES, "spindle", "annealing")
BOUND_SHARE = 0.15
"""Of the budget, at most, for the integer program of the bound."""
BOUND_NODES = 300
SPINDLE_SECONDS_PER_LAYER = 2e-6
"""Deterministic cost of Spindle's planner, per setting, component and component: about what it takes."""
EXPLAIN_SHARE = 0.2
SPINDLE_STARTS = 4
ALLOTTED_STARTS = 3
HOMES = 2
HOMES_SHARE = 0.03
SECONDS_PER_HOME = 5e-6
"""Deterministic cost of a schedule with homes, per piece of work and component: about what it takes."""
LONGEST_LOOK = 6.0
FIRST_LOOK = 0.5
"""Annealing from Spindle's plan before anything that takes longer: a better one is there at once."""


def plan(
    problem: WavefrontProblem, budget: Budget, heuristic: str | None = None, on_progress: Progress = silent
) -> Planned[WavefrontPlan]:
    """Find a plan of a wavefront problem.

    Parameters
    ----------
    problem
        What is to be planned.
    budget
        Limits of the search.
    heuristic
        Only this one of `HEURISTICS`, no solver; None: everything.
    on_progress
        Told of each better plan and bound.

    Raises
    ------
    InfeasibleProblemError
        If no plan fits the memory, with the reason.
    NoPlanFoundError
        If none was found within the budget.
    """
    clock = Clock(budget)
    instance = instance_of(problem)
    refuse_what_cannot_fit(instance)
    incumbent: Incumbent[WavefrontPlan] = Incumbent(partial(evaluate, problem), clock, on_progress)
    with clock.interruptible():
        completed = _search(instance, clock, incumbent, heuristic)
    solver = f"{cp_sat_version()}, {highs_version()}, {budget.worker_count} workers, seed {budget.seed}"
    certificate = incumbent.certificate(solver, completed=completed)
    assert incumbent.plan is not None
    first = next(step.seconds for step in incumbent.trace if step.objective is not None)
    return Planned(
        plan=replace(incumbent.plan, certificate=certificate),
        effort=Effort(wall_s=clock.seconds, deterministic_s=clock.deterministic_seconds, first_plan_s=first),
    )


def _search(instance: Instance, clock: Clock, incumbent: Incumbent[WavefrontPlan], heuristic: str | None) -> bool:
    """Fill the incumbent; True if the search ran to its end rather than into a limit."""
    total = clock.remaining

    def done() -> bool:
        return incumbent.closed or (clock.expired and incumbent.plan is not None)

    def offer(schedule: Schedule, source: str) -> bool:
        return incumbent.offer(plan_of(instance, schedule), source)

    baselines = {name: baseline(instance) for name, baseline in BASELINES.items()}
    for name, schedule in baselines.items():
        if heuristic in (None, name) and fits(instance, schedule):
            offer(schedule, f"heuristic:{name}")
    incumbent.raise_bound(closed_form_bound(instance), "closed-form:area-and-paths")
    if heuristic in BASELINES:
        return True
    if heuristic is None and done():
        return False
    stages = []
    if heuristic is None and instance.memory_limit is not None:
        stages = _fewest_stages(instance, clock)
        for schedule in stages:
            offer(schedule, "heuristic:stages")
    homes = []
    if heuristic in (None, "annealing") and _devices_matter(instance):
        homes = _best_homes(instance, clock, total * HOMES_SHARE)
        for schedule in homes:
            offer(schedule, "heuristic:homes")
    waves = _spindle(instance, clock)
    placed: list[tuple[Schedule, bool]] = []
    for each in waves[: 4 if instance.memory_limit is not None else 1]:
        if placed and clock.expired:
            break
        placed.append(place_waves(instance, each))
        if placed[-1][1]:
            offer(placed[-1][0], "heuristic:spindle")
    if heuristic == "spindle":
        return True
    if done():
        return False
    of_waves = [_list_of(each) for each in waves[:SPINDLE_STARTS]]
    dealt = [*homes, *stages[:1]]
    search = _search_from(instance, clock, incumbent, offer, placed, dealt, of_waves[:1], list(baselines.values()))
    search.first(min(FIRST_LOOK, total * 0.03))
    relaxed = allotment_bound(instance, clock, whole=False)
    if relaxed.value_ms is not None:
        incumbent.raise_bound(relaxed.value_ms, relaxed.source)
    of_program = [segments for _, segments in allotted_lists(instance, clock)[:ALLOTTED_STARTS]]
    lists = [*of_waves[:1], *of_program, *of_waves[1:]]
    if done():
        return False
    search = _search_from(instance, clock, incumbent, offer, placed, dealt, lists, list(baselines.values()))
    search.first(min(LONGEST_LOOK, total * 0.1))
    if incumbent.plan is None and isinstance(search, DeviceSearch):
        placement = place_or_explain(instance, clock, total * EXPLAIN_SHARE)
        if placement is not None:
            search.add_start(placement, "heuristic:least-memory")
    if not _raise_bound_in_time(instance, clock, incumbent, total * BOUND_SHARE):
        whole = allotment_bound(instance, clock, whole=True, limit=total * BOUND_SHARE, node_limit=BOUND_NODES)
        if whole.value_ms is not None:
            incumbent.raise_bound(whole.value_ms, whole.source)
    search.improve(use_solver=heuristic is None)
    return False


def _raise_bound_in_time(instance: Instance, clock: Clock, incumbent: Incumbent[WavefrontPlan], limit: float) -> bool:
    """Raise the bound by programs over buckets of time, few first, as long as that helps; False if it did not."""
    helped = False
    for buckets in BUCKETS if suits_buckets(instance) else ():
        before, objective = incumbent.bound, incumbent.objective
        if incumbent.closed or clock.expired or before is None or objective is None:
            break
        found = bucket_bound(instance, clock, buckets, objective, limit=limit, node_limit=BOUND_NODES)
        if found.value_ms is not None:
            incumbent.raise_bound(found.value_ms, found.source)
        if found.value_ms is None or found.value_ms < before * (1 + WORTH_MORE):
            break
        helped = True
    return helped


def _search_from(
    instance: Instance,
    clock: Clock,
    incumbent: Incumbent[WavefrontPlan],
    offer: Callable[[Schedule, str], bool],
    placed: list[tuple[Schedule, bool]],
    dealt: list[Schedule],
    lists: list[list[Segment]],
    baselines: list[Schedule],
) -> CapacitySearch | DeviceSearch:
    """Return the search that suits the problem: from lists, or where device sets matter from all sorts of schedules."""
    if not _devices_matter(instance):
        return CapacitySearch(instance, clock, incumbent, offer, lists)
    schedules = dealt + [schedule for schedule, _ in placed[:1]]
    schedules += [with_devices(instance, each) for each in lists[:3]]
    return DeviceSearch(instance, clock, incumbent, offer, schedules + baselines)


def _devices_matter(instance: Instance) -> bool:
    return instance.device_sets_matter or instance.two_phases


def _best_homes(instance: Instance, clock: Clock, limit: float) -> list[Schedule]:
    """Return the best schedules in which each layer has its home: those that keep the memory first."""
    found: list[tuple[bool, float, int, Schedule]] = []
    end_at = clock.remaining - limit
    for number, schedule in enumerate(at_home(instance)):
        predicted = plan_of(instance, schedule).predicted
        assert predicted is not None
        fitting = instance.keeps_memory(predicted.device_memory_bytes)
        found.append((not fitting, predicted.makespan_ms, number, schedule))
        clock.spend(SECONDS_PER_HOME * len(schedule.order) * len(instance.layers))
        if clock.remaining < end_at:
            break
    return [schedule for *_, schedule in sorted(found)[:HOMES]]


def _fewest_stages(instance: Instance, clock: Clock) -> list[Schedule]:
    """Return the pipelines of the fewest groups with which any keeps the memory limit, shortest first."""
    for schedules in staged(instance):
        if clock.expired:
            break
        fitting = [schedule for schedule in schedules if fits(instance, schedule)]
        if fitting:
            return sorted(fitting, key=lambda schedule: max(end for _, end in earliest_times(instance, schedule)))
    return []


def fits(instance: Instance, schedule: Schedule) -> bool:
    """Tell whether a schedule keeps the memory limit."""
    if instance.memory_limit is None:
        return True
    predicted = plan_of(instance, schedule).predicted
    assert predicted is not None
    return instance.keeps_memory(predicted.device_memory_bytes)


def _spindle(instance: Instance, clock: Clock) -> list[list[Wave]]:
    """Return Spindle's waves in every setting, shortest first."""
    found: list[list[Wave]] = []
    for waves in waves_of_each_setting(instance):
        found.append(waves)
        clock.spend(SPINDLE_SECONDS_PER_LAYER * len(instance.layers) ** 2)
        if clock.expired:
            break
    found.sort(key=lambda waves: waves[-1].end_ms)
    return found


def _list_of(waves: list[Wave]) -> list[Segment]:
    return [segment for wave in waves for segment in wave.segments]
