"""Playing plans, with jitter or without; the least period of an order; timelines as pictures."""

import dataclasses
import random
import xml.etree.ElementTree as ElementTree

import pytest

from solver_plan.errors import InputError, InvalidPlanError
from solver_plan.offload.assemble import Candidate, plan_document
from solver_plan.offload.curve import period_over_room
from solver_plan.offload.describe import describe
from solver_plan.offload.flow import Rule, orders_of, run_orders, run_rule
from solver_plan.offload.operations import Placement, all_on, iteration_of, precedences_of
from solver_plan.offload.retiming import Arc, least_period, retime
from solver_plan.offload.simulate import replay
from solver_plan.offload.streaming import Calendar, at_once, best_layout
from solver_plan.report.offload_curve import curve_svg, curve_table
from solver_plan.report.offload_gantt import offload_gantt_svg
from solver_plan.report.page import page
from solver_plan.solving.budget import Budget
from tests.offload.offload_cases import make_plan, make_problem, with_period

PLACEMENTS: tuple[Placement, ...] = (("cpu", "cpu", "cpu"), ("gpu", "cpu", "cpu"), ("cpu", "gpu", "cpu"))


def test_a_cycle_ratio_by_hand() -> None:
    # 0 -> 1 -> 0 takes 5 + 7 around one period; 1 -> 2 -> 1 takes 7 + 20 around two
    arcs = [Arc(0, 1, 5.0, 0), Arc(1, 0, 7.0, 1), Arc(1, 2, 7.0, 1), Arc(2, 1, 20.0, 1)]
    solved = least_period(3, arcs, 0.0)
    assert solved is not None
    starts_ms, period_ms, critical = solved
    assert period_ms == pytest.approx(13.5)
    assert {arc.before for arc in critical.arcs} == {1, 2}
    for arc in arcs:
        assert starts_ms[arc.after] + arc.height * period_ms >= starts_ms[arc.before] + arc.weight_ms - 1e-9
    assert least_period(2, [Arc(0, 1, 1.0, 0), Arc(1, 0, 1.0, 0)], 0.0) is None


@pytest.mark.parametrize("seed", range(5))
def test_the_cycle_ratio_is_the_largest_over_all_simple_cycles(seed: int) -> None:
    import networkx

    draws = random.Random(seed)
    count = 6
    arcs = [Arc(node, node + 1, draws.uniform(1, 9), 0) for node in range(count - 1)]
    arcs += [
        Arc(draws.randrange(count), draws.randrange(count), draws.uniform(1, 9), draws.choice((1, 1, 2)))
        for _ in range(8)
    ]
    graph = networkx.MultiDiGraph()
    for arc in arcs:
        graph.add_edge(arc.before, arc.after, arc=arc)
    ratios = []
    for cycle in networkx.simple_cycles(networkx.DiGraph(graph)):
        pairs = list(zip(cycle, [*cycle[1:], cycle[0]], strict=True))

        def extend(index: int, weight: float, height: int, pairs: list[tuple[int, int]] = pairs) -> None:
            if index == len(pairs):
                ratios.append(weight / height)
                return
            for data in graph.get_edge_data(*pairs[index]).values():
                extend(index + 1, weight + data["arc"].weight_ms, height + data["arc"].height)

        extend(0, 0.0, 0)
    solved = least_period(count, arcs, 0.0)
    assert solved is not None
    assert solved[1] == pytest.approx(max(ratios, default=0.0))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("clip", [False, True])
def test_both_ways_to_the_least_period_agree_without_streaming(placement: Placement, clip: bool) -> None:
    problem = make_problem(room=240, chunks=2, clip=clip, accumulation=2)
    orders, timing = run_rule(problem, placement, Rule())
    iteration = iteration_of(problem, placement)
    assert orders_of(iteration, timing.starts_ms) == orders
    assert run_orders(problem, placement, orders).period_ms == pytest.approx(timing.period_ms)
    retimed = retime(problem, iteration, precedences_of(problem, iteration), timing)
    assert retimed is not None
    assert retimed[0].period_ms == pytest.approx(timing.period_ms)


def test_an_order_played_without_jitter_takes_its_period() -> None:
    problem = make_problem(room=240, chunks=2)
    for placement in PLACEMENTS:
        plan = make_plan(problem, placement)
        assert replay(problem, plan).period_ms == pytest.approx(plan.predicted.period_ms)
        slower = with_period(plan, plan.predicted.period_ms + 20)
        assert replay(problem, slower).period_ms == pytest.approx(plan.predicted.period_ms)


def test_a_streamed_order_played_without_jitter_takes_its_period() -> None:
    problem = make_problem(staging=480)
    placement: Placement = ("gpu_streamed", "cpu", "gpu_streamed")
    found = best_layout(problem, placement, at_once(placement), 0.0)
    assert found is not None
    plan = plan_document(problem, Candidate(placement, found.timing))
    assert replay(problem, plan).period_ms == pytest.approx(plan.predicted.period_ms)


def test_jitter_costs_little_and_the_same_seed_gives_the_same() -> None:
    problem = make_problem([(10, 10.0, 20.0)] * 8, room=240, chunks=2)
    plan = make_plan(problem, ("gpu", "gpu", *all_on("cpu", 6)))
    noisy = replay(problem, plan, jitter=0.1, seed=3)
    assert noisy == replay(problem, plan, jitter=0.1, seed=3)
    assert noisy != replay(problem, plan, jitter=0.1, seed=4)
    assert -0.02 < noisy.excess < 0.03
    assert noisy.slowest_ms > plan.predicted.period_ms


def test_what_cannot_be_played_is_refused() -> None:
    problem = make_problem()
    plan = make_plan(problem, PLACEMENTS[0])
    with pytest.raises(InputError, match="jitter"):
        replay(problem, plan, jitter=1.0)
    with pytest.raises(InputError, match="iterations"):
        replay(problem, plan, iterations=0)
    with pytest.raises(InvalidPlanError):
        replay(problem, with_period(plan, 100.0))


def test_calendar_finds_gaps_around_the_cycle() -> None:
    calendar = Calendar(100.0)
    calendar.take(90.0, 20.0)  # 90 to 110: also 0 to 10
    calendar.take(130.0, 10.0)  # 30 to 40
    assert calendar.earliest(95.0, 15.0) == pytest.approx(110.0)
    assert calendar.earliest(5.0, 20.0) == pytest.approx(10.0)
    assert calendar.earliest(15.0, 20.0) == pytest.approx(40.0)
    assert calendar.latest(45.0, 20.0) == pytest.approx(10.0)
    assert calendar.latest(205.0, 40.0) == pytest.approx(150.0)
    assert calendar.earliest(0.0, 60.0) == 0.0  # no gap: where it was asked for


def test_what_binds_is_said() -> None:
    slow_cpu = make_problem(rates=(200.0, 1e5, 2e4, 2e4))
    assert "cycle of work runs through the CPU" in describe(make_plan(slow_cpu, PLACEMENTS[0]), slow_cpu)
    slow_link = make_problem(rates=(1e5, 1e5, 2e4, 200.0))
    assert "runs through copies to the device" in describe(make_plan(slow_link, PLACEMENTS[0]), slow_link)
    roomy = make_problem(room=10**6)
    everything = describe(make_plan(roomy, all_on("gpu", 3)), roomy)
    assert "runs through the GPU 100.0%" in everything
    full = make_problem(room=119)
    assert "1 bytes more" in describe(make_plan(full, PLACEMENTS[0]), full)


def test_pictures_are_well_formed_and_show_every_lane() -> None:
    problem = make_problem([(10, 10.0, 20.0), (20, 15.0, 30.0), (30, 20.0, 40.0)], staging=480)
    placement: Placement = ("gpu_streamed", "cpu", "gpu_streamed")
    found = best_layout(problem, placement, at_once(placement), 0.0)
    assert found is not None
    plan = plan_document(problem, Candidate(placement, found.timing))
    root = ElementTree.fromstring(offload_gantt_svg(plan))
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"GPU", "CPU", "to host", "to device"} <= set(words)
    tips = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}title")]
    for item in plan.timeline:
        # two periods show every operation at least twice, three times where it straddles an end
        assert sum(tip.startswith(f"{item.operation} of {item.layer}") for tip in tips) >= 2
    written = page("a <b>", offload_gantt_svg(plan, problem), describe(plan, problem))
    assert "&lt;" not in written.split("<body>")[1].split("<figure")[1].split("<pre>")[0]
    assert "a &lt;b&gt;" in written
    assert written.count("<svg") == 1


def test_other_micro_steps_are_drawn() -> None:
    problem = make_problem(accumulation=3)
    text = offload_gantt_svg(make_plan(problem, PLACEMENTS[0]), problem)
    assert "other micro-steps: 270.000 ms" in text
    assert "other micro-steps" not in offload_gantt_svg(make_plan(problem, PLACEMENTS[0]))


@pytest.mark.parametrize(("end_ms", "period_ms"), [(1e18, 1.0), (1e9, 90.0), (100.0, 1e-300), (1.0, 0.0)])
def test_what_no_valid_plan_has_is_drawn_at_once(end_ms: float, period_ms: float) -> None:
    problem = make_problem()
    plan = make_plan(problem, PLACEMENTS[0])
    timeline = (dataclasses.replace(plan.timeline[0], end_ms=end_ms), *plan.timeline[1:])
    changed = dataclasses.replace(
        plan, timeline=timeline, predicted=dataclasses.replace(plan.predicted, period_ms=period_ms)
    )
    text = offload_gantt_svg(changed, problem)
    assert len(text) < 100_000
    ElementTree.fromstring(text)


def test_names_of_layers_cannot_break_out_of_a_picture() -> None:
    problem = make_problem()
    plan = make_plan(problem, PLACEMENTS[0])
    renamed = [("<script>" if item.layer == "l0" else item.layer) for item in plan.timeline]
    timeline = tuple(dataclasses.replace(item, layer=name) for item, name in zip(plan.timeline, renamed, strict=True))
    text = offload_gantt_svg(dataclasses.replace(plan, timeline=timeline))
    assert "<script>" not in text
    ElementTree.fromstring(text)


def test_the_curve_as_table_and_picture() -> None:
    points = period_over_room(make_problem(), Budget(time_limit_s=3.0, deterministic=True), points=4)
    assert len(curve_table(points).splitlines()) == 2 + 4
    ElementTree.fromstring(curve_svg(points))
