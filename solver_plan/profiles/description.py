"""What a model file tells the planner: a chain of operators, each with its work, its tensors and its collectives.

A description names no device and no batch. Amounts are for ONE sample unless they say otherwise, and say how they
divide among tensor-parallel devices, so that `analytic` can price every batch and tensor parallel degree. An operator
is a unit that may be cut off, moved to another stage or recomputed: one torch module when the plan is run.
"""

from functools import cached_property
from typing import Annotated, Literal, Self

from annotated_types import Ge, Le, Len
from pydantic import model_validator

from solver_plan.documents import Bytes, Count, Name, document, fail

DataType = Literal["float8", "float16", "bfloat16", "float32"]
BYTES_PER_ELEMENT: dict[DataType, int] = {"float8": 1, "float16": 2, "bfloat16": 2, "float32": 4}


@document
class Size:
    """Bytes, by how they divide among t tensor-parallel devices."""

    whole: Bytes = 0
    """Every device holds all of it."""
    sharded: Bytes = 0
    """Each device holds 1 / t."""
    sequence: Bytes = 0
    """Each device holds all, or 1 / t with sequence parallelism (Korthikanti et al., MLSys 2023, section 4.2.2)."""

    def per_device(self, tensor_parallel: int, sequence_parallel: bool = False) -> int:
        """Return the bytes on one device."""
        split = self.sharded + (self.sequence if sequence_parallel else 0)
        return self.whole + (0 if sequence_parallel else self.sequence) + -(-split // tensor_parallel)

    def __add__(self, other: "Size") -> "Size":
        return Size(
            whole=self.whole + other.whole,
            sharded=self.sharded + other.sharded,
            sequence=self.sequence + other.sequence,
        )

    def __mul__(self, factor: float) -> "Size":
        return Size(
            whole=round(self.whole * factor),
            sharded=round(self.sharded * factor),
            sequence=round(self.sequence * factor),
        )


NOTHING = Size()


@document
class MatrixProduct:
    """Products of (rows x inner) with (inner x columns); the backward does two of the same size for each."""

    rows: Count
    """Of one sample."""
    inner: Count
    columns: Count
    count: Count = 1
    """Products of one sample, such as attention heads."""
    weight: bool = True
    """The second factor is a weight: the rows of all samples of a micro-batch form one product."""
    split: Literal["columns", "inner", "count", "none"]
    """What is divided among tensor-parallel devices; none: every device does all of it."""

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward of one sample on all devices: 2 per multiply-add."""
        return 2 * self.count * self.rows * self.inner * self.columns


@document
class MemoryPass:
    """Kernels whose time is that of the memory: element-wise operations, normalisation, copies, embeddings."""

    forward: Size = NOTHING
    """Bytes read and written by the forward of one sample."""
    backward: Size = NOTHING
    backward_once: Size = NOTHING
    """Bytes that the backward of a micro-batch moves whatever its size, such as the gradient of an embedding."""


@document
class Collective:
    """Communication among the tensor-parallel devices of a replica."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
    size: Annotated[int, Ge(1)]
    """Bytes of the whole tensor of one sample."""


@document
class Partition:
    """One way to spread an operator over tensor-parallel devices, and what it then costs."""

    products: tuple[MatrixProduct, ...] = ()
    passes: MemoryPass = MemoryPass()
    forward_kernels: Count = 1
    """Kernels that the forward launches: their launches are a floor under its time."""
    backward_kernels: Count = 2
    forward_collectives: tuple[Collective, ...] = ()
    backward_collectives: tuple[Collective, ...] = ()
    weights: Size = NOTHING
    """Bytes of the weights in training precision; not per sample."""
    kept: Size = NOTHING
    """Activations held for the backward, beside the input of the chain: what a run of recomputed operators drops."""
    output: Size = NOTHING
    """What leaves the operator, with what is carried past it (residual): the payload of a pipeline cut behind it."""
    forward_workspace: Size = NOTHING
    """Memory taken beside while the forward runs."""
    backward_workspace: Size = NOTHING
    """The same for the backward: gradients of what leaves and of what enters."""


@document
class OperatorDescription:
    """One operator of the chain; operators of the same kind differ in nothing but their name."""

    name: Name
    kind: Name
    block_start: bool = False
    """The first operator of a repeated block."""
    partitions: Annotated[tuple[Partition, ...], Len(1)]
    """Index = the `partition` of a plan's layout."""


@document
class ModelDescription:
    """A model to train: what planning needs to know of it."""

    name: Name
    data_type: DataType
    tokens_per_sample: Count = 1
    input_bytes: Bytes
    """What one sample brings into the first operator."""
    operators: Annotated[tuple[OperatorDescription, ...], Len(1)]
    tensor_parallel_divides: Count
    """A tensor parallel degree must divide this: the greatest common divisor of heads, widths and padded vocabulary."""
    state_bytes_per_weight_byte: Annotated[float, Ge(1), Le(100)] = 8.0
    """Weights, gradients, master weights and moments for each byte of weights: 8 for 16-bit training with Adam (2 + 2 +
    4 + 4 + 4 bytes for each parameter of 2), 4 for 32-bit."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names: set[str] = set()
        kinds: dict[str, tuple[bool, tuple[Partition, ...]]] = {}
        for index, operator in enumerate(self.operators):
            if operator.name in names:
                raise fail(f"operators[{index}].name", operator.name, "names are unique")
            names.add(operator.name)
            known = kinds.setdefault(operator.kind, (operator.block_start, operator.partitions))
            if known[1] is not operator.partitions and known != (operator.block_start, operator.partitions):
                raise fail(
                    f"operators[{index}].kind", operator.kind, "operators of one kind are equal but for their name"
                )
        return self

    @cached_property
    def kinds(self) -> dict[str, OperatorDescription]:
        """The first operator of each kind, in the order of the chain."""
        found: dict[str, OperatorDescription] = {}
        for operator in self.operators:
            found.setdefault(operator.kind, operator)
        return found

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in training precision."""
        return sum(operator.partitions[0].weights.per_device(1) for operator in self.operators)

    @property
    def forward_flops(self) -> int:
        """Floating-point operations of the matrix products of the forward of one sample."""
        return sum(product.flops for operator in self.operators for product in operator.partitions[0].products)
