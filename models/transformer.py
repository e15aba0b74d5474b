"""Operators of transformers: what GPT, Llama and T5 are made of. Planning only; no torch.

Work and tensors are those of one sample. `stream` is the hidden state, s h elements. Column-parallel products
all-reduce the gradient of their input, row-parallel ones their output (Megatron-LM, Shoeybi et al. 2019). Activations
kept follow Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (MLSys 2023), section 4:
each operator keeps its own output if its successor needs it for the backward, and its dropout mask. What precedes and
follows the matrix products of a layer is kept by sequence, so that it divides with sequence parallelism.
"""

from dataclasses import dataclass
from typing import Literal

from solver_plan.parallelism.problem import BytesPerParameter
from solver_plan.profiles.description import (
    ADAM_16_BIT,
    Collective,
    DataType,
    FusedAttention,
    MatrixProduct,
    MemoryPass,
    OperatorDescription,
    Partition,
    Size,
)

ELEMENT = 2
"""Bytes of an element of weights and activations: 16-bit training."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """How often (forward, backward) the kernels around the products move a tensor's size."""

    embedding: tuple[float, float]
    """Times the stream."""
    embedding_weights: float
    """Times the token table, once a micro-batch, in the backward."""
    norm: tuple[float, float]
    """Times the stream; the backward adds the gradient of the residual."""
    qkv: tuple[float, float]
    """Times queries, keys and values: bias, splitting, rotation."""
    softmax: tuple[float, float]
    """Times the scores."""
    dropout: tuple[float, float]
    """Times the scores."""
    projection: tuple[float, float]
    """Times the stream's shard: copies around a row-parallel product."""
    residual: tuple[float, float]
    """Times the stream: bias, dropout, adding."""
    mlp_in: tuple[float, float]
    """Times its output."""
    activation: tuple[float, float]
    """Times its output, with one input."""
    gated: tuple[float, float]
    """Times its output, with two inputs."""
    loss: tuple[float, float]
    """Times the logits in 32 bit."""
    gradient_sum: float
    """Times the weights, once a micro-batch: adding to the gradient of the micro-batches before."""


SEPARATE = Passes(
    embedding=(8, 12),
    embedding_weights=4.5,
    norm=(2.6, 10),
    qkv=(5.3, 4.7),
    softmax=(1.7, 2.3),
    dropout=(2.7, 2.3),
    projection=(4, 3),
    residual=(8.2, 4.3),
    mlp_in=(2, 1),
    activation=(2, 3.8),
    gated=(5, 8),
    loss=(8, 2),
    gradient_sum=0,
)
"""A kernel for each step: Megatron-LM of 2021 as profiled by Aceso (EuroSys 2024), measured time over memory rate."""

FUSED = Passes(
    embedding=(3, 2),
    embedding_weights=2,
    norm=(2, 4),
    qkv=(1.4, 1.4),
    softmax=(2, 3),
    dropout=(2.5, 2.5),
    projection=(0, 0),
    residual=(3, 1),
    mlp_in=(0, 0),
    activation=(2, 3),
    gated=(3, 5),
    loss=(4, 2),
    gradient_sum=4,
)
"""Fused kernels (Transformer Engine, torch.compile): each input read once, each output written once. Gradients are
summed in 32 bit, read and written: 8 bytes for a weight of 2."""


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """Shape of a transformer, and how it is computed."""

    name: str
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    head_dim: int
    feed_forward: int
    sequence: int
    vocabulary: int
    gated: bool = False
    """Two products into the MLP, one gating the other (Shazeer 2020), without biases."""
    learned_positions: bool = False
    tied_head: bool = False
    """The head multiplies with the token embedding's weights."""
    causal: bool = True
    dropout: bool = False
    attention: Literal["eager", "flash"] = "flash"
    passes: Passes = FUSED
    data_type: DataType = "bfloat16"
    """Of the products with weights; attention stays in 16 bit."""
    bytes_per_parameter: BytesPerParameter = ADAM_16_BIT

    @property
    def stream(self) -> int:
        """Bytes of the hidden state of a sample."""
        return self.sequence * self.hidden * ELEMENT

    @property
    def query_key_value(self) -> int:
        """Width of the product that makes queries, keys and values."""
        return (self.heads + 2 * self.key_value_heads) * self.head_dim

    @property
    def attended(self) -> int:
        """Width of what attention returns."""
        return self.heads * self.head_dim


def embedding(shape: Transformer) -> Partition:
    """Token embedding, with positions where they are learned."""
    stream = shape.stream
    tokens = Size(sharded=shape.vocabulary * shape.hidden * ELEMENT)
    positions = Size(whole=shape.sequence * shape.hidden * ELEMENT if shape.learned_positions else 0)
    return Partition(
        passes=MemoryPass(
            forward=Size(sequence=stream) * shape.passes.embedding[0],
            backward=Size(sequence=stream) * shape.passes.embedding[1],
            backward_once=tokens * shape.passes.embedding_weights,
        ),
        forward_kernels=12,
        backward_kernels=18,
        forward_collectives=(Collective(kind="all_reduce", size=stream),),
        weights=tokens + positions,
        kept=Size(sequence=stream + _mask(shape)),
        output=Size(sequence=stream),
        forward_workspace=Size(sequence=stream),
        backward_workspace=Size(sequence=stream),
    )


def norm(shape: Transformer, *, last: bool = False) -> Partition:
    """Layer or RMS normalisation; the residual goes past it, except past the last one."""
    stream = shape.stream
    vectors = 1 if shape.gated else 2
    return Partition(
        passes=_passes(shape.passes.norm, Size(sequence=stream)),
        forward_kernels=2 if last else 1,
        backward_kernels=4,
        weights=Size(whole=vectors * shape.hidden * ELEMENT),
        kept=Size(sequence=_product_input(shape, stream)),
        output=Size(sequence=stream if last else 2 * stream),
        backward_workspace=Size(sequence=3 * stream),
    )


def attention_layer(
    shape: Transformer, prefix: str = "attention", source: int | None = None
) -> list[tuple[str, Partition]]:
    """Attention from the products that make queries, keys and values to adding the residual.

    `source` is the length of the sequence that keys and values are made of, where it is not the stream itself.
    """
    keys = shape.sequence if source is None else source
    core = _eager_core(shape, keys) if shape.attention == "eager" else [("core", _flash_core(shape, keys))]
    made = _query_key_value(shape) if source is None else _cross_query_key_value(shape, source)
    parts = [("qkv", made), *core, ("dense", _row_parallel(shape, shape.attended))]
    return [(f"{prefix}_{name}", partition) for name, partition in [*parts, ("dropout_add", residual_add(shape))]]


def mlp_layer(shape: Transformer) -> list[tuple[str, Partition]]:
    """Two or three products with an activation between them, to adding the residual."""
    stream, residual = shape.stream, Size(sequence=shape.stream)
    wide = Size(sharded=shape.sequence * shape.feed_forward * ELEMENT)
    ways = 2 if shape.gated else 1
    columns = ways * shape.feed_forward
    into = Partition(
        products=(_weight_product(shape, shape.hidden, columns, "columns"),),
        passes=_with_weights(shape, shape.passes.mlp_in, wide * ways, shape.hidden * columns),
        forward_kernels=3,
        backward_kernels=5,
        backward_collectives=(Collective(kind="all_reduce", size=stream),),
        weights=Size(sharded=columns * (shape.hidden + _bias(shape)) * ELEMENT),
        kept=wide * ways,
        output=residual + wide * ways,
        backward_workspace=wide * ways + Size(sequence=2 * stream),
    )
    activation = Partition(
        passes=_passes(shape.passes.gated if shape.gated else shape.passes.activation, wide),
        backward_kernels=3,
        kept=Size(sharded=_product_input(shape, wide.sharded)),
        output=residual + wide,
        backward_workspace=wide * (1 + 2 * ways),
    )
    out = _row_parallel(shape, shape.feed_forward)
    return [
        ("mlp_in", into),
        ("mlp_activation", activation),
        ("mlp_out", out),
        ("mlp_dropout_add", residual_add(shape)),
    ]


def residual_add(shape: Transformer) -> Partition:
    """Bias, dropout, and adding the residual."""
    stream = shape.stream
    return Partition(
        passes=_passes(shape.passes.residual, Size(sequence=stream)),
        forward_kernels=3,
        backward_kernels=2,
        kept=Size(sequence=stream + _mask(shape)),
        output=Size(sequence=stream),
        forward_workspace=Size(sequence=stream),
        backward_workspace=Size(sequence=3 * stream),
    )


def head(shape: Transformer) -> Partition:
    """Logits and cross-entropy in 32 bit, on the vocabulary's shard."""
    logits, stream = shape.sequence * shape.vocabulary, shape.stream
    weights = Size(sharded=shape.vocabulary * shape.hidden * ELEMENT)
    product = MatrixProduct(
        rows=shape.sequence,
        inner=shape.hidden,
        columns=shape.vocabulary,
        split="columns",
        data_type="bfloat16" if shape.data_type == "float8" else None,
    )
    return Partition(
        products=(product,),
        passes=MemoryPass(
            forward=Size(sharded=4 * logits) * shape.passes.loss[0],
            backward=Size(sharded=4 * logits) * shape.passes.loss[1],
            backward_once=weights * shape.passes.gradient_sum,
        ),
        forward_kernels=25,
        backward_kernels=20,
        forward_collectives=(Collective(kind="all_reduce", size=4 * shape.sequence),) * 3,
        backward_collectives=(Collective(kind="all_reduce", size=stream),),
        weights=weights,
        kept=Size(sharded=4 * logits),
        forward_workspace=Size(sharded=2 * logits),
        backward_workspace=Size(sharded=2 * logits, sequence=stream),
    )


def blocks(
    count: int, layer: list[tuple[str, Partition]], name: str = "layer", prefix: str = ""
) -> tuple[OperatorDescription, ...]:
    """Return so many equal layers, each a block."""
    return tuple(
        OperatorDescription(
            name=f"{name}{index}.{kind}", kind=prefix + kind, block_start=place == 0, partitions=(partition,)
        )
        for index in range(count)
        for place, (kind, partition) in enumerate(layer)
    )


def chain(shape: Transformer, layer: list[tuple[str, Partition]]) -> tuple[OperatorDescription, ...]:
    """Embedding, the layers, the last normalisation and the head, as one chain."""
    return (
        OperatorDescription(name="embedding", kind="embedding", partitions=(embedding(shape),)),
        *blocks(shape.layers, layer),
        OperatorDescription(name="final_norm", kind="final_norm", partitions=(norm(shape, last=True),)),
        OperatorDescription(
            name="head",
            kind="head",
            shares_weights_with="embedding" if shape.tied_head else None,
            partitions=(head(shape),),
        ),
    )


def decoder_layer(shape: Transformer) -> list[tuple[str, Partition]]:
    """Normalisation and attention, normalisation and MLP, each with its residual."""
    return [("first_norm", norm(shape)), *attention_layer(shape), ("second_norm", norm(shape)), *mlp_layer(shape)]


def _query_key_value(shape: Transformer) -> Partition:
    stream = shape.stream
    made = Size(sharded=shape.sequence * shape.query_key_value * ELEMENT)
    return Partition(
        products=(_weight_product(shape, shape.hidden, shape.query_key_value, "columns"),),
        passes=_with_weights(shape, shape.passes.qkv, made, shape.hidden * shape.query_key_value),
        forward_kernels=6,
        backward_kernels=13,
        backward_collectives=(Collective(kind="all_reduce", size=stream),),
        weights=Size(sharded=shape.query_key_value * (shape.hidden + _bias(shape)) * ELEMENT),
        kept=made,
        output=Size(sequence=stream) + made,
        forward_workspace=made,
        backward_workspace=made * 2 + Size(sequence=2 * stream),
    )


def _cross_query_key_value(shape: Transformer, source: int) -> Partition:
    """Queries of the stream, keys and values of another sequence of the same width."""
    queries, pairs = shape.attended, 2 * shape.key_value_heads * shape.head_dim
    made = Size(sharded=(shape.sequence * queries + source * pairs) * ELEMENT)
    entering = Size(sequence=(shape.sequence + source) * shape.hidden * ELEMENT)
    return Partition(
        products=(
            _weight_product(shape, shape.hidden, queries, "columns"),
            MatrixProduct(rows=source, inner=shape.hidden, columns=pairs, split="columns"),
        ),
        passes=_with_weights(shape, shape.passes.qkv, made, shape.hidden * (queries + pairs), entering),
        forward_kernels=8,
        backward_kernels=17,
        backward_collectives=(Collective(kind="all_reduce", size=entering.sequence),),
        weights=Size(sharded=(queries + pairs) * (shape.hidden + _bias(shape)) * ELEMENT),
        kept=made,
        output=Size(sequence=shape.stream) + made,
        forward_workspace=made,
        backward_workspace=made * 2 + entering * 2,
    )


def _eager_core(shape: Transformer, keys: int) -> list[tuple[str, Partition]]:
    """Scores, softmax, dropout and context, the scores written to memory in between."""
    sequence, heads, width = shape.sequence, shape.heads, shape.head_dim
    scores = heads * sequence * keys * ELEMENT
    attended = sequence * shape.attended * ELEMENT
    values = keys * shape.key_value_heads * width * ELEMENT
    residual = Size(sequence=shape.stream)
    beside = residual + Size(sharded=values + scores)
    score = Partition(
        products=(MatrixProduct(rows=sequence, inner=width, columns=keys, count=heads, weight=False, split="count"),),
        forward_kernels=2,
        backward_kernels=5,
        output=beside,
        forward_workspace=Size(sharded=scores),
        backward_workspace=Size(sharded=scores + 4 * attended),
    )
    softmax = Partition(
        passes=_passes(shape.passes.softmax, Size(sharded=scores)),
        backward_kernels=3,
        kept=Size(sharded=scores),
        output=beside,
        backward_workspace=Size(sharded=2 * scores),
    )
    dropout = Partition(
        passes=_passes(shape.passes.dropout, Size(sharded=scores)),
        backward_kernels=2,
        kept=Size(sharded=scores + scores // ELEMENT),
        output=beside,
        backward_workspace=Size(sharded=2 * scores),
    )
    context = Partition(
        products=(MatrixProduct(rows=sequence, inner=keys, columns=width, count=heads, weight=False, split="count"),),
        forward_kernels=2,
        backward_kernels=4,
        kept=Size(sharded=attended),
        output=residual + Size(sharded=attended),
        backward_workspace=Size(sharded=scores + 2 * attended),
    )
    parts = [("score", score), ("softmax", softmax), ("dropout", dropout), ("context", context)]
    return parts if shape.dropout else [part for part in parts if part[0] != "dropout"]


def _flash_core(shape: Transformer, keys: int) -> Partition:
    attended = Size(sharded=shape.sequence * shape.attended * ELEMENT)
    statistics = Size(sharded=4 * shape.heads * shape.sequence)
    return Partition(
        attention=FusedAttention(
            heads=shape.heads,
            queries=shape.sequence,
            keys=keys,
            head_dim=shape.head_dim,
            causal=shape.causal,
        ),
        forward_kernels=2,
        backward_kernels=4,
        kept=attended + statistics,
        output=Size(sequence=shape.stream) + attended,
        backward_workspace=attended * 4,
    )


def _row_parallel(shape: Transformer, inner: int) -> Partition:
    stream = shape.stream
    entering = Size(sharded=shape.sequence * inner * ELEMENT)
    return Partition(
        products=(_weight_product(shape, inner, shape.hidden, "inner"),),
        passes=_with_weights(shape, shape.passes.projection, Size(sharded=stream), inner * shape.hidden, entering),
        forward_kernels=2,
        backward_kernels=5,
        forward_collectives=(Collective(kind="all_reduce", size=stream),),
        weights=Size(sharded=inner * shape.hidden * ELEMENT, whole=_bias(shape) * shape.hidden * ELEMENT),
        output=Size(sequence=2 * stream),
        forward_workspace=Size(sequence=stream),
        backward_workspace=entering + Size(sequence=stream),
    )


def _weight_product(shape: Transformer, inner: int, columns: int, split: Literal["columns", "inner"]) -> MatrixProduct:
    return MatrixProduct(rows=shape.sequence, inner=inner, columns=columns, split=split)


def _passes(counts: tuple[float, float], tensor: Size) -> MemoryPass:
    return MemoryPass(forward=tensor * counts[0], backward=tensor * counts[1])


def _with_weights(
    shape: Transformer, counts: tuple[float, float], tensor: Size, weights: int, entering: Size | None = None
) -> MemoryPass:
    """Passes of an operator with weights: its own, adding to the gradients, and casts to 8 bit.

    In 8 bit every factor is needed transposed as well. The kernel before the product casts its input, which leaves the
    transposition: 1 byte read, 1 written. The gradient of the output is cast and transposed: 2 read, 1 + 1 written.
    """
    transposed, cast = (1.0, 2.0) if shape.data_type == "float8" else (0.0, 0.0)
    entering = Size(sequence=shape.stream) if entering is None else entering
    return MemoryPass(
        forward=tensor * counts[0] + entering * transposed,
        backward=tensor * (counts[1] + cast),
        backward_once=Size(sharded=weights * ELEMENT) * shape.passes.gradient_sum,
    )


def _product_input(shape: Transformer, size: int) -> int:
    """Bytes kept of the input of a product with weights: in 8 bit where the product is."""
    return size // ELEMENT if shape.data_type == "float8" else size


def _mask(shape: Transformer) -> int:
    """Bytes of a dropout mask of the stream: one for each element."""
    return shape.sequence * shape.hidden if shape.dropout else 0


def _bias(shape: Transformer) -> int:
    return 0 if shape.gated else 1
