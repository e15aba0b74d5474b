"""Aceso's search: what its primitives do, that it repeats itself, keeps to the space and offers valid plans alone."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.parallelism import MEBIBYTE, chain
from solver_plan.errors import NoPlanFoundError
from solver_plan.parallelism.check import check, evaluate_checked
from solver_plan.parallelism.choices import Choice, MicroBatch, micro_batch, micro_batch_sizes
from solver_plan.parallelism.costs import evaluate
from solver_plan.parallelism.costs.recompute import saved_and_peak
from solver_plan.parallelism.heuristics.aceso import AcesoSearch, aceso_search
from solver_plan.parallelism.heuristics.aceso import search as search_module
from solver_plan.parallelism.heuristics.aceso.configuration import (
    Configuration,
    Run,
    clipped,
    even_device_counts,
    extended,
    plan_of,
    rewritten,
)
from solver_plan.parallelism.heuristics.aceso.fine_tune import fine_tuned
from solver_plan.parallelism.heuristics.aceso.pipeline import Evaluated, Pipelines
from solver_plan.parallelism.heuristics.aceso.primitives import PRIMITIVES, Primitive, spare_time
from solver_plan.parallelism.heuristics.aceso.ranking import ordered_groups
from solver_plan.parallelism.heuristics.aceso.recompute import greedy_recompute, recompute_rules
from solver_plan.parallelism.heuristics.aceso.search import MOST_EXPANSIONS, StageCountSearch
from solver_plan.parallelism.heuristics.aceso.stage_costs import INTER, INTRA, AcesoStageCosts
from solver_plan.parallelism.kind import PARALLELISM
from solver_plan.parallelism.plan import ParallelismPlan
from solver_plan.parallelism.problem import ParallelismProblem, Profile
from solver_plan.profiles.aceso import import_aceso
from solver_plan.solving import Budget, Clock, Incumbent

ROOMY = 8000 * MEBIBYTE
TIGHT = 1200 * MEBIBYTE
BY_NAME = {primitive.name: primitive for primitive in PRIMITIVES}


def tiny(*, blocks: int = 4, devices: int = 4, memory_bytes: int = ROOMY, global_batch: int = 16) -> ParallelismProblem:
    return chain(Path(), blocks=blocks, devices=devices, memory_bytes=memory_bytes, global_batch=global_batch)


def two_partitions() -> ParallelismProblem:
    """Return a problem with a layout per operator and a partition 1 that is better for every second kind."""
    problem = tiny()
    faster = {"embedding": 1.3, "attention": 0.8, "mlp": 1.2, "head": 0.7}

    def flipped(kind: str, entry: Profile) -> Profile:
        factor = faster[kind]
        return replace(entry, partition=1, forward_ms=entry.forward_ms * factor, backward_ms=entry.backward_ms * factor)

    profiles = {
        kind: (*entries, *(flipped(kind, entry) for entry in entries)) for kind, entries in problem.profiles.items()
    }
    return replace(problem, profiles=profiles, space=replace(problem.space, layout="operator"))


def batches_of(problem: ParallelismProblem) -> list[MicroBatch]:
    found = [micro_batch(problem, size) for size in micro_batch_sizes(problem)]
    return [batch for batch in found if batch.choices]


def pipelines_of(problem: ParallelismProblem) -> Pipelines:
    batches = batches_of(problem)
    return Pipelines(problem, batches, AcesoStageCosts(problem, batches))


def configured(pipelines: Pipelines, batch: int, stages: Sequence[tuple[int, int, int]]) -> Evaluated:
    """Return a configuration from a micro-batch size and (end, tensor parallel, data parallel) of each stage."""
    size = [entry.size for entry in pipelines.batches].index(batch)
    numbers = {costs.choice: number for number, costs in enumerate(pipelines.batches[size].choices)}
    layouts, first = [], 0
    for end, tensor, data in stages:
        layouts.append((Run(first, end, numbers[Choice(tensor, data, 0)]),))
        first = end
    found = pipelines.evaluate(Configuration(size, tuple(layouts)))
    assert found is not None
    return found


def document(pipelines: Pipelines, evaluated: Evaluated) -> ParallelismPlan:
    marks = pipelines.marks(evaluated.configuration)
    return plan_of(pipelines.problem, pipelines.batches, evaluated.configuration, marks)


def search(
    problem: ParallelismProblem, limit: int | None = None, budget: Budget | None = None
) -> tuple[AcesoSearch, list[ParallelismPlan], Incumbent[ParallelismPlan]]:
    clock = Clock(budget or Budget(time_limit_s=5.0, deterministic=True))
    incumbent: Incumbent[ParallelismPlan] = Incumbent(lambda p: evaluate_checked(problem, p).iteration_ms, clock)
    offered = []

    def offer(plan: ParallelismPlan, source: str) -> bool:
        offered.append(plan)
        return incumbent.offer(plan, source)

    found = AcesoSearch(problem, batches_of(problem), clock, offer, limit)
    found.run()
    return found, offered, incumbent


# -- configurations -------------------------------------------------------------------------------------------------


def test_runs_are_cut_joined_and_rewritten() -> None:
    layout = (Run(2, 5, 0), Run(5, 9, 1))
    assert clipped(layout, 3, 9) == (Run(3, 5, 0), Run(5, 9, 1))
    assert clipped(layout, 2, 5) == (Run(2, 5, 0),)
    assert extended(layout, 0, 11) == (Run(0, 5, 0), Run(5, 11, 1))
    assert extended((Run(2, 5, 0),), 1, 6) == (Run(1, 6, 0),)
    assert rewritten(layout, 4, 6, 2) == (Run(2, 4, 0), Run(4, 6, 2), Run(6, 9, 1))
    assert rewritten(layout, 2, 5, 1) == (Run(2, 9, 1),)


@pytest.mark.parametrize(
    ("nodes", "stages", "counts"),
    [(1, 1, (4,)), (1, 3, (2, 1, 1)), (2, 3, (4, 2, 2)), (2, 5, (2, 2, 2, 1, 1)), (1, 5, None)],
)
def test_devices_are_split_evenly_within_nodes(nodes: int, stages: int, counts: tuple[int, ...] | None) -> None:
    problem = tiny()
    cluster = replace(problem.cluster, nodes=nodes)
    problem = replace(problem, cluster=cluster, space=replace(problem.space, device_counts=(1, 2, 4)))
    assert even_device_counts(problem, stages) == counts


def test_the_start_is_balanced_tensor_parallel_and_of_the_smallest_micro_batch() -> None:
    pipelines = pipelines_of(tiny())
    start = pipelines.start(2)
    assert start is not None
    plan = document(pipelines, start)
    assert plan.micro_batch_size == 1
    assert [stage.operators for stage in plan.stages] == [(0, 5), (5, 10)]
    assert [(stage.layout[0].tensor_parallel, stage.layout[0].data_parallel) for stage in plan.stages] == [(2, 1)] * 2


# -- evaluation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory_bytes", [ROOMY, TIGHT, 900 * MEBIBYTE])
def test_stages_cost_what_the_cost_model_says(memory_bytes: int) -> None:
    pipelines = pipelines_of(tiny(memory_bytes=memory_bytes))
    options = [
        configured(pipelines, 4, [(4, 1, 2), (10, 2, 1)]),
        configured(pipelines, 2, [(2, 1, 1), (5, 1, 1), (10, 1, 2)]),
        configured(pipelines, 4, [(3, 1, 1), (6, 1, 1), (8, 1, 1), (10, 1, 1)]),
    ]
    for evaluated in options:
        expected = evaluate(pipelines.problem, document(pipelines, evaluated))
        assert evaluated.iteration_ms == pytest.approx(expected.iteration_ms, rel=1e-12)
        for trial, cost in zip(evaluated.stages, expected.stages, strict=True):
            assert trial.time_ms == pytest.approx(cost.stage_ms, rel=1e-12)
            assert trial.memory_bytes == pytest.approx(cost.memory_bytes, abs=0.01)
            assert trial.recompute_ms == pytest.approx(cost.recompute_ms, rel=1e-12)
            assert trial.fits == (cost.memory_bytes <= memory_bytes)


@pytest.mark.parametrize(("model", "size", "batch"), [("resnet", "500M", 256), ("gpt", "1_3B", 64), ("t5", "770M", 64)])
def test_stages_of_measured_models_cost_what_the_cost_model_says(data: Path, model: str, size: str, batch: int) -> None:
    problem = import_aceso(
        data / "aceso" / "miniset",
        model=model,
        size=size,
        nodes=1,
        devices_per_node=4,
        memory_mb=6000,
        global_batch=batch,
    )
    pipelines = pipelines_of(problem)
    generator = np.random.default_rng(3)
    compared = mixed = recomputed = 0
    operators = len(problem.operators)
    for _ in range(60):
        size_number = int(generator.integers(len(pipelines.batches)))
        choices = [
            number for number, costs in enumerate(pipelines.batches[size_number].choices) if costs.choice.devices == 2
        ]
        if not choices:
            continue
        cut = int(generator.integers(2, operators - 2))
        stages = []
        for first, end in ((0, cut), (cut, operators)):
            layout = (Run(first, end, int(generator.choice(choices))),)
            if problem.space.layout == "operator":
                begin = int(generator.integers(first, end - 1))
                layout = rewritten(
                    layout, begin, int(generator.integers(begin + 1, end)), int(generator.choice(choices))
                )
            stages.append(layout)
        evaluated = pipelines.evaluate(Configuration(size_number, tuple(stages)))
        if evaluated is None:
            continue
        expected = evaluate(problem, document(pipelines, evaluated))
        assert evaluated.iteration_ms == pytest.approx(expected.iteration_ms, rel=1e-9)
        for trial, cost in zip(evaluated.stages, expected.stages, strict=True):
            assert trial.memory_bytes == pytest.approx(cost.memory_bytes, abs=1.0)
        compared += 1
        mixed += any(len(layout) > 1 for layout in stages)
        recomputed += any(trial.recompute_ms > 0 for trial in evaluated.stages)
    assert compared > 10
    assert recomputed > 2
    assert mixed > 5 or problem.space.layout == "stage"


def test_edges_between_nodes_are_told() -> None:
    problem = tiny()
    problem = replace(problem, cluster=replace(problem.cluster, nodes=2, devices_per_node=2))
    pipelines = pipelines_of(problem)
    three = configured(pipelines, 1, [(3, 1, 1), (6, 1, 1), (10, 2, 1)])
    places = pipelines.places(three.configuration.size, three.configuration.stages)
    assert places is not None
    assert [(place.receives_over, place.sends_over) for place in places] == [
        (INTRA, INTRA),
        (INTRA, INTER),
        (INTER, INTER),
    ]
    assert [place.behind for place in places] == [2, 1, 0]
    crossing = (three.configuration.stages[0], three.configuration.stages[2], three.configuration.stages[1])
    assert pipelines.places(three.configuration.size, crossing) is None


# -- recomputation --------------------------------------------------------------------------------------------------


def first_step_that_fits(
    problem: ParallelismProblem, first: int, held: list[float], in_flight: int, excess: float
) -> tuple[list[bool], float]:
    """Mark operator by operator as Aceso does, and evaluate after each."""
    operators = problem.operators[first : first + len(held)]
    totals: dict[str, float] = {}
    for operator, size in zip(operators, held, strict=True):
        totals[operator.profile] = totals.get(operator.profile, 0.0) + size
    marks = [False] * len(held)
    starts, shares = [o.block_start for o in operators], [o.activation_factor != 1 for o in operators]
    for name in sorted(totals, key=lambda name: -totals[name]):
        for k, operator in enumerate(operators[:-1]):
            if operator.profile != name or operator.block_start or name == "embedding" or held[k] == 0:
                continue
            marks[k] = marks[k + 1] = True
            saved, peak = saved_and_peak(marks, held, starts, shares)
            if excess - in_flight * saved + peak <= 0:
                return marks, peak
    return marks, saved_and_peak(marks, held, starts, shares)[1]


@pytest.mark.parametrize("seed", range(20))
def test_recomputation_stops_at_the_first_step_that_fits(seed: int) -> None:
    generator = np.random.default_rng(seed)
    problem = tiny(blocks=6)
    names = ["ln", "a", "b", "c"]
    operators = []
    for number, operator in enumerate(problem.operators):
        name = names[number % 4] if operator.profile != "embedding" else "embedding"
        operators.append(
            replace(
                operator,
                name=f"{name}{number}",
                profile=name,
                block_start=name == "ln",
                activation_factor=1.5 if name == "b" else 1.0,
            )
        )
    profiles = {name: problem.profiles["mlp"] for name in (*names, "embedding")}
    problem = replace(problem, operators=tuple(operators), profiles=profiles)
    first, end = 1, len(operators) - int(generator.integers(0, 4))
    held = [float(generator.integers(0, 9)) for _ in range(first, end)]
    in_flight = int(generator.integers(1, 5))
    excess = float(generator.uniform(0.1, 1.1)) * sum(held) * in_flight
    found = greedy_recompute(recompute_rules(problem), first, np.array(held), in_flight, excess)
    marks, peak = first_step_that_fits(problem, first, held, in_flight, excess)
    assert found.peak_bytes == peak
    assert (
        found.saved_bytes
        == saved_and_peak(
            found.marks.tolist(),
            held,
            [operator.block_start for operator in operators[first:end]],
            [operator.activation_factor != 1 for operator in operators[first:end]],
        )[0]
    )
    assert found.marks.tolist() == marks


# -- primitives -----------------------------------------------------------------------------------------------------


def applied(pipelines: Pipelines, current: Evaluated, name: str, target: int) -> list[Evaluated]:
    found = BY_NAME[name].apply(pipelines, current, target, set())
    evaluated = [pipelines.evaluate(configuration) for configuration in found]
    assert all(entry is not None for entry in evaluated)
    return [entry for entry in evaluated if entry is not None]


def sign(after: float, before: float) -> int:
    return int(math.copysign(1, after - before)) if abs(after - before) > 1e-9 * abs(before) else 0


STARTS = {
    "dec_op": (1, [(7, 1, 1), (8, 1, 1), (9, 1, 1), (10, 1, 1)], 0),
    "inc_dp": (4, [(5, 1, 1), (7, 1, 1), (10, 2, 1)], 0),
    "dec_dp": (4, [(5, 1, 2), (7, 1, 1), (10, 1, 1)], 0),
    "inc_tp": (4, [(5, 1, 1), (7, 1, 1), (10, 2, 1)], 0),
    "dec_tp": (4, [(5, 2, 1), (7, 1, 1), (10, 1, 1)], 0),
    "inc_mbs": (1, [(5, 1, 1), (10, 1, 1)], 0),
    "dec_mbs": (2, [(5, 1, 1), (10, 1, 1)], 0),
    "inc_tp_dec_dp": (4, [(5, 1, 2), (10, 1, 2)], 0),
    "inc_dp_dec_tp": (4, [(5, 2, 1), (10, 2, 1)], 0),
}


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_a_primitive_does_what_its_table_says(name: str) -> None:
    batch, stages, target = STARTS[name]
    devices = sum(tensor * data for _, tensor, data in stages)
    pipelines = pipelines_of(tiny(devices=devices))
    current = configured(pipelines, batch, stages)
    primitive = BY_NAME[name]
    results = applied(pipelines, current, name, target)
    assert results
    for after in results:
        assert sum(stage.devices for stage in after.stages) == devices
        assert [layout[0].first for layout in after.configuration.stages[1:]] == [
            layout[-1].end for layout in after.configuration.stages[:-1]
        ]
        old, new = current.stages[target], after.stages[target]
        assert sign(new.devices, old.devices) == primitive.devices
        assert sign(new.memory_bytes, old.memory_bytes) == primitive.memory
        # the time for all samples of the batch, since inc_mbs and dec_mbs change what a micro-batch is
        counts = [pipelines.batches[entry.configuration.size].count for entry in (current, after)]
        assert sign(new.time_ms * counts[1], old.time_ms * counts[0]) == primitive.time
        if name != "dec_op":
            device_ms = [entry.busy_ms * entry.devices * count for entry, count in zip((old, new), counts, strict=True)]
            assert sign(device_ms[0], device_ms[1]) == primitive.efficiency


def test_operators_move_along_all_stages_between_and_only_as_far_as_needed() -> None:
    pipelines = pipelines_of(tiny())
    current = configured(pipelines, 1, [(4, 1, 1), (6, 1, 1), (8, 1, 1), (10, 1, 1)])
    assert current.bottlenecks()[0] == 0
    results = applied(pipelines, current, "dec_op", 0)
    assert results
    for after in results:
        assert max(s.time_ms for s in after.stages) < current.stages[0].time_ms


def test_a_primitive_tries_the_next_partner_the_next_time() -> None:
    pipelines = pipelines_of(tiny())
    current = configured(pipelines, 1, [(6, 1, 1), (8, 1, 1), (9, 1, 1), (10, 1, 1)])
    order = sorted(range(1, 4), key=lambda stage: -spare_time(current, stage))
    tried: set[int] = set()
    BY_NAME["dec_op"].apply(pipelines, current, 0, tried)
    assert tried == {order[0]}
    BY_NAME["dec_op"].apply(pipelines, current, 0, tried)
    assert tried == set(order[:2])


def test_idle_devices_are_taken_first_and_may_be_left_idle() -> None:
    problem = tiny()
    problem = replace(problem, space=replace(problem.space, use_all_devices=False))
    pipelines = pipelines_of(problem)
    idle = configured(pipelines, 4, [(5, 1, 1), (10, 1, 1)])
    (taken,) = applied(pipelines, idle, "inc_dp", 0)
    assert [stage.devices for stage in taken.stages] == [2, 1]
    (left,) = applied(pipelines, taken, "dec_dp", 0)
    assert left.configuration == idle.configuration


# -- ranking --------------------------------------------------------------------------------------------------------


def test_where_memory_does_not_suffice_only_what_lowers_it_is_tried() -> None:
    pipelines = pipelines_of(tiny(memory_bytes=300 * MEBIBYTE))
    start = pipelines.start(2)
    assert start is not None
    assert not start.fits
    memory = [stage.memory_bytes for stage in start.stages]
    assert start.bottlenecks()[0] == memory.index(max(memory))
    (group,) = ordered_groups(start, 0)
    assert {primitive.name for primitive in group} == {"dec_op", "inc_dp", "inc_tp", "dec_mbs", "inc_tp_dec_dp"}


def test_every_primitive_has_its_turn_once_the_fitting_ones_first() -> None:
    pipelines = pipelines_of(tiny())
    current = configured(pipelines, 1, [(7, 1, 1), (8, 1, 1), (9, 1, 1), (10, 1, 1)])
    groups = ordered_groups(current, current.bottlenecks()[0])
    names = [primitive.name for group in groups for primitive in group]
    assert sorted(names) == sorted(BY_NAME)
    # most of the work lies on this stage: what lowers its time comes first
    assert all(primitive.time < 0 for primitive in groups[0])


# -- fine-tuning ----------------------------------------------------------------------------------------------------


def test_fine_tuning_finds_the_better_partition_of_every_operator() -> None:
    problem = two_partitions()
    one_device = replace(problem, cluster=replace(problem.cluster, devices_per_node=1))
    pipelines = pipelines_of(one_device)
    current = configured(pipelines, 1, [(10, 1, 1)])
    *_, tuned = fine_tuned(pipelines, current)
    plan = document(pipelines, tuned)
    partitions = [layout.partition for layout in plan.stages[0].layout for _ in range(*layout.operators)]
    assert partitions == [int(o.profile in ("attention", "head")) for o in one_device.operators]
    assert tuned.iteration_ms < current.iteration_ms
    assert check(one_device, plan) == ()


def test_fine_tuning_changes_stages_as_a_whole_where_they_have_one_layout() -> None:
    problem = two_partitions()
    problem = replace(problem, space=replace(problem.space, layout="stage"))
    pipelines = pipelines_of(problem)
    current = configured(pipelines, 4, [(5, 2, 1), (10, 2, 1)])
    for tuned in fine_tuned(pipelines, current):
        assert all(len(layout) == 1 for layout in tuned.configuration.stages)
        assert tuned.order < current.order


# -- the search -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory_bytes", [ROOMY, 1800 * MEBIBYTE])
def test_the_search_improves_over_its_starts_and_offers_valid_plans_alone(memory_bytes: int) -> None:
    problem = tiny(memory_bytes=memory_bytes)
    found, offered, incumbent = search(problem)
    starts = [found.pipelines.start(stages) for stages in range(1, 5)]
    best_start = min(start.iteration_ms for start in starts if start is not None and start.fits)
    assert incumbent.objective is not None
    assert found.best is not None
    assert incumbent.objective < best_start
    assert incumbent.objective == pytest.approx(found.best.iteration_ms, rel=1e-9)
    assert all(check(problem, plan) == () for plan in offered)
    times = [evaluate(problem, plan).iteration_ms for plan in offered]
    assert times == sorted(times, reverse=True)


def test_nothing_is_offered_where_nothing_fits() -> None:
    _, offered, incumbent = search(tiny(memory_bytes=100 * MEBIBYTE))
    assert offered == []
    with pytest.raises(NoPlanFoundError):
        incumbent.certificate("test", completed=True)


def test_no_configuration_is_looked_at_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    expanded: dict[Configuration, Evaluated] = {}

    def watched(current: Evaluated, stage: int) -> list[list[Primitive]]:
        # the same configuration, generated on two ways, would be another object
        assert expanded.setdefault(current.configuration, current) is current
        return ordered_groups(current, stage)

    monkeypatch.setattr(search_module, "ordered_groups", watched)
    problem = tiny()
    clock = Clock(Budget(time_limit_s=1000.0))
    owner = AcesoSearch(problem, batches_of(problem), clock, lambda plan, source: True)
    alone = StageCountSearch(owner, 3)
    for _ in alone.steps():
        pass
    assert 20 < len(expanded) <= len(alone.seen)
    assert max(evaluated.expansions for evaluated in expanded.values()) <= MOST_EXPANSIONS + problem.cluster.devices


def test_a_search_repeats_itself() -> None:
    budget = Budget(time_limit_s=0.5, deterministic=True)
    problem = tiny(blocks=6, memory_bytes=TIGHT)
    first, offered, _ = search(problem, budget=budget)
    second, again, _ = search(problem, budget=budget)
    assert offered == again
    assert first.costs.evaluations == second.costs.evaluations


def test_evaluations_and_time_are_limits() -> None:
    problem = tiny(blocks=8)
    clock = Clock(Budget(time_limit_s=1000.0))
    outcome = aceso_search(problem, batches_of(problem), clock, lambda plan, source: True, evaluation_limit=100)
    assert outcome.completed
    assert 100 <= outcome.evaluations < 600
    short = Clock(Budget(time_limit_s=0.05, deterministic=True))
    outcome = aceso_search(problem, batches_of(problem), short, lambda plan, source: True)
    assert not outcome.completed


@pytest.mark.parametrize(
    "restriction",
    [
        {"max_stages": 2},
        {"device_counts": (2,)},
        {"device_counts": (1, 3)},
        {"micro_batch_sizes": (2,)},
        {"recompute": "none"},
        {"recompute": "block"},
        {"use_all_devices": False},
        {"cross_node_stages": True},
        {"partitions": (1,)},
        {"partitions": (0,), "layout": "stage"},
    ],
)
@pytest.mark.parametrize("nodes", [1, 2])
def test_plans_keep_to_the_space(restriction: dict[str, object], nodes: int) -> None:
    problem = two_partitions()
    cluster = replace(
        problem.cluster, nodes=nodes, devices_per_node=4 // nodes, memory_bytes_per_device=1800 * MEBIBYTE
    )
    problem = replace(problem, cluster=cluster, space=replace(problem.space, **restriction))  # type: ignore[arg-type]
    _, offered, incumbent = search(problem, limit=1500)
    assert all(check(problem, plan) == () for plan in offered)
    if nodes == 2 and restriction == {"device_counts": (1, 3)}:
        assert all(len(stage.devices) == 1 for plan in offered for stage in plan.stages)
    assert incumbent.plan is not None


def test_the_command_lines_heuristic_is_this_search_alone() -> None:
    problem = tiny(blocks=2, devices=2)
    planned = PARALLELISM.plan(problem, Budget(time_limit_s=5.0, deterministic=True), heuristic="aceso")
    certificate = planned.plan.certificate
    assert certificate is not None
    assert certificate.incumbent == "heuristic:aceso"
    assert certificate.stopped_by == "completed"
    assert certificate.bound is None
    assert PARALLELISM.check(problem, planned.plan) == ()
    cut = PARALLELISM.plan(tiny(blocks=8), Budget(time_limit_s=0.1, deterministic=True), heuristic="aceso")
    assert cut.plan.certificate is not None
    assert cut.plan.certificate.stopped_by == "deterministic_time"


def test_it_comes_below_the_published_plan(data: Path) -> None:
    problem = import_aceso(
        data / "aceso" / "miniset",
        model="gpt",
        size="1_3B",
        nodes=1,
        devices_per_node=4,
        memory_mb=12000,
        global_batch=512,
    )
    _, _, incumbent = search(problem, limit=2500, budget=Budget(time_limit_s=1000.0))
    assert incumbent.objective is not None
    assert incumbent.objective < 58_761 * 1.01
