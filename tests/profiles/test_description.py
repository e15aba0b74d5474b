import pytest
from pydantic import ValidationError

from solver_plan.profiles.description import MatrixProduct, ModelDescription, OperatorDescription, Partition, Size

LINEAR = Partition(
    products=(MatrixProduct(rows=8, inner=4, columns=6, split="columns"),),
    weights=Size(sharded=48),
    kept=Size(sharded=96),
)


def model(*operators: OperatorDescription) -> ModelDescription:
    return ModelDescription(
        name="m", data_type="float16", input_bytes=64, operators=operators, tensor_parallel_divides=2
    )


def test_a_size_divides_what_is_sharded_and_with_sequence_parallelism_the_sequence_too() -> None:
    size = Size(whole=10, sharded=100, sequence=1000)
    assert size.per_device(1) == 1110
    assert size.per_device(4) == 10 + 25 + 1000
    assert size.per_device(4, sequence_parallel=True) == 10 + 275


def test_a_share_that_is_not_whole_is_rounded_up() -> None:
    assert Size(sharded=10).per_device(4) == 3


def test_sizes_add_and_scale() -> None:
    assert Size(whole=1, sharded=2) + Size(sharded=3, sequence=4) * 1.5 == Size(whole=1, sharded=6, sequence=6)


def test_weights_and_flops_sum_over_the_chain() -> None:
    first = OperatorDescription(name="a", kind="linear", partitions=(LINEAR,))
    second = OperatorDescription(name="b", kind="linear", partitions=(LINEAR,))
    described = model(first, second)
    assert described.weight_bytes == 96
    assert described.forward_flops == 2 * 2 * 8 * 4 * 6
    assert list(described.kinds) == ["linear"]


def test_a_name_used_twice_is_refused() -> None:
    operator = OperatorDescription(name="a", kind="linear", partitions=(LINEAR,))
    with pytest.raises(ValidationError, match="names are unique"):
        model(operator, operator)


def test_operators_of_one_kind_that_differ_are_refused() -> None:
    other = Partition(weights=Size(sharded=1))
    with pytest.raises(ValidationError, match="equal but for their name"):
        model(
            OperatorDescription(name="a", kind="linear", partitions=(LINEAR,)),
            OperatorDescription(name="b", kind="linear", partitions=(other,)),
        )
