import pytest

from solver_plan.wavefront.check import check
from solver_plan.wavefront.heuristics.baselines import sequential, task_groups
from solver_plan.wavefront.heuristics.homes import at_home
from solver_plan.wavefront.instance import instance_of
from solver_plan.wavefront.planner import HOMES, fits, plan
from solver_plan.wavefront.problem import Component, Mode, Phases, WavefrontProblem
from solver_plan.wavefront.schedule import plan_of
from tests.wavefront.test_planner import deterministic
from tests.wavefront.wavefront_problems import MEGA, component, problem, random_problem


def sharing(phases: Phases = "fused") -> WavefrontProblem:
    """Two tasks with the same heavy weights, which take long to sum between nodes."""
    heavy = {"parameters": "vision", "gradient_bytes_per_layer": 40 * MEGA, "output_bytes": MEGA}
    return problem(
        [
            component("one/vision", layers=8, task="one", **heavy),
            component("two/vision", layers=8, task="two", **heavy),
            component("one/text", layers=2, task="one", gradient_bytes_per_layer=MEGA),
            component("two/head", layers=3, task="two", gradient_bytes_per_layer=MEGA),
        ],
        [("two/vision", "two/head")],
        intra=20e9,
        inter=1e9,
        phases=phases,
    )


@pytest.mark.parametrize("phases", ["fused", "forward_backward"])
@pytest.mark.parametrize("seed", range(4))
def test_plans_are_valid_and_every_layer_has_one_home(seed: int, phases: Phases) -> None:
    made = random_problem(seed, components=6, layers=5, bandwidth=True, gradients=True, phases=phases)
    instance = instance_of(made)
    found = list(at_home(instance))
    assert len(found) > HOMES
    for schedule in found:
        assert check(made, plan_of(instance, schedule)) == ()
        nodes: dict[tuple[int, int], set[int]] = {}
        for run in schedule.runs:
            for layer in range(run.first, run.end):
                of_run = {instance.cluster.node_of(device) for device in run.devices}
                nodes.setdefault((instance.parameters[run.component], layer), set()).update(of_run)
        assert all(len(each) == 1 for each in nodes.values())
        # the first set of weights is cut where the groups have their share: work is on both nodes
        assert set().union(*nodes.values()) == {0, 1}


@pytest.mark.parametrize("phases", ["fused", "forward_backward"])
def test_where_sums_between_nodes_are_slow_homes_beat_all_devices_for_everything(phases: Phases) -> None:
    made = sharing(phases)
    instance = instance_of(made)
    predicted = [plan_of(instance, schedule).predicted for schedule in at_home(instance)]
    best = min(each.makespan_ms for each in predicted if each is not None)
    for baseline in (sequential, task_groups):
        other = plan_of(instance, baseline(instance)).predicted
        assert other is not None
        assert best < other.makespan_ms
    planned = plan(made, deterministic(0.5)).plan
    assert planned.certificate is not None
    assert planned.certificate.objective <= best + 1e-9


def test_no_group_to_choose_from_on_one_device_or_for_modes_wider_than_a_node() -> None:
    assert list(at_home(instance_of(problem([component("only")], devices=1, per_node=1)))) == []
    wide = Component(name="wide", task="a", layers=2, modes=(Mode(devices=4, forward_ms=1.0, backward_ms=1.0),))
    made = problem([wide, component("narrow")], intra=20e9, inter=1e9)
    assert list(at_home(instance_of(made))) == []
    assert fits(instance_of(made), sequential(instance_of(made)))
