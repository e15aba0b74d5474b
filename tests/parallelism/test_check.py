"""Check: for every rule a tiny plan that it refuses, with its place, and one that it lets through."""

from dataclasses import replace

import pytest

from solver_plan.documents import certify
from solver_plan.errors import InvalidPlanError
from solver_plan.parallelism.check import check, evaluate_checked
from solver_plan.parallelism.costs import evaluate
from solver_plan.parallelism.describe import describe
from solver_plan.parallelism.plan import Layout, ParallelismPlan, Predicted, Schedule
from solver_plan.parallelism.problem import ParallelismProblem, Space
from tests.parallelism.problems import ANY_SPACE, chain_of, plan_of, profile, stage

CHOICES = [
    profile(batch=batch, tensor_parallel=degree, partition=partition, activation_bytes=10)
    for batch in (1, 2)
    for degree in (1, 2)
    for partition in (0, 1)
]


def _problem(space: Space = ANY_SPACE, *, devices: int = 2, nodes: int = 1, memory: int = 10**6) -> ParallelismProblem:
    """Return four operators in two blocks, which hold 10 bytes each."""
    return chain_of([CHOICES] * 4, blocks=(0, 2), devices=devices, nodes=nodes, memory_bytes=memory, space=space)


PROBLEM = _problem()
IDLE = _problem(replace(ANY_SPACE, use_all_devices=False))
TWO = plan_of(stage((0, 2), [0]), stage((2, 4), [1]))
ONE = plan_of(stage((0, 4), [0, 1]))


def _space(**changes: object) -> ParallelismProblem:
    return _problem(replace(ANY_SPACE, **changes))  # type: ignore[arg-type]


def _with(plan: ParallelismPlan, number: int, **changes: object) -> ParallelismPlan:
    stages = list(plan.stages)
    stages[number] = replace(stages[number], **changes)  # type: ignore[arg-type]
    return replace(plan, stages=tuple(stages))


def _layouts(*layouts: tuple[int, int, int, int, int]) -> tuple[Layout, ...]:
    return tuple(
        Layout(operators=(first, end), tensor_parallel=t, data_parallel=d, partition=k)
        for first, end, t, d, k in layouts
    )


VALID: list[tuple[str, ParallelismProblem, ParallelismPlan]] = [
    ("two stages", PROBLEM, TWO),
    ("one stage", PROBLEM, ONE),
    ("any order of devices", PROBLEM, plan_of(stage((0, 2), [1]), stage((2, 4), [0]))),
    ("data parallel", PROBLEM, plan_of(stage((0, 4), [0, 1], data_parallel=2), micro_batch_size=2, micro_batches=2)),
    ("an idle device", IDLE, plan_of(stage((0, 4), [1]))),
    ("as many stages as allowed", _space(max_stages=2), TWO),
    ("counts that are allowed", _space(device_counts=(1,)), TWO),
    ("a stage in each node", _problem(devices=1, nodes=2), TWO),
    ("a stage across nodes", _problem(replace(ANY_SPACE, cross_node_stages=True), devices=1, nodes=2), ONE),
    ("a micro-batch size that is allowed", _space(micro_batch_sizes=(1,)), TWO),
    ("a partition that is allowed", _space(partitions=(1,)), plan_of(stage((0, 4), [0, 1], partition=1))),
    (
        "a layout per operator",
        _space(layout="operator"),
        _with(replace(ONE, micro_batch_size=2, micro_batches=2), 0, layout=_layouts((0, 2, 2, 1, 0), (2, 4, 1, 2, 0))),
    ),
    ("the same layout twice", PROBLEM, _with(ONE, 0, layout=_layouts((0, 1, 2, 1, 0), (1, 4, 2, 1, 0)))),
    ("recomputed operators", PROBLEM, _with(TWO, 1, recompute=((2, 3), (3, 4)))),
    ("recomputed blocks", _space(recompute="block"), _with(ONE, 0, recompute=((2, 4),))),
    (
        "part of a block, all that the stage has",
        _space(recompute="block"),
        plan_of(stage((0, 1), [0], recompute=[(0, 1)]), stage((1, 4), [1])),
    ),
    ("nothing recomputed", _space(recompute="none"), TWO),
    ("sharding that is allowed", _space(sharding=(0, 1)), _with(TWO, 0, sharding=1)),
]


@pytest.mark.parametrize(("problem", "plan"), [row[1:] for row in VALID], ids=[row[0] for row in VALID])
def test_let_through(problem: ParallelismProblem, plan: ParallelismPlan) -> None:
    assert check(problem, plan) == ()
    assert evaluate_checked(problem, plan).iteration_ms > 0


REFUSED: list[tuple[str, ParallelismProblem, ParallelismPlan]] = [
    ("micro_batches: 3 micro-batches of 1 are not", PROBLEM, replace(TWO, micro_batches=3)),
    ("micro_batch_size: 1 is not one of [2]", _space(micro_batch_sizes=(2,)), TWO),
    (
        "stages[1].operators: starts at 3, the stage before ended at 2",
        PROBLEM,
        plan_of(TWO.stages[0], stage((3, 4), [1])),
    ),
    ("stages[1].operators: starts at 1", PROBLEM, plan_of(TWO.stages[0], stage((1, 4), [1]))),
    ("stages[0].operators: starts at 2", PROBLEM, plan_of(*TWO.stages[::-1])),
    ("stages[1].operators: ends at 3, the chain has 4", PROBLEM, plan_of(TWO.stages[0], stage((2, 3), [1]))),
    ("stages[1].operators: ends at 5, the chain has 4", PROBLEM, plan_of(TWO.stages[0], stage((2, 5), [1]))),
    ("stages: 2 stages, at most 1", _space(max_stages=1), TWO),
    ("stages[1].devices: device 2 does not exist", PROBLEM, plan_of(TWO.stages[0], stage((2, 4), [2]))),
    ("stages[0].devices: a device stands twice", PROBLEM, plan_of(stage((0, 4), [0, 0], tensor_parallel=2))),
    ("stages[0].devices: shares a device", PROBLEM, plan_of(stage((0, 2), [0, 1]), stage((2, 4), [1]))),
    ("stages[0].devices: 2 devices, a stage has one of [1]", _space(device_counts=(1,)), ONE),
    ("stages[0].devices: lies in nodes [0, 1]", _problem(devices=1, nodes=2), ONE),
    ("stages: device 0 is not used", PROBLEM, plan_of(stage((0, 4), [1]))),
    ("stages[0].layout: starts at operator 1, expected 0", PROBLEM, _with(ONE, 0, layout=_layouts((1, 4, 2, 1, 0)))),
    ("stages[0].layout: ends at operator 3, the stage at 4", PROBLEM, _with(ONE, 0, layout=_layouts((0, 3, 2, 1, 0)))),
    (
        "stages[0].layout: tensor parallel 1 x data parallel 1 need 1",
        PROBLEM,
        _with(ONE, 0, layout=_layouts((0, 4, 1, 1, 0))),
    ),
    (
        "stages[0].layout: data parallel degree 2 does not divide",
        PROBLEM,
        plan_of(stage((0, 4), [0, 1], data_parallel=2)),
    ),
    (
        "stages[0].layout: partition 1 is not one of [0]",
        _space(partitions=(0,)),
        plan_of(stage((0, 4), [0, 1], partition=1)),
    ),
    (
        "stages[0].layout: 2 layouts, a stage has one",
        PROBLEM,
        _with(ONE, 0, layout=_layouts((0, 2, 2, 1, 0), (2, 4, 2, 1, 1))),
    ),
    ("stages[0].sharding: 1 is not one of [0]", PROBLEM, _with(TWO, 0, sharding=1)),
    ("stages[0].recompute: [1, 3) overlaps", PROBLEM, _with(TWO, 0, recompute=((1, 3),))),
    ("stages[1].recompute: [2, 3) overlaps, is out of order", PROBLEM, _with(TWO, 1, recompute=((3, 4), (2, 3)))),
    ("stages[1].recompute: [3, 4) overlaps", PROBLEM, _with(TWO, 1, recompute=((2, 4), (3, 4)))),
    ("stages[0].recompute: recomputation is not allowed", _space(recompute="none"), _with(TWO, 0, recompute=((0, 2),))),
    (
        "stages[0].recompute: only 1 operators of the block [0, 2)",
        _space(recompute="block"),
        _with(ONE, 0, recompute=((1, 2),)),
    ),
    (
        "stages[0]: operator operator 0 was not profiled at batch 1, tensor parallel 2, partition 7",
        PROBLEM,
        plan_of(stage((0, 4), [0, 1], partition=7)),
    ),
    (
        "stages[0]: operator operator 0 was not profiled at batch 4",
        PROBLEM,
        replace(ONE, micro_batch_size=4, micro_batches=1),
    ),
]


@pytest.mark.parametrize(("line", "problem", "plan"), REFUSED, ids=[row[0] for row in REFUSED])
def test_refused(line: str, problem: ParallelismProblem, plan: ParallelismPlan) -> None:
    violations = check(problem, plan)
    assert any(violation.startswith(line) for violation in violations), violations
    with pytest.raises(InvalidPlanError):
        evaluate_checked(problem, plan)


def test_memory_to_the_byte() -> None:
    """Stage 0 of two holds two micro-batches of two operators of 10 bytes: 40."""
    assert check(_problem(memory=40), TWO) == ()
    (violation,) = check(_problem(memory=39), TWO)
    assert violation.startswith("stages[0]: needs 40 bytes on each device, 39 are there")
    # with both operators recomputed, the first one's 10 are saved twice and brought back once
    assert check(_problem(memory=30), _with(TWO, 0, recompute=((0, 2),))) == ()
    assert check(_problem(memory=29), _with(TWO, 0, recompute=((0, 2),))) != ()


def test_the_memory_margin_is_kept_free() -> None:
    cluster = replace(_problem(memory=50).cluster, memory_margin=0.2)
    assert check(replace(_problem(), cluster=cluster), TWO) == ()
    assert check(replace(_problem(), cluster=replace(cluster, memory_margin=0.21)), TWO) != ()


def test_predictions_are_recomputed() -> None:
    predicted = Predicted(iteration_ms=24.0 + 6.0, stage_ms=(6.0, 6.0), stage_memory_bytes=(40, 20))
    assert evaluate(PROBLEM, TWO).iteration_ms == pytest.approx(3 * 6 + 12)
    assert check(PROBLEM, replace(TWO, predicted=predicted)) == ()
    for wrong, line in (
        (replace(predicted, iteration_ms=30.001), "predicted.iteration_ms: 30.001, recomputed 30.0"),
        (replace(predicted, stage_ms=(6.0, 6.1)), "predicted.stage_ms[1]"),
        (replace(predicted, stage_memory_bytes=(40, 200)), "predicted.stage_memory_bytes[1]"),
        (replace(predicted, stage_ms=(6.0,)), "predicted: numbers for 1 stages"),
    ):
        (violation,) = check(PROBLEM, replace(TWO, predicted=wrong))
        assert violation.startswith(line)


def test_the_certificate_states_the_objective() -> None:
    def claim(objective: float) -> ParallelismPlan:
        certificate = certify(
            objective=objective,
            bound=None,
            bound_from=None,
            stopped_by="time",
            seconds=1.0,
            incumbent="heuristic:grid",
            solver="none",
        )
        return replace(TWO, certificate=certificate)

    assert check(PROBLEM, claim(30.0 * (1 + 1e-7))) == ()
    assert check(PROBLEM, claim(29.0))[0].startswith("certificate.objective: 29.0, recomputed 30.0")


# -- schedules --------------------------------------------------------------------------------------------------


SHORT = replace(TWO, micro_batch_size=2, micro_batches=2)
"""Two stages, two micro-batches."""
SHARED = plan_of(*(stage((n, n + 1), [n % 2]) for n in range(4)), micro_batch_size=4, micro_batches=1)
"""Four stages on two devices, every other stage on the same one; needs a schedule."""


def _scheduled(plan: ParallelismPlan, *orders: str) -> ParallelismPlan:
    return replace(plan, schedule=Schedule(orders=tuple(tuple(order.split()) for order in orders)))


def _batch_of_four(**space: object) -> ParallelismProblem:
    return chain_of([[profile(batch=4)]] * 4, devices=2, space=replace(ANY_SPACE, **space))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "orders",
    [
        ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"),
        ("0F0 0F1 0I0 0W0 0B1", "1F0 1I0 1F1 1W0 1I1 1W1"),
    ],
)
def test_schedules_let_through(orders: tuple[str, ...]) -> None:
    assert check(PROBLEM, _scheduled(SHORT, *orders)) == ()


def test_stages_may_share_devices_with_a_schedule() -> None:
    problem = _batch_of_four(virtual_stages=(1, 2))
    assert check(problem, _scheduled(SHARED, "0F0 2F0 2B0 0B0", "1F0 3F0 3B0 1B0")) == ()
    assert "shares a device" in check(problem, SHARED)[0]
    apart = check(problem, _scheduled(SHARED, "0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"))
    assert apart[0].startswith("schedule.orders: stages 0 and 2 share a list if and only if they share devices")


def test_as_many_stages_share_devices_as_the_space_allows() -> None:
    """Sharing balances what contiguous stages cannot: outside the space it would undercut the proven bound."""
    plan = _scheduled(SHARED, "0F0 2F0 2B0 0B0", "1F0 3F0 3B0 1B0")
    violations = check(_batch_of_four(), plan)
    assert len(violations) == 2
    assert violations[0].startswith("stages: 2 of them share devices [0], the number of stages of a group is one of")
    assert check(_batch_of_four(virtual_stages=(3,)), plan)[1].startswith("stages: 2 of them share devices [1]")


@pytest.mark.parametrize(
    ("orders", "line"),
    [
        (("0F0 0F1 0B0 0B1",), "schedule.orders: 1 lists, the stages have 2 groups"),
        (("0F0 0F1 0B0", "1F0 1B0 1F1 1B1"), "schedule.orders: stage 0, micro-batch 1 has (1, 0, 0, 0)"),
        (("0F0 0F1 0B0 0B1 0B1", "1F0 1B0 1F1 1B1"), "schedule.orders: stage 0, micro-batch 1 has (1, 2, 0, 0)"),
        (("0F0 0F1 0I0 0B1", "1F0 1B0 1F1 1B1"), "schedule.orders: stage 0, micro-batch 0 has (1, 0, 1, 0)"),
        (("0F0 0F1 0B0 0B2", "1F0 1B0 1F1 1B1"), "schedule.orders[0]: 0B2 names a stage or micro-batch"),
        (("0F0 0F1 0B0 0B1", "2F0 1B0 1F1 1B1"), "schedule.orders[1]: 2F0 names a stage"),
        (("0F0 0F1 0B0 1B1", "1F0 1B0 1F1 0B1"), "schedule.orders[1]: stage 1 stands in two lists"),
        (("0B0 0F0 0F1 0B1", "1F0 1B0 1F1 1B1"), "schedule.orders: deadlock"),
        (("0F0 0F1 0B1 0B0", "1F1 1B0 1F0 1B1"), "schedule.orders: deadlock"),
    ],
)
def test_schedules_refused(orders: tuple[str, ...], line: str) -> None:
    violations = check(PROBLEM, _scheduled(SHORT, *orders))
    assert violations, "nothing was found"
    assert violations[0].startswith(line)


def test_groups_of_devices_do_not_overlap() -> None:
    problem = replace(_batch_of_four(), operators=_batch_of_four().operators[:2])
    two = plan_of(stage((0, 1), [0, 1], data_parallel=2), stage((1, 2), [1]), micro_batch_size=4, micro_batches=1)
    violations = check(problem, _scheduled(two, "0F0 0B0", "1F0 1B0"))
    assert violations[0].startswith("schedule.orders: devices [0, 1] and [1] overlap")


def test_ranges_far_outside_are_refused_at_once() -> None:
    problem = _space(recompute="block")
    violations = check(problem, _with(TWO, 1, recompute=((0, 10**9),)))
    assert violations[0].startswith("stages[1].recompute: [0, 1000000000) overlaps, is out of order or lies outside")


def test_times_that_no_document_holds_are_refused() -> None:
    problem = chain_of([[profile(forward_ms=1e18)]] * 4, devices=2)
    assert check(problem, TWO) == ("iteration_ms: 1e+19 ms, times go up to 1e+18",)


def test_what_a_plan_names_by_its_ends_is_not_listed_one_by_one() -> None:
    far = 10**9
    plan = plan_of(stage((0, far), [0, far], recompute=((0, far),)))
    assert check(_space(recompute="block"), plan)
    assert f"0,{far}" in describe(plan, PROBLEM)
