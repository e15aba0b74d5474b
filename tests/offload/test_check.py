"""For every rule of the offload plan one plan that `check` refuses and one that it lets through."""

import dataclasses

import pytest

from solver_plan.errors import PlanMismatchError
from solver_plan.offload.assemble import Candidate, plan_document
from solver_plan.offload.check import violations
from solver_plan.offload.operations import Placement
from solver_plan.offload.plan import LayerPlacement, OffloadPlan, OperationName, Predicted, ResourceName, TimedOperation
from solver_plan.offload.problem import OffloadProblem
from solver_plan.offload.streaming import at_once, best_layout
from tests.offload.offload_cases import make_plan, make_problem, moved, with_period

CPU: Placement = ("cpu", "cpu", "cpu")


def refusal(problem: OffloadProblem, plan: OffloadPlan) -> str:
    return "; ".join(violations(problem, plan))


def by_hand(
    problem: OffloadProblem,
    placement: Placement,
    period_ms: float,
    rows: list[tuple[ResourceName, OperationName, int, float, float]],
) -> OffloadPlan:
    """A plan of rows (resource, operation, layer, start, end)."""
    return OffloadPlan(
        problem_digest=None,
        placement=tuple(
            LayerPlacement(layer=layer.name, update_on=place)
            for layer, place in zip(problem.layers, placement, strict=True)
        ),
        timeline=tuple(
            TimedOperation(
                resource=resource, operation=operation, layer=f"l{layer}", chunk=0, start_ms=start, end_ms=end
            )
            for resource, operation, layer, start, end in rows
        ),
        predicted=Predicted(
            period_ms=period_ms,
            gpu_state_bytes=sum(problem.state_bytes(layer) for layer, place in enumerate(placement) if place == "gpu"),
        ),
    )


def one_streamed_layer(period_ms: float, copy_in: float, copy_out: float, update: float = 40.0) -> OffloadPlan:
    """One layer of 100 parameters: forward 10, backward 20, state in and out 60 each, update 1."""
    rows: list[tuple[ResourceName, OperationName, int, float, float]] = [
        ("gpu", "forward", 0, 30.0, 40.0),
        ("gpu", "backward", 0, 40.0, 60.0),
        ("gpu", "update", 0, update, update + 1),
        ("h2d", "state_copy_in", 0, copy_in, copy_in + 60),
        ("d2h", "state_copy_out", 0, copy_out, copy_out + 60),
    ]
    return by_hand(ONE_LAYER, ("gpu_streamed",), period_ms, rows)


ONE_LAYER = make_problem([(100, 10.0, 20.0)], staging=1200)


def test_a_plan_by_hand_passes_and_its_period_is_the_least() -> None:
    # backward of l0 ends at 30; 100 parameters: copy 10, update 100, copy 10
    problem = make_problem([(100, 10.0, 20.0)])
    rows: list[tuple[ResourceName, OperationName, int, float, float]] = [
        ("gpu", "forward", 0, 0.0, 10.0),
        ("gpu", "backward", 0, 10.0, 30.0),
        ("d2h", "gradient_copy", 0, 30.0, 40.0),
        ("cpu", "update", 0, 40.0, 140.0),
        ("h2d", "weight_copy", 0, 140.0, 150.0),
    ]
    assert violations(problem, by_hand(problem, ("cpu",), 150.0, rows)) == ()
    assert "weight_copy" in refusal(problem, by_hand(problem, ("cpu",), 149.0, rows))


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("chunks", [1, 3])
def test_plans_of_the_simulation_pass(clip: bool, chunks: int) -> None:
    problem = make_problem(room=360, chunks=chunks, clip=clip)
    for placement in (CPU, ("gpu", "cpu", "cpu"), ("gpu", "gpu", "cpu"), ("cpu", "cpu", "gpu")):
        assert violations(problem, make_plan(problem, placement)) == ()


def test_the_plan_of_another_problem_is_refused() -> None:
    plan = make_plan(make_problem(room=360), CPU)
    with pytest.raises(PlanMismatchError):
        violations(make_problem(room=361), plan)


def test_placements_name_every_layer_once() -> None:
    problem = make_problem()
    plan = make_plan(problem, CPU)
    short = dataclasses.replace(plan, placement=plan.placement[:2])
    assert "layer 'l2' has no placement" in refusal(problem, short)
    double = dataclasses.replace(plan, placement=(*plan.placement, plan.placement[0]))
    assert "is placed 2 times" in refusal(problem, double)
    stranger = dataclasses.replace(plan, placement=(*plan.placement, LayerPlacement(layer="x", update_on="cpu")))
    assert "layer 'x' is not in the problem" in refusal(problem, stranger)


def test_every_operation_is_there_once_where_it_belongs_and_as_long_as_it_takes() -> None:
    problem = make_problem()
    plan = make_plan(problem, CPU)
    assert "is missing" in refusal(problem, dataclasses.replace(plan, timeline=plan.timeline[:-1]))
    assert "is there twice" in refusal(problem, dataclasses.replace(plan, timeline=(*plan.timeline, plan.timeline[0])))
    extra = dataclasses.replace(plan.timeline[-1], chunk=1)
    assert "does not belong" in refusal(problem, dataclasses.replace(plan, timeline=(*plan.timeline, extra)))
    wrong = dataclasses.replace(plan.timeline[0], resource="cpu")
    assert "runs on cpu" in refusal(problem, dataclasses.replace(plan, timeline=(wrong, *plan.timeline[1:])))
    assert "it takes" in refusal(problem, moved(plan, "update", "l2", 0.0, longer_ms=0.001))
    assert violations(problem, moved(plan, "update", "l2", 0.0, longer_ms=5e-7)) == ()


def test_the_earliest_operation_starts_at_zero() -> None:
    problem = make_problem()
    plan = make_plan(problem, CPU)
    later = dataclasses.replace(
        plan,
        timeline=tuple(
            dataclasses.replace(item, start_ms=item.start_ms + 1, end_ms=item.end_ms + 1) for item in plan.timeline
        ),
    )
    assert "it starts at 0" in refusal(problem, later)


@pytest.mark.parametrize(
    ("operation", "layer", "by_ms", "words"),
    [
        ("forward", "l1", -1.0, "forward of 'l1' starts at 9 ms, before forward of 'l0' ends"),
        ("backward", "l1", -1.0, "backward of 'l1' starts at 84 ms, before backward of 'l2' ends"),
        ("gradient_copy", "l2", -1.0, "gradient_copy of 'l2' starts at 84 ms, before backward of 'l2' ends"),
        ("update", "l2", -1.0, "update of 'l2' starts at 87 ms, before gradient_copy of 'l2' ends"),
        ("weight_copy", "l2", -1.0, "before update of 'l2' ends"),
    ],
)
def test_order_within_an_iteration(operation: OperationName, layer: str, by_ms: float, words: str) -> None:
    problem = make_problem()
    assert words in refusal(problem, moved(make_plan(problem, CPU), operation, layer, by_ms))


def test_the_next_forward_waits_for_its_layer() -> None:
    problem = make_problem(room=120)
    plan = make_plan(problem, CPU)
    assert "of the next iteration" in refusal(problem, with_period(plan, plan.predicted.period_ms - 0.001))
    assert violations(problem, with_period(plan, plan.predicted.period_ms + 10)) == ()
    on_gpu = make_plan(problem, ("gpu", "cpu", "cpu"))
    assert "update of 'l0'" in refusal(problem, moved(on_gpu, "update", "l0", 100.0))


def test_updates_on_the_gpu_come_after_their_backward_and_do_not_overlap() -> None:
    problem = make_problem(room=120)
    plan = make_plan(problem, ("gpu", "cpu", "cpu"))
    assert "before backward of 'l0' ends" in refusal(problem, moved(plan, "update", "l0", -0.05))
    assert "gpu: backward of 'l0' and update of 'l0' overlap" in refusal(problem, moved(plan, "update", "l0", -0.05))


def test_clipping_makes_updates_wait_but_not_copies() -> None:
    free, clipped = make_problem(chunks=2), make_problem(chunks=2, clip=True)
    plan = make_plan(free, CPU)
    assert "gradients are clipped" in refusal(clipped, dataclasses.replace(plan, problem_digest=None))
    good = make_plan(clipped, CPU)
    last_backward = max(item.end_ms for item in good.timeline if item.operation == "backward")
    assert min(item.start_ms for item in good.timeline if item.operation == "gradient_copy") < last_backward
    assert violations(clipped, good) == ()


def test_other_micro_steps_take_their_time() -> None:
    one, three = make_problem(), make_problem(accumulation=3)
    plan = dataclasses.replace(make_plan(one, CPU), problem_digest=None)
    assert "other micro-steps (270 ms)" in refusal(three, plan)
    assert violations(three, make_plan(three, CPU)) == ()


def test_resources_do_one_thing_at_a_time_around_the_cycle() -> None:
    problem = make_problem()
    plan = make_plan(problem, CPU)
    together = moved(plan, "update", "l1", -5.0)
    assert "cpu: " in refusal(problem, together)
    assert "overlap" in refusal(problem, together)
    assert "of work in a period" in refusal(problem, with_period(plan, 50.0))
    # 61 ms of copies one way do not fit a period of 60.5, though within one iteration nothing overlaps
    assert "of work in a period" in refusal(ONE_LAYER, one_streamed_layer(59.0, 0.0, 61.0, 60.0))


def test_operations_of_length_zero_occupy_nothing() -> None:
    problem = make_problem([(0, 10.0, 20.0), (40, 15.0, 30.0)])
    plan = make_plan(problem, ("cpu", "cpu"))
    update = next(item for item in plan.timeline if item.operation == "update" and item.layer == "l1")
    middle = (update.start_ms + update.end_ms) / 2
    start = next(item.start_ms for item in plan.timeline if item.operation == "update" and item.layer == "l0")
    shifted = moved(plan, "update", "l0", middle - start)
    shifted = moved(shifted, "weight_copy", "l0", middle - start)
    assert violations(problem, with_period(shifted, 500.0)) == ()


def test_resident_states_fit_the_room_and_are_summed() -> None:
    enough, short = make_problem(room=120), make_problem(room=119)
    plan = make_plan(enough, ("gpu", "cpu", "cpu"))
    assert violations(enough, plan) == ()
    assert "1 more than gpu_state_bytes 119" in refusal(short, dataclasses.replace(plan, problem_digest=None))
    lying = dataclasses.replace(plan, predicted=Predicted(period_ms=plan.predicted.period_ms, gpu_state_bytes=0))
    assert "the placement keeps 120" in refusal(enough, lying)


def test_a_streamed_layer_by_hand() -> None:
    # in [0, 60), update [60, 61), out [61, 121): a stay of 121 ms, so a period of 121 ms
    assert violations(ONE_LAYER, one_streamed_layer(121.0, 0.0, 61.0, 60.0)) == ()
    assert "copy_out of 'l0' ends" in refusal(ONE_LAYER, one_streamed_layer(120.0, 0.0, 61.0, 60.0))
    assert "before update of 'l0' ends" in refusal(ONE_LAYER, one_streamed_layer(121.0, 0.0, 60.0, 60.0))
    assert "before state_copy_in of 'l0' ends" in refusal(ONE_LAYER, one_streamed_layer(122.0, 0.5, 61.0, 60.0))
    assert "before backward of 'l0' ends" in refusal(ONE_LAYER, one_streamed_layer(121.0, 0.0, 61.0, 59.0))


def test_streaming_needs_staging_room() -> None:
    plan = dataclasses.replace(one_streamed_layer(121.0, 0.0, 61.0, 60.0), problem_digest=None)
    assert "means no streaming" in refusal(make_problem([(100, 10.0, 20.0)]), plan)
    small = make_problem([(100, 10.0, 20.0), (1, 1.0, 1.0)], staging=1199)
    two = by_hand(small, ("gpu_streamed", "cpu"), 200.0, [("gpu", "forward", 0, 0.0, 10.0)])
    assert "exceeds staging_bytes 1199" in refusal(small, two)


def test_states_on_the_device_fit_the_staging_room_at_every_moment() -> None:
    layers = [(100, 10.0, 20.0), (100, 10.0, 20.0)]
    wide, narrow = make_problem(layers, staging=2400), make_problem(layers, staging=2399)
    placement: Placement = ("gpu_streamed", "gpu_streamed")
    found = best_layout(wide, placement, at_once(placement), 0.0)
    assert found is not None
    plan = plan_document(wide, Candidate(placement, found.timing))
    assert violations(wide, plan) == ()
    assert "1 more than staging_bytes 2399" in refusal(narrow, dataclasses.replace(plan, problem_digest=None))
    tight = best_layout(narrow, placement, at_once(placement), 0.0)
    assert tight is not None
    assert tight.timing.period_ms > found.timing.period_ms
    assert violations(narrow, plan_document(narrow, Candidate(placement, tight.timing))) == ()


def test_a_certificate_that_lies_is_found() -> None:
    from solver_plan.documents import certify

    problem = make_problem()
    plan = make_plan(problem, CPU)
    period_ms = plan.predicted.period_ms

    def claiming(objective: float, bound: float | None) -> OffloadPlan:
        certificate = certify(
            objective=objective,
            bound=bound,
            bound_from="milp:nested_windows",
            stopped_by="completed",
            seconds=0.0,
            incumbent="heuristic:x",
            solver="none",
        )
        return dataclasses.replace(plan, certificate=certificate)

    assert violations(problem, claiming(period_ms, period_ms / 2)) == ()
    assert "certificate.objective" in refusal(problem, claiming(period_ms * 1.01, period_ms))
    assert "certificate.bound" in refusal(problem, claiming(period_ms * 1.01, period_ms * 1.005))
