import dataclasses
import json
import os
from pathlib import Path

import pytest

from solver_plan.documents import document_text
from solver_plan.errors import InfeasibleProblemError
from solver_plan.kinds import kind_named, read_problem
from solver_plan.solving import Budget, Clock
from solver_plan.wavefront.bounds import allotment_bound, closed_form_bound
from solver_plan.wavefront.bounds_in_time import bucket_bound
from solver_plan.wavefront.check import check, examine
from solver_plan.wavefront.claims import refuted_bound
from solver_plan.wavefront.heuristics.baselines import sequential, task_groups
from solver_plan.wavefront.heuristics.placement import place_waves
from solver_plan.wavefront.heuristics.spindle import SETTINGS, Setting, spindle_waves
from solver_plan.wavefront.heuristics.stages import staged
from solver_plan.wavefront.idle import idle_by_cause
from solver_plan.wavefront.instance import instance_of
from solver_plan.wavefront.planner import HEURISTICS, fits, plan
from solver_plan.wavefront.problem import Component, Mode, Phases, WavefrontProblem
from solver_plan.wavefront.schedule import plan_of
from solver_plan.wavefront.simulate import simulate
from tests.wavefront.exhaustive import shortest_makespan
from tests.wavefront.wavefront_problems import MEGA, component, problem, random_problem

DATA = Path(os.environ.get("SOLVER_PLAN_DATA", Path(__file__).parents[3] / "shared" / "data")) / "wavefront"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"reference data not found at {DATA}: set SOLVER_PLAN_DATA")


def deterministic(seconds: float) -> Budget:
    return Budget(time_limit_s=seconds, deterministic=True, workers=1)


def without_seconds(text: str) -> str:
    document = json.loads(text)
    document["certificate"]["seconds"] = 0
    for step in document["certificate"].get("trace", []):
        step["seconds"] = 0
    return json.dumps(document)


@pytest.mark.parametrize("seed", range(4))
def test_small_problems_are_proven_optimal_as_exhaustive_search_confirms(seed: int) -> None:
    made = random_problem(seed, components=3, layers=2 + seed % 2, devices=3 + seed % 2)
    found = plan(made, deterministic(8.0)).plan
    assert found.certificate is not None
    assert found.certificate.status == "optimal"
    exhaustive = shortest_makespan(instance_of(made), found.certificate.objective * 1.001)
    assert found.certificate.objective == pytest.approx(exhaustive, rel=1e-6)


def test_memory_and_transfers_proven_optimal() -> None:
    made = random_problem(1, components=3, layers=2, devices=2, memory=90 * MEGA, bandwidth=True, gradients=True)
    found = plan(made, deterministic(8.0)).plan
    assert found.certificate is not None
    assert found.certificate.status == "optimal"
    assert check(made, found) == ()


@pytest.mark.parametrize(
    "made",
    [
        random_problem(0, components=5),
        random_problem(0, components=5, memory=150 * MEGA, bandwidth=True, gradients=True),
        random_problem(2, components=4, bandwidth=True, phases="forward_backward"),
        problem([component("only")]),
        problem([component("a"), component("b", task="b")], devices=1, per_node=1),
        problem([component("a"), component("b"), component("lonely", task="z")], [("a", "b")]),
        problem(
            [
                Component(name="frozen", task="t", layers=2, modes=(Mode(devices=1, forward_ms=1.0, backward_ms=0.0),)),
                component("head"),
            ],
            [("frozen", "head")],
            phases="forward_backward",
        ),
    ],
    ids=["plain", "everything", "two phases", "one component", "one device", "disconnected", "frozen"],
)
def test_plans_are_valid_bounded_simulated_and_the_same_twice(made: WavefrontProblem) -> None:
    found = plan(made, deterministic(0.25)).plan
    assert found.certificate is not None
    assert found.certificate.bound is not None
    assert check(made, found) == ()
    assert refuted_bound(made, found) == ()
    assert simulate(made, found).makespan_ms == pytest.approx(found.certificate.objective, rel=1e-6)
    idle = idle_by_cause(made, found)
    assert idle.total_ms == pytest.approx(found.certificate.objective * made.cluster.devices, rel=1e-6)
    again = plan(made, deterministic(0.25)).plan
    assert without_seconds(document_text(found)) == without_seconds(document_text(again))


@pytest.mark.parametrize("name", HEURISTICS)
def test_each_heuristic_alone_gives_a_valid_plan(name: str) -> None:
    made = random_problem(3, components=6, bandwidth=True)
    found = plan(made, deterministic(0.5), name).plan
    assert check(made, found) == ()
    assert found.certificate is not None
    assert found.certificate.incumbent == f"heuristic:{name}" or name == "annealing"


def test_an_interrupted_search_returns_the_best_plan() -> None:
    made = random_problem(0, components=12, devices=8)
    seen = []

    def interrupt(step: object) -> None:
        seen.append(step)
        if len(seen) == 3:
            import signal

            signal.raise_signal(signal.SIGINT)

    found = plan(made, Budget(time_limit_s=600.0), on_progress=interrupt).plan
    assert check(made, found) == ()
    assert found.certificate is not None
    assert found.certificate.stopped_by == "interrupt"


def test_one_layer_beyond_the_memory_is_explained() -> None:
    made = problem([component("large", state_bytes_per_layer=100)], memory=60)
    with pytest.raises(InfeasibleProblemError, match=r"one layer of large needs 100 bytes .* 40 bytes more"):
        plan(made, deterministic(1.0))


def test_all_together_beyond_the_memory_is_explained() -> None:
    made = problem([component(name, layers=4, state_bytes_per_layer=50) for name in "abcd"], memory=60)
    with pytest.raises(InfeasibleProblemError, match=r"all 4 devices together have 240 bytes, .* at least 800 bytes"):
        plan(made, deterministic(1.0))


def test_packing_beyond_the_memory_is_explained() -> None:
    # three layers of 60 fit two devices of 100 in sum, but no two fit one
    made = problem(
        [component(name, layers=1, state_bytes_per_layer=60 * MEGA) for name in "abc"],
        memory=100 * MEGA,
        devices=2,
    )
    with pytest.raises(InfeasibleProblemError, match=r"device \d.* 0.120 GB, 0.020 GB more"):
        plan(made, deterministic(3.0))


def test_task_groups_and_sequential_are_what_they_say() -> None:
    made = problem([component("a", task="x"), component("b", task="y")])
    instance = instance_of(made)
    assert {len(run.devices) for run in sequential(instance).runs} == {4}
    groups = [set(run.devices) for run in task_groups(instance).runs]
    assert not groups[0] & groups[1]


@pytest.mark.parametrize("phases", ["fused", "forward_backward"])
def test_stages_where_no_device_holds_all_layers(phases: Phases) -> None:
    sizes = {"parameters": "llm", "state_bytes_per_layer": 10 * MEGA, "activation_bytes_per_layer": 4 * MEGA}
    made = problem(
        [component("a", layers=8, **sizes), component("b", layers=8, task="b", **sizes), component("head", layers=1)],
        [("a", "head")],
        memory=60 * MEGA,
        intra=20e9,
        inter=5e9,
        phases=phases,
    )
    instance = instance_of(made)
    assert not fits(instance, sequential(instance))
    found = [schedule for schedules in staged(instance) for schedule in schedules if fits(instance, schedule)]
    makespans = {plan_of(instance, schedule).predicted.makespan_ms for schedule in found}  # type: ignore[union-attr]
    planned = plan(made, deterministic(0.2)).plan
    assert check(made, planned) == ()
    assert planned.certificate is not None
    assert planned.certificate.objective <= min(makespans)


def test_waves_beyond_all_memory_are_not_placed_within_it() -> None:
    made = problem([component("a", layers=4, state_bytes_per_layer=50)], memory=100)
    instance = instance_of(made)
    waves = spindle_waves(instance, SETTINGS[0])
    assert {segment.choice for wave in waves for segment in wave.segments} == {2}
    assert not place_waves(instance, waves)[1]


def test_spindle_levels_are_barriers() -> None:
    made = problem([component("a"), component("b", layers=9), component("c")], [("a", "c")])
    waves = spindle_waves(instance_of(made), Setting(levels="depth", sort="bigN_bigT", extend=None))
    last_of_first_level = max(w.end_ms for w in waves if any(s.component in (0, 1) for s in w.segments))
    first_of_second = min(w.start_ms for w in waves if any(s.component == 2 for s in w.segments))
    assert first_of_second >= last_of_first_level


@needs_data
@pytest.mark.parametrize("name", ["clip4_16", "clip10_16", "ofasys4_16", "qwen3_32", "random60_64", "small_shared_8"])
def test_against_the_references(name: str) -> None:
    references = json.loads((DATA / "references.json").read_text())[name]
    made = read_problem(str(DATA / f"{name}.json"))
    assert isinstance(made, WavefrontProblem)
    instance = instance_of(made)
    waves = min((spindle_waves(instance, s) for s in SETTINGS), key=lambda w: w[-1].end_ms)
    placed = examine(made, plan_of(instance, place_waves(instance, waves)[0])).predicted
    assert placed is not None
    assert placed.makespan_ms <= references["spindle_ms"] * 1.01
    clock = Clock(deterministic(5.0))
    relaxed = allotment_bound(instance, clock, whole=False).value_ms
    assert relaxed is not None
    assert closed_form_bound(instance) <= relaxed + 1e-6
    assert relaxed >= references["lp_bound_ms"] * (1 - 1e-5)
    assert relaxed <= references["best_known_ms"]
    if len(made.components) <= 20:
        whole = allotment_bound(instance, clock, whole=True, node_limit=300).value_ms
        assert whole is not None
        assert references["bound_ms"] * (1 - 1e-4) <= whole <= references["best_known_ms"]


@pytest.mark.parametrize("seed", range(3))
def test_buckets_of_time_are_below_the_optimum_and_above_the_allotment(seed: int) -> None:
    made = random_problem(seed, components=3, layers=3, devices=4)
    instance = instance_of(made)
    clock = Clock(deterministic(20.0))
    optimum = plan(made, deterministic(8.0)).plan.certificate
    assert optimum is not None
    assert optimum.status == "optimal"
    relaxed = allotment_bound(instance, clock, whole=False).value_ms
    assert relaxed is not None
    for buckets in (3, 8):
        for objective in (optimum.objective, 1.5 * optimum.objective):
            found = bucket_bound(instance, clock, buckets, objective).value_ms
            assert found is not None
            assert relaxed * (1 - 1e-4) <= found <= optimum.objective


@needs_data
def test_buckets_of_time_raise_the_bound_where_there_are_levels() -> None:
    references = json.loads((DATA / "references.json").read_text())["ofasys4_16"]
    made = read_problem(str(DATA / "ofasys4_16.json"))
    assert isinstance(made, WavefrontProblem)
    found = bucket_bound(instance_of(made), Clock(deterministic(20.0)), 8, 78.0, node_limit=300).value_ms
    assert found is not None
    assert references["bound_ms"] * 1.005 <= found <= references["best_known_ms"]


@needs_data
def test_a_short_search_beats_spindle() -> None:
    references = json.loads((DATA / "references.json").read_text())["clip4_16"]
    found = plan(read_problem(str(DATA / "clip4_16.json")), deterministic(1.0)).plan  # type: ignore[arg-type]
    assert found.certificate is not None
    assert found.certificate.objective <= references["best_known_ms"] * 1.02
    assert found.certificate.bound is not None
    assert found.certificate.bound <= references["best_known_ms"]


def test_the_kind_checks_the_bound_too() -> None:
    made = random_problem(0, components=5)
    found = plan(made, deterministic(0.3)).plan
    assert found.certificate is not None
    raised = dataclasses.replace(
        found.certificate, bound=found.certificate.objective, bound_from="lp:allotment", gap=0.0, status="optimal"
    )
    kind = kind_named("wavefront")
    assert kind.check(made, found) == ()
    assert "lp:allotment" in kind.check(made, dataclasses.replace(found, certificate=raised))[0]
