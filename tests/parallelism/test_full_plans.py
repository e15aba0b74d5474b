"""Plans under the `full` cost model: what they cost, and the rules that only this model has."""

from dataclasses import replace

import pytest

from solver_plan.errors import InvalidPlanError
from solver_plan.parallelism.check import check
from solver_plan.parallelism.costs import evaluate
from solver_plan.parallelism.costs.full import Ring, StageWork, exposed_ms, iteration_ms, state_bytes, traffic
from solver_plan.parallelism.costs.full_plan import replica_ring, ring_inside
from solver_plan.parallelism.plan import ParallelismPlan, Schedule
from solver_plan.parallelism.problem import (
    BytesPerParameter,
    LatencyLink,
    Overlap,
    ParallelismProblem,
    Profile,
    RingRate,
    Space,
)
from solver_plan.parallelism.schedule import interleaved
from solver_plan.parallelism.simulate import simulate
from tests.parallelism.problems import ANY_SPACE, FREE, PER_MS, chain_of, plan_of, profile, stage

SPACE = replace(ANY_SPACE, sharding=(0, 1, 2, 3), virtual_stages=(1, 2), cross_node_stages=True)
EACH = BytesPerParameter(weight=2, gradient=4, optimizer_state=12)
REDUCTION = Overlap()
RING = LatencyLink(bytes_per_s=1e5)
"""100 bytes in a millisecond."""


def _problem(
    entries: list[list[Profile]],
    *,
    space: Space = SPACE,
    overlap: Overlap = REDUCTION,
    blocks: tuple[int, ...] = (),
    devices: int = 1,
    nodes: int = 1,
    memory_bytes: int = 10**12,
    intra: LatencyLink = FREE,
    inter: LatencyLink = FREE,
    rate: float | None = None,
    sequence_parallel: bool = False,
) -> ParallelismProblem:
    plain = chain_of(
        entries,
        blocks=blocks,
        devices=devices,
        nodes=nodes,
        memory_bytes=memory_bytes,
        space=space,
        intra=intra,
        inter=inter,
    )
    return replace(
        plain,
        cost_model="full",
        bytes_per_parameter=EACH,
        overlap=overlap,
        sequence_parallel=sequence_parallel,
        cluster=replace(plain.cluster, device_memory_bytes_per_s=rate),
    )


def _one(**changes: float | str) -> list[Profile]:
    return [profile(batch=batch, **changes) for batch in (1, 2, 4)]


def _sharded(plan: ParallelismPlan, sharding: int) -> ParallelismPlan:
    return replace(plan, stages=tuple(replace(one, sharding=sharding) for one in plan.stages))


# -- cost -----------------------------------------------------------------------------------------------------------


def test_one_device_takes_its_work_and_the_optimizer_step() -> None:
    problem = _problem([_one(weight_bytes=100)], rate=1e5)
    # 4 micro-batches of 3 ms; gradients 200 bytes and state 600 twice, weights 100 once, at 100 bytes a ms
    plan = plan_of(stage((0, 1), [0]))
    assert evaluate(problem, plan).iteration_ms == pytest.approx(12 + (2 * 200 + 2 * 600 + 100) / 100)


@pytest.mark.parametrize("sharding", [0, 1, 2, 3])
@pytest.mark.parametrize("overlapped", [True, False])
def test_data_parallel_stages_take_what_the_formulas_say(sharding: int, overlapped: bool) -> None:
    problem = _problem(
        [_one(weight_bytes=100)] * 3,
        blocks=(0, 1, 2),
        devices=2,
        intra=RING,
        rate=1e5,
        overlap=Overlap(reduction=overlapped),
    )
    plan = _sharded(plan_of(stage((0, 3), [0, 1], data_parallel=2), micro_batch_size=2, micro_batches=2), sharding)
    work = StageWork(
        forward_ms=3,
        backward_ms=6,
        weight_bytes=300,
        gradient_bytes=600,
        optimizer_state_bytes=1800,
        replicas=Ring(devices=2, latency_ms=0, bus_bytes_per_s=1e5),
        sharding=sharding,
        pieces=3,
    )
    expected = iteration_ms([work], 2, memory_bytes_per_s=1e5, overlapped=overlapped)
    evaluation = evaluate(problem, plan)
    assert evaluation.iteration_ms == pytest.approx(expected)
    assert evaluation.stages[0].weight_state_bytes == pytest.approx(state_bytes(work))
    assert not check(problem, plan)


def test_the_reduction_of_a_later_stage_hides_behind_the_drain() -> None:
    """The last stage ends its backwards first: its reduction has that time too."""
    heavy, light = _one(weight_bytes=1000), _one()
    problem = _problem([light, heavy], devices=4, intra=RING, overlap=Overlap(reduction=False))
    plan = plan_of(
        stage((0, 1), [0, 1], data_parallel=2),
        stage((1, 2), [2, 3], data_parallel=2),
        micro_batch_size=2,
        micro_batches=2,
    )
    # the last stage: forward at 1, 2 x 3 ms, then 2000 bytes of gradients all-reduced at 100 bytes a ms
    assert evaluate(problem, plan).iteration_ms == pytest.approx(1 + 6 + 20)


def test_transfers_take_time_of_the_stages_or_delay_them() -> None:
    entries = [_one(input_bytes=1, output_bytes=1)] * 2
    plan = plan_of(stage((0, 1), [0]), stage((1, 2), [1]))
    exposed = _problem(entries, devices=2, intra=PER_MS)
    # stage 0: 1 + (2 + 1 for the gradient); stage 1: (1 + 1 for the input) + 2; 1F1B of two stages of 4 ms
    assert evaluate(exposed, plan).iteration_ms == pytest.approx(5 * 4)
    hidden = replace(exposed, overlap=Overlap(transfers=True))
    # the way there and back: 1 + 1 + 3 + 1 + 2; then the stages alternate
    assert evaluate(replace(hidden, global_batch=1), replace(plan, micro_batches=1)).iteration_ms == pytest.approx(8)
    assert evaluate(hidden, plan).iteration_ms < 20
    assert simulate(hidden, plan).iteration_ms == pytest.approx(evaluate(hidden, plan).iteration_ms)


def test_each_tensor_parallel_device_receives_its_part() -> None:
    entries = [[profile(tensor_parallel=2, input_bytes=4, output_bytes=4)]] * 2
    plan = plan_of(stage((0, 1), [0, 1]), stage((1, 2), [2, 3]))
    whole = _problem(entries, devices=4, intra=PER_MS)
    assert evaluate(whole, plan).stages[1].communication_ms == pytest.approx(2)
    divided = _problem(entries, devices=4, intra=PER_MS, sequence_parallel=True)
    assert evaluate(divided, plan).stages[1].communication_ms == pytest.approx(4)


def test_collectives_of_tensor_parallelism_overlap_in_pieces() -> None:
    entries = [[profile(tensor_parallel=2, forward_collective_ms=0.5, backward_collective_ms=1.0)]]
    plan = plan_of(stage((0, 1), [0, 1]))
    exposed = _problem(entries, devices=2)
    hidden = replace(exposed, overlap=Overlap(tensor_parallel=True))
    assert evaluate(exposed, plan).iteration_ms - evaluate(hidden, plan).iteration_ms == pytest.approx(4 * 0.75)


def test_shared_weights_stand_once_on_a_stage_and_are_reduced_between_two() -> None:
    entries = [_one(weight_bytes=100)] * 2
    plain = _problem(entries, devices=2, inter=RING, intra=RING)
    tied = replace(plain, operators=(plain.operators[0], replace(plain.operators[1], shares_weights_with="operator 0")))
    together = plan_of(stage((0, 2), [0]))
    assert evaluate(tied, together).stages[0].weight_state_bytes == 100 / 2 * 18
    assert evaluate(plain, together).stages[0].weight_state_bytes == 200 / 2 * 18
    apart = plan_of(stage((0, 1), [0]), stage((1, 2), [1]))
    # 200 bytes of gradients between two devices: 2 * 1/2 * 200 bytes at 100 bytes a ms
    assert evaluate(tied, apart).iteration_ms - evaluate(plain, apart).iteration_ms == pytest.approx(2)


def test_few_micro_batches_are_held_no_more_than_there_are() -> None:
    problem = _problem([_one(activation_bytes=10)] * 3, devices=3)
    stages = [stage((number, number + 1), [number]) for number in range(3)]
    four = evaluate(problem, plan_of(*stages)).stages
    assert [one.activation_bytes for one in four] == [30, 20, 10]
    one = evaluate(problem, plan_of(*stages, micro_batch_size=4, micro_batches=1)).stages
    assert [each.activation_bytes for each in one] == [10, 10, 10]


def test_rings_over_nodes_share_the_adapters() -> None:
    cluster = replace(
        _problem([_one()], devices=4, nodes=2, intra=RING, inter=LatencyLink(latency_ms=1, bytes_per_s=400.0)).cluster,
        collectives=(RingRate(devices=4, latency_ms=0.5, bus_bytes_per_s=5e5),),
        node_bytes_per_s=800.0,
    )
    assert ring_inside(cluster, 2).bus_bytes_per_s == 1e5
    assert ring_inside(cluster, 4).bus_bytes_per_s == 5e5
    across = replica_ring(cluster, 4, 2)
    assert across.bus_bytes_per_s == pytest.approx(800.0 * 2 / 4)
    assert across.latency_ms == pytest.approx(0.5 + 2 * 1)


def test_reduction_is_exposed_only_where_it_does_not_hide() -> None:
    work = StageWork(
        forward_ms=10,
        backward_ms=20,
        weight_bytes=10,
        gradient_bytes=200,
        optimizer_state_bytes=0,
        replicas=Ring(devices=2, latency_ms=0, bus_bytes_per_s=1e5),
        pieces=4,
    )
    assert exposed_ms(traffic(work).reduction_ms, work.backward_ms, 4) < traffic(work).reduction_ms


# -- rules ----------------------------------------------------------------------------------------------------------


def _interleaved_plan(*, recompute: tuple[tuple[int, int], ...] = (), reverse: bool = False) -> ParallelismPlan:
    stages = [
        replace(stage((2 * number, 2 * number + 2), [number % 2]), recompute=recompute if number == 0 else ())
        for number in range(4)
    ]
    lists = [interleaved(2, group, 2, 4) for group in range(2)]
    orders = tuple(tuple(f"{at}{kind}{number}" for at, kind, number in one) for one in lists)
    if reverse:
        orders = (orders[0], (*orders[1][:-2], orders[1][-1], orders[1][-2]))
    return replace(plan_of(*stages), schedule=Schedule(orders=orders))


def _blocks(**options: Space) -> ParallelismProblem:
    return _problem([_one()] * 8, blocks=(0, 2, 4, 6), devices=2, **options)


def test_interleaved_stages_are_let_through_and_shorten_the_pipeline() -> None:
    problem = _blocks()
    plan = _interleaved_plan()
    assert check(problem, plan) == ()
    # (N - 1) * t + t + (p - 1) * t / v, t = 4 operators of 3 ms
    assert evaluate(problem, plan).iteration_ms == pytest.approx(4 * 12 + 12 / 2)
    plain = plan_of(stage((0, 4), [0]), stage((4, 8), [1]))
    assert evaluate(problem, plain).iteration_ms == pytest.approx(5 * 12)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (_interleaved_plan(recompute=((0, 2),)), "recomputation differs from block to block"),
        (_interleaved_plan(reverse=True), "under interleaved 1F1B"),
        (replace(_interleaved_plan(), micro_batch_size=4, micro_batches=1), "multiple of the 2 groups"),
    ],
    ids=["recomputation", "order", "micro-batches"],
)
def test_what_is_not_interleaved_as_priced_is_refused(plan: ParallelismPlan, says: str) -> None:
    if plan.micro_batches == 1:
        orders = (("0F0", "2F0", "2B0", "0B0"), ("1F0", "3F0", "3B0", "1B0"))
        plan = replace(plan, schedule=Schedule(orders=orders))
    (violation,) = check(_blocks(), plan)
    assert says in violation


def test_stages_that_interleave_have_whole_blocks_of_one_layout() -> None:
    plan = _interleaved_plan()
    moved = (
        replace(plan.stages[0], operators=(0, 3), layout=(replace(plan.stages[0].layout[0], operators=(0, 3)),)),
        replace(plan.stages[1], operators=(3, 4), layout=(replace(plan.stages[1].layout[0], operators=(3, 4)),)),
        *plan.stages[2:],
    )
    assert any("blocks a stage" in line for line in check(_blocks(), replace(plan, stages=moved)))
    sharded = (replace(plan.stages[0], sharding=1), *plan.stages[1:])
    assert any("stages that interleave have one" in line for line in check(_blocks(), replace(plan, stages=sharded)))


def test_a_schedule_of_plain_stages_is_1f1b() -> None:
    problem = _problem([_one()] * 2, devices=2)
    stages = stage((0, 1), [0]), stage((1, 2), [1])
    plan = plan_of(*stages, micro_batch_size=2, micro_batches=2)
    good = (("0F0", "0F1", "0B0", "0B1"), ("1F0", "1B0", "1F1", "1B1"))
    assert check(problem, replace(plan, schedule=Schedule(orders=good))) == ()
    late = (good[0], ("1F0", "1F1", "1B0", "1B1"))
    (violation,) = check(problem, replace(plan, schedule=Schedule(orders=late)))
    assert "does not run 1F1B" in violation


def test_a_stage_of_several_nodes_has_whole_nodes() -> None:
    problem = _problem([_one()] * 2, devices=2, nodes=2, space=replace(SPACE, use_all_devices=False))
    whole = plan_of(stage((0, 2), [0, 1, 2, 3], data_parallel=4), micro_batch_size=4, micro_batches=1)
    assert check(problem, whole) == ()
    parts = plan_of(stage((0, 2), [1, 2], data_parallel=2), micro_batch_size=2, micro_batches=2)
    (violation,) = check(problem, parts)
    assert "a stage of several nodes has whole ones" in violation


def test_a_tensor_parallel_group_stays_in_its_node() -> None:
    problem = _problem([[profile(tensor_parallel=2, batch=2)]] * 2, devices=2, nodes=2)
    within = plan_of(
        stage((0, 2), [0, 1, 2, 3], tensor_parallel=2, data_parallel=2), micro_batch_size=4, micro_batches=1
    )
    assert check(problem, within) == ()
    across = plan_of(
        stage((0, 2), [0, 2, 1, 3], tensor_parallel=2, data_parallel=2), micro_batch_size=4, micro_batches=1
    )
    assert any("tensor-parallel group" in line for line in check(problem, across))


def test_one_layout_for_all_where_the_space_says_so() -> None:
    problem = _problem([_one()] * 2, devices=3, space=replace(SPACE, same_layout=True, use_all_devices=False))
    equal = plan_of(stage((0, 1), [0]), stage((1, 2), [1]), micro_batch_size=2, micro_batches=2)
    assert check(problem, equal) == ()
    mixed = plan_of(stage((0, 1), [0, 1], data_parallel=2), stage((1, 2), [2]), micro_batch_size=2, micro_batches=2)
    (violation,) = check(problem, mixed)
    assert "space.same_layout wants one" in violation


def test_a_problem_says_what_full_needs() -> None:
    plain = chain_of([_one()])
    with pytest.raises(ValueError, match="what training holds of a parameter"):
        replace(plain, cost_model="full")
    with pytest.raises(ValueError, match="one layout for a stage"):
        replace(plain, cost_model="full", bytes_per_parameter=EACH, space=replace(ANY_SPACE, layout="operator"))


def test_an_unprofiled_choice_is_named() -> None:
    problem = _problem([[profile()]], devices=2)
    with pytest.raises(InvalidPlanError, match="was not profiled"):
        evaluate(problem, plan_of(stage((0, 1), [0, 1])))
