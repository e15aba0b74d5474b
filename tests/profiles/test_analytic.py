import pytest

from solver_plan.documents import digest_of
from solver_plan.errors import InputError
from solver_plan.parallelism.problem import BytesPerParameter, Profile, RingRate
from solver_plan.profiles.analytic import collective_ms, profile, tensor_parallel_degrees
from solver_plan.profiles.cluster import NodeLink, read_cluster
from solver_plan.profiles.description import (
    Collective,
    MatrixProduct,
    MemoryPass,
    ModelDescription,
    OperatorDescription,
    Partition,
    Size,
)

V100 = read_cluster("v100_4x32gb")
LINK = NodeLink(
    latency_ms=0.01, bytes_per_s=1e9, collectives=(RingRate(devices=2, latency_ms=0.5, bus_bytes_per_s=2e9),)
)


def described(*partitions: Partition, divides: int = 4) -> ModelDescription:
    operators = tuple(
        OperatorDescription(name=f"op{index}", kind=f"op{index}", partitions=(partition,))
        for index, partition in enumerate(partitions)
    )
    return ModelDescription(
        name="m", data_type="float16", input_bytes=8, operators=operators, tensor_parallel_divides=divides
    )


def entry(entries: tuple[Profile, ...], batch: int, degree: int) -> Profile:
    return next(each for each in entries if each.key == (batch, degree, 0))


def test_an_all_reduce_moves_twice_what_an_all_gather_moves() -> None:
    reduce = Collective(kind="all_reduce", size=10**6)
    gather = Collective(kind="all_gather", size=10**6)
    assert collective_ms(reduce, LINK, 4, 2) == pytest.approx(0.5 + 2 * 0.5 * 4e6 / 2e9 * 1000)
    assert collective_ms(gather, LINK, 4, 2) == pytest.approx(0.5 + 0.5 * 4e6 / 2e9 * 1000)
    assert collective_ms(reduce, LINK, 4, 1) == 0


def test_small_operators_take_the_time_of_their_launches() -> None:
    small = Partition(passes=MemoryPass(forward=Size(whole=10)), forward_kernels=3, backward_kernels=7)
    only = entry(profile(described(small), V100, 1).profiles["op0"], 1, 1)
    assert only.forward_ms == pytest.approx(3 * 0.034)
    assert only.backward_ms == pytest.approx(7 * 0.034)


def test_memory_bound_operators_take_bytes_over_rate() -> None:
    wide = Partition(
        passes=MemoryPass(forward=Size(sharded=10**9), backward=Size(whole=10**9), backward_once=Size(whole=10**9))
    )
    entries = profile(described(wide), V100, 4).profiles["op0"]
    rate = 900e9 * 0.83 / 1000
    assert entry(entries, 2, 4).forward_ms == pytest.approx(2 * 10**9 / 4 / rate)
    assert entry(entries, 2, 4).backward_ms == pytest.approx(3 * 10**9 / rate)


def test_a_product_costs_its_backward_twice() -> None:
    dense = Partition(products=(MatrixProduct(rows=16384, inner=4096, columns=4096, split="columns"),))
    only = entry(profile(described(dense), V100, 1).profiles["op0"], 1, 1)
    assert only.backward_ms == pytest.approx(2 * only.forward_ms)


def test_collectives_are_inside_the_times() -> None:
    reduced = (Collective(kind="all_reduce", size=10**6),)
    plain = Partition(products=(MatrixProduct(rows=512, inner=512, columns=512, split="inner"),))
    sent = Partition(products=plain.products, forward_collectives=reduced, backward_collectives=reduced)
    for degree in (1, 2, 4):
        without = entry(profile(described(plain), V100, 1).profiles["op0"], 1, degree)
        with_them = entry(profile(described(sent), V100, 1).profiles["op0"], 1, degree)
        extra = collective_ms(reduced[0], V100.intra_node, 1, degree)
        assert with_them.forward_ms == pytest.approx(without.forward_ms + extra)
        assert with_them.backward_ms == pytest.approx(without.backward_ms + extra)


def test_tensors_grow_with_the_batch_and_weights_do_not() -> None:
    first = Partition(output=Size(sequence=100))
    second = Partition(weights=Size(sharded=400, whole=8), kept=Size(sharded=40, sequence=10), output=Size(sharded=20))
    entries = profile(described(first, second), V100, 4).profiles["op1"]
    at = entry(entries, 4, 2)
    assert (at.input_bytes, at.output_bytes, at.weight_bytes, at.activation_bytes) == (400, 40, 208, 120)
    assert entry(profile(described(first), V100, 4).profiles["op0"], 2, 1).input_bytes == 16


def test_every_divisor_of_the_batch_and_every_degree_that_divides_is_profiled() -> None:
    entries = profile(described(Partition(), divides=6), V100, 12).profiles["op0"]
    assert {each.key for each in entries} == {(b, t, 0) for b in (1, 2, 3, 4, 6, 12) for t in (1, 2)}
    assert tensor_parallel_degrees(described(Partition(), divides=8), V100) == (1, 2, 4)


def test_what_does_not_fit_a_device_is_left_out() -> None:
    heavy = Partition(kept=Size(sharded=10 * 2**30))
    keys = {each.key for each in profile(described(heavy), V100, 4).profiles["op0"]}
    assert (2, 1, 0) in keys
    assert (4, 1, 0) not in keys
    assert (4, 2, 0) in keys


def test_an_operator_that_fits_nowhere_is_named() -> None:
    with pytest.raises(InputError, match=r"operator op0 alone needs .* bytes at batch 1 .* take larger devices"):
        profile(described(Partition(weights=Size(whole=5 * 2**30))), V100, 4)


@pytest.mark.parametrize(("batch", "batches"), [(0, None), (8, [3]), (8, [0]), (8, [])])
def test_batches_that_cannot_be_are_refused(batch: int, batches: list[int] | None) -> None:
    with pytest.raises(InputError, match="batch"):
        profile(described(Partition()), V100, batch, batches=batches)


def test_one_kind_after_different_tensors_is_refused() -> None:
    big, small, after = Partition(output=Size(whole=9)), Partition(output=Size(whole=5)), Partition(kept=Size(whole=1))
    chain = [("a", "big", big), ("b", "after", after), ("c", "small", small), ("d", "after", after)]
    operators = tuple(OperatorDescription(name=n, kind=k, partitions=(p,)) for n, k, p in chain)
    model = ModelDescription(
        name="m", data_type="float16", input_bytes=1, operators=operators, tensor_parallel_divides=1
    )
    with pytest.raises(InputError, match=r"operator d of kind after receives a tensor of another size"):
        profile(model, V100, 1)


def test_the_same_problem_twice() -> None:
    model = described(Partition(weights=Size(sharded=64)))
    assert digest_of(profile(model, V100, 8)) == digest_of(profile(model, V100, 8))


def test_what_the_full_cost_model_needs_is_in_the_problem() -> None:
    reduced = (Collective(kind="all_reduce", size=10**6),)
    body = Partition(weights=Size(sharded=64), kept=Size(sequence=100), backward_collectives=reduced)
    first = OperatorDescription(name="embedding", kind="embedding", partitions=(body,))
    last = OperatorDescription(name="head", kind="head", shares_weights_with="embedding", partitions=(body,))
    model = ModelDescription(
        name="m", data_type="float16", input_bytes=0, operators=(first, last), tensor_parallel_divides=4
    )
    problem = profile(model, V100, 4, sequence_parallel=True)
    at = entry(problem.profiles["embedding"], 2, 4)
    assert at.backward_collective_ms == pytest.approx(collective_ms(reduced[0], V100.intra_node, 2, 4))
    assert at.forward_collective_ms == 0
    assert at.activation_bytes == 2 * 25
    assert problem.sequence_parallel
    assert problem.operators[1].shares_weights_with == "embedding"
    assert problem.bytes_per_parameter == BytesPerParameter(weight=2, gradient=2, optimizer_state=12)
    assert problem.cluster.collectives == V100.intra_node.collectives
    assert problem.cluster.device_memory_bytes_per_s == pytest.approx(900e9 * 0.83)
