"""The `full` cost model's formulas, against cases small enough to count by hand and a simulation of 1F1B."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from solver_plan.parallelism.costs.full import (
    CONTENTION,
    Ring,
    StageWork,
    bound_ms,
    exposed_ms,
    exposed_transfers,
    in_flight,
    iteration_ms,
    memory_bytes,
    optimizer_ms,
    pipeline_ms,
    ring_between_nodes,
    state_bytes,
    traffic,
)

ALONE = Ring(devices=1, latency_ms=0.5, bus_bytes_per_s=1e9)
FOUR = Ring(devices=4, latency_ms=0.5, bus_bytes_per_s=1e9)
STAGE = StageWork(
    forward_ms=10,
    backward_ms=20,
    weight_bytes=2e9,
    gradient_bytes=4e9,
    optimizer_state_bytes=12e9,
    replicas=FOUR,
    pieces=4,
)
times = st.lists(st.integers(1, 20), min_size=1, max_size=5)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    assert FOUR.gather_ms(4e6) == pytest.approx(0.5 + 3)
    assert FOUR.all_reduce_ms(4e6) == pytest.approx(2 * 3.5)
    assert ALONE.gather_ms(4e6) == 0
    assert FOUR.gather_ms(0) == 0


def test_a_ring_between_nodes_has_the_adapters_of_its_members() -> None:
    inside = replace(FOUR, devices=16, bus_bytes_per_s=400e9)
    assert ring_between_nodes(16, 1, 8, inside, 360e9, 0.1).bus_bytes_per_s == pytest.approx(45e9)
    assert ring_between_nodes(16, 8, 8, inside, 360e9, 0.1).bus_bytes_per_s == pytest.approx(360e9)
    assert ring_between_nodes(16, 8, 8, inside, 900e9, 0.1).bus_bytes_per_s == pytest.approx(400e9)
    assert ring_between_nodes(8, 8, 8, inside, 360e9, 0.1) is inside


@pytest.mark.parametrize(
    ("sharding", "expected"),
    [
        (0, (0, 0, 2 * 3000.5, 0)),
        (1, (0, 0, 3000.5, 1500.5)),
        (2, (0, 3000.5, 0, 1500.5)),
        (3, (1500.5, 1500.5 + 3000.5, 0, 0)),
    ],
)
def test_traffic_of_each_sharding(sharding: int, expected: tuple[float, ...]) -> None:
    sent = traffic(replace(STAGE, sharding=sharding))
    assert (sent.forward_ms, sent.backward_ms, sent.reduction_ms, sent.gather_ms) == pytest.approx(expected)


def test_the_last_piece_of_communication_stays_exposed() -> None:
    """Pieces of 2 ms behind computation of 10 ms each: only the last one is seen, the rest costs its contention."""
    assert exposed_ms(8, 40, 4) == pytest.approx(2 + CONTENTION * 6)


def test_communication_longer_than_computation_is_exposed_by_the_difference() -> None:
    """Four pieces of 10 ms behind 4 x 1 ms: the first starts at 1 ms, all end at 41 ms, 37 after the computation."""
    assert exposed_ms(40, 4, 4) == pytest.approx(37 + CONTENTION * 3)


def test_communication_in_one_piece_is_exposed() -> None:
    assert exposed_ms(8, 40, 1) == 8
    assert exposed_ms(0, 40, 4) == 0


def test_equal_stages_have_the_bubble_of_1f1b_and_interleaving_divides_it() -> None:
    assert pipeline_ms([3, 3, 3, 3], 8) == (8 + 3) * 3
    assert pipeline_ms([3, 3, 3, 3], 8, virtual_stages=3) == (8 + 1) * 3


def one_forward_one_backward(forward: list[int], backward: list[int], micro_batches: int) -> int:
    """Play 1F1B by relaxation: start of each action is the latest end of what it needs."""
    stages = len(forward)
    end: dict[tuple[str, int, int], int] = {}
    orders = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, micro_batches)
        order = [("F", index) for index in range(ahead)]
        for index in range(micro_batches):
            order += [("F", index + ahead)] * (index + ahead < micro_batches) + [("B", index)]
        orders.append(order)
    position, free = [0] * stages, [0] * stages
    while any(position[stage] < 2 * micro_batches for stage in range(stages)):
        for stage in range(stages):
            while position[stage] < 2 * micro_batches:
                kind, index = orders[stage][position[stage]]
                neighbour = stage - 1 if kind == "F" else stage + 1
                needed = 0 if not 0 <= neighbour < stages else end.get((kind, neighbour, index))
                if needed is None:
                    break
                length = forward[stage] if kind == "F" else backward[stage]
                free[stage] = end[kind, stage, index] = max(free[stage], needed) + length
                position[stage] += 1
    return max(end.values())


@given(forward=times, micro_batches=st.integers(1, 8), factor=st.integers(1, 3))
def test_the_bound_holds_for_a_played_pipeline(forward: list[int], micro_batches: int, factor: int) -> None:
    backward = [factor * each for each in forward]
    played = one_forward_one_backward(forward, backward, micro_batches)
    assert bound_ms(forward, backward, micro_batches) <= played


@given(work=st.integers(1, 9), stages=st.integers(1, 6), extra=st.integers(0, 10))
def test_equal_stages_are_played_as_the_formula_says(work: int, stages: int, extra: int) -> None:
    micro_batches = stages + extra
    played = one_forward_one_backward([work] * stages, [2 * work] * stages, micro_batches)
    assert pipeline_ms([3 * work] * stages, micro_batches) == played
    assert bound_ms([work] * stages, [2 * work] * stages, micro_batches) == played


def test_an_iteration_of_one_device_is_its_work_and_the_optimizer() -> None:
    alone = replace(STAGE, replicas=ALONE)
    assert optimizer_ms(alone, 1e12) == pytest.approx((8 + 24 + 2) / 1e3 * 1e3)
    assert iteration_ms([alone], 4, memory_bytes_per_s=1e12) == pytest.approx(4 * 30 + 34)


def test_without_overlap_all_of_the_reduction_is_seen() -> None:
    together = iteration_ms([STAGE], 4, memory_bytes_per_s=1e12, overlapped=False, shared_ms=7)
    assert together == pytest.approx(4 * 30 + 2 * 3000.5 + 7 + 34)


def test_the_reduction_of_a_later_stage_hides_behind_the_backward_of_the_stages_before() -> None:
    quiet = replace(STAGE, replicas=ALONE)
    noisy = replace(STAGE, gradient_bytes=4e6, weight_bytes=0, optimizer_state_bytes=0)
    base = iteration_ms([replace(noisy, replicas=ALONE), replace(noisy, replicas=ALONE)], 4, memory_bytes_per_s=1e30)
    last = iteration_ms([replace(noisy, replicas=ALONE), noisy], 4, memory_bytes_per_s=1e30)
    first = iteration_ms([noisy, replace(noisy, replicas=ALONE)], 4, memory_bytes_per_s=1e30)
    assert last == pytest.approx(base)
    assert first > base
    assert quiet.stage_ms == 30


def test_optimizer_of_sharded_states_works_on_a_share() -> None:
    assert optimizer_ms(replace(STAGE, sharding=1), 1e12) == pytest.approx(optimizer_ms(STAGE, 1e12) / 4)


@pytest.mark.parametrize(
    ("sharding", "expected"), [(0, 18e9), (1, 2e9 + 4e9 + 3e9), (2, 2e9 + 1e9 + 3e9), (3, 0.5e9 + 1e9 + 1e9 + 3e9)]
)
def test_states_of_each_sharding(sharding: int, expected: float) -> None:
    assert state_bytes(replace(STAGE, sharding=sharding)) == expected


def test_memory_adds_what_is_held_and_brought_back() -> None:
    assert memory_bytes(STAGE, 2.5, 1e9, 3e9, 4e9) == 18e9 + 2.5e9 + 7e9


def test_in_flight_falls_along_the_pipeline() -> None:
    assert [in_flight(4, stage, 16) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight(4, 0, 2) == 2
    assert in_flight(8, 0, 64, virtual_stages=2) == pytest.approx(8 + 7 / 2)
    assert in_flight(8, 7, 64, virtual_stages=2) == pytest.approx(9 / 2)


def test_overlap_hides_no_transfer_of_a_pipeline_that_only_fills_and_drains() -> None:
    assert exposed_transfers(2, 2, 42) == 1
    assert exposed_transfers(8, 64, 1) == pytest.approx(14 / 64)
    assert exposed_transfers(8, 64, 6) == pytest.approx((14 + 40) / 384)
    assert exposed_transfers(1, 4, 1) == 0
