"""Proofs where device sets matter: the program over device sets against brute force and against the other program."""

import itertools

import pytest

from solver_plan.solving import Budget, Clock
from solver_plan.solving.cp_sat import solve_cp_sat
from solver_plan.wavefront.check import check
from solver_plan.wavefront.heuristics.baselines import sequential, task_groups
from solver_plan.wavefront.instance import Instance, instance_of
from solver_plan.wavefront.model.device_sets import DeviceSetModel
from solver_plan.wavefront.model.devices import DeviceModel
from solver_plan.wavefront.model.pieces import whole_problem
from solver_plan.wavefront.model.slices import SliceModel
from solver_plan.wavefront.planner import plan
from solver_plan.wavefront.problem import Component, Mode, Phases, WavefrontProblem
from solver_plan.wavefront.schedule import Run, Schedule, plan_of
from tests.wavefront.wavefront_problems import MEGA, problem, random_problem


def proven(built: DeviceSetModel | DeviceModel | SliceModel, instance: Instance) -> tuple[float, float]:
    """Return the bound, and the objective of the plan."""
    outcome = solve_cp_sat(built.model, Clock(Budget(time_limit_s=30.0, deterministic=True, workers=1)))
    assert outcome.status == "optimal"
    assert outcome.bound is not None
    assert outcome.values is not None
    found = plan_of(instance, built.read(outcome.values))
    assert check(instance.problem, found) == ()
    assert found.predicted is not None
    return outcome.bound / built.fineness * (1 - 1e-12), found.predicted.makespan_ms


def all_sets(instance: Instance, horizon_ms: float) -> DeviceSetModel:
    return DeviceSetModel(instance, whole_problem(instance, sequential(instance)), horizon_ms)


def shortest_by_brute_force(instance: Instance) -> float:
    """Return the least objective: every device set of every layer, in every order of the components' chains."""
    chains = [(c, layer) for c in instance.components for layer in range(instance.layers[c])]
    options = [
        [
            (k, devices)
            for k, choice in enumerate(instance.choices[c])
            for devices in itertools.combinations(range(instance.devices), choice.devices)
        ]
        for c, _ in chains
    ]
    orders = set(itertools.permutations([c for c, _ in chains]))
    best = float("inf")
    for chosen in itertools.product(*options):
        runs = tuple(Run(c, at, at + 1, k, devices) for (c, at), (k, devices) in zip(chains, chosen, strict=True))
        for order in orders:
            numbers = {c: iter([i for i, (other, _) in enumerate(chains) if other == c]) for c in instance.components}
            predicted = plan_of(instance, Schedule(runs, tuple(next(numbers[c]) for c in order))).predicted
            assert predicted is not None
            limit = instance.memory_limit
            if limit is None or max(predicted.device_memory_bytes) <= limit:
                best = min(best, predicted.makespan_ms)
    return best


@pytest.mark.parametrize(("seed", "memory"), [(0, 70 * MEGA), (1, None)])
def test_brute_force_confirms(seed: int, memory: int | None) -> None:
    made = random_problem(seed, components=2, layers=2, devices=2, memory=memory, bandwidth=True, gradients=True)
    instance = instance_of(made)
    shortest = shortest_by_brute_force(instance)
    bound, objective = proven(all_sets(instance, 2 * shortest), instance)
    assert objective == pytest.approx(shortest, rel=1e-6)
    assert bound == pytest.approx(shortest, rel=1e-6)


@pytest.mark.parametrize(
    ("seed", "devices", "memory", "phases"),
    [(0, 3, 75 * MEGA, "fused"), (2, 4, None, "fused"), (3, 2, None, "forward_backward")],
)
def test_the_other_program_confirms(seed: int, devices: int, memory: int | None, phases: Phases) -> None:
    made = random_problem(
        seed, components=2, layers=2, devices=devices, memory=memory, bandwidth=True, gradients=memory is None,
        phases=phases,
    )  # fmt: skip
    instance = instance_of(made)
    start = sequential(instance)
    predicted = plan_of(instance, start).predicted
    assert predicted is not None
    horizon = 2 * predicted.makespan_ms
    bound, objective = proven(all_sets(instance, horizon), instance)
    other_bound, other = proven(DeviceModel(instance, whole_problem(instance, start), horizon), instance)
    assert objective == pytest.approx(other, rel=1e-5)
    assert bound == pytest.approx(objective, rel=1e-6)
    assert other_bound <= objective * (1 + 1e-6)


def sharded_problem() -> WavefrontProblem:
    """Two components with the same weights, whose wide mode holds half of their state."""
    modes = (
        Mode(devices=1, forward_ms=2.0, backward_ms=4.0, state_bytes_per_layer=10 * MEGA, activation_bytes_per_layer=5),
        Mode(devices=2, forward_ms=1.2, backward_ms=2.6, state_bytes_per_layer=5 * MEGA, activation_bytes_per_layer=3),
    )
    made = [
        Component(name=name, task=name, layers=2, modes=modes, parameters="w", output_bytes=10 * MEGA) for name in "ab"
    ]
    return problem(made, devices=2, memory=15 * MEGA, intra=20e9, inter=5e9)


@pytest.mark.parametrize(
    "made",
    [
        random_problem(0, components=2, layers=2, devices=2, memory=75 * MEGA, bandwidth=True, gradients=True),
        random_problem(3, components=3, layers=2, devices=2, bandwidth=True, phases="forward_backward"),
        sharded_problem(),
    ],
    ids=["memory and reductions", "two phases", "sharded state"],
)
def test_two_slices_of_two_layers_are_every_plan(made: WavefrontProblem) -> None:
    instance = instance_of(made)
    start = sequential(instance)
    predicted = plan_of(instance, start).predicted
    assert predicted is not None
    _, objective = proven(all_sets(instance, predicted.makespan_ms), instance)
    _, found = proven(SliceModel(instance, start, objective * 1.001, frozenset(instance.components)), instance)
    assert objective * (1 - 1e-9) <= found <= objective * 1.02  # its ticks are coarse


def test_components_that_are_not_free_keep_their_slices() -> None:
    instance = instance_of(random_problem(5, components=4, memory=170 * MEGA, bandwidth=True, gradients=True))
    start = task_groups(instance)
    predicted = plan_of(instance, start).predicted
    assert predicted is not None
    built = SliceModel(instance, start, predicted.makespan_ms, frozenset({1, 3}))
    _, found = proven(built, instance)
    assert found < predicted.makespan_ms
    outcome = solve_cp_sat(built.model, Clock(Budget(time_limit_s=30.0, deterministic=True, workers=1)))
    assert outcome.values is not None
    kept = {run for run in start.runs if run.component in (0, 2)}
    assert kept <= set(built.read(outcome.values).runs)


def test_nine_layers_on_four_devices_with_everything_are_proven_optimal() -> None:
    made = random_problem(0, components=3, layers=3, devices=4, memory=110 * MEGA, bandwidth=True, gradients=True)
    found = plan(made, Budget(time_limit_s=12.0, deterministic=True, workers=1)).plan
    assert found.certificate is not None
    assert found.certificate.status == "optimal"
    assert check(made, found) == ()
