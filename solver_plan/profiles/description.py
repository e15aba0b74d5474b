"""What a model file tells the planner: a chain of operators, each with its work, its tensors and its collectives.

A description names no device and no batch. Amounts are for ONE sample unless they say otherwise, and say how they
divide among tensor-parallel devices, so that `analytic` can price every batch and tensor parallel degree. An operator
is a unit that may be cut off, moved to another stage or recomputed: one torch module when the plan is run.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Annotated, Literal, Self

from annotated_types import Ge, Len
from pydantic import model_validator

from solver_plan.documents import Bytes, Count, Name, document, fail
from solver_plan.parallelism.problem import BytesPerParameter

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
    data_type: DataType | None = None
    """None: the model's."""

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward of one sample on all devices: 2 per multiply-add."""
        return 2 * self.count * self.rows * self.inner * self.columns


@document
class FusedAttention:
    """Scores, softmax and context in one kernel that never writes the scores (Dao, FlashAttention-2, 2023)."""

    heads: Count
    """Of the queries; divided among tensor-parallel devices."""
    queries: Count
    """Of one sample."""
    keys: Count
    head_dim: Count
    causal: bool

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward of one sample; half of them where a causal mask skips the rest."""
        return 4 * self.heads * self.queries * self.keys * self.head_dim // (2 if self.causal else 1)


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
    attention: FusedAttention | None = None
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
    shares_weights_with: Name | None = None
    """An operator before it with the same weights (a head tied to the embedding): what `weights` says counts only where
    the two lie on different stages, which then hold a copy each and sum their gradients."""
    partitions: Annotated[tuple[Partition, ...], Len(1)]
    """Index = the `partition` of a plan's layout."""


ADAM_16_BIT = BytesPerParameter(weight=2, gradient=2, optimizer_state=12)
"""Mixed precision (Micikevicius et al. 2018): master weights and both moments in 32 bit."""
ADAM_16_BIT_GRADIENTS_32_BIT = BytesPerParameter(weight=2, gradient=4, optimizer_state=12)
"""The same, gradients accumulated in 32 bit as Megatron-LM does."""
ADAM_32_BIT = BytesPerParameter(weight=4, gradient=4, optimizer_state=8)


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
    bytes_per_parameter: BytesPerParameter = ADAM_16_BIT
    modules: Callable[[], object] | None = None
    """Imports torch and returns the `solver_plan.execution.model.Model` that trains it; None: planned, but not run."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names: set[str] = set()
        kinds: dict[str, tuple[bool, tuple[Partition, ...]]] = {}
        for index, operator in enumerate(self.operators):
            if operator.name in names:
                raise fail(f"operators[{index}].name", operator.name, "names are unique")
            if operator.shares_weights_with is not None and operator.shares_weights_with not in names:
                place = f"operators[{index}].shares_weights_with"
                raise fail(place, operator.shares_weights_with, "weights are shared with an operator before this one")
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
        """Bytes of all weights in training precision, shared ones once."""
        owners = (operator for operator in self.operators if operator.shares_weights_with is None)
        return sum(operator.partitions[0].weights.per_device(1) for operator in owners)

    @property
    def forward_flops(self) -> int:
        """Floating-point operations of the matrix products of the forward of one sample."""
        work = [operator.partitions[0] for operator in self.operators]
        products = sum(product.flops for partition in work for product in partition.products)
        return products + sum(partition.attention.flops for partition in work if partition.attention is not None)
