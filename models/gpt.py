"""GPT-3 as Megatron-LM builds it: 13 operators a layer, eager attention, 16-bit with Adam.

Sizes: Brown et al. (2020), table 2.1, in the variants of Aceso's evaluation (sequence length 2048, vocabulary 51200).
Activations kept: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (MLSys 2023),
section 4: a layer keeps s h (34 + 5 a s / h) bytes of a sample. Passes over memory and kernels are those of the layer's
element-wise operations, counted in Aceso's measured database (EuroSys 2024 artifact) by dividing time by memory rate.
"""

import math
from dataclasses import dataclass

from solver_plan.profiles.description import (
    Collective,
    MatrixProduct,
    MemoryPass,
    ModelDescription,
    OperatorDescription,
    Partition,
    Size,
)

ELEMENT = 2
"""Bytes of an element in 16-bit training."""


@dataclass(frozen=True, kw_only=True)
class GPT:
    """Shape of a GPT model."""

    name: str
    layers: int
    hidden: int
    heads: int
    sequence: int = 2048
    vocabulary: int = 51200

    @property
    def feed_forward(self) -> int:
        """Width of the MLP."""
        return 4 * self.hidden


def gpt3_350m() -> ModelDescription:
    """24 layers of 1024."""
    return describe(GPT(name="gpt3-350M", layers=24, hidden=1024, heads=16))


def gpt3_1_3b() -> ModelDescription:
    """24 layers of 2048; 32 heads."""
    return describe(GPT(name="gpt3-1.3B", layers=24, hidden=2048, heads=32))


def gpt3_2_6b() -> ModelDescription:
    """32 layers of 2560."""
    return describe(GPT(name="gpt3-2.6B", layers=32, hidden=2560, heads=32))


def gpt3_6_7b() -> ModelDescription:
    """32 layers of 4096."""
    return describe(GPT(name="gpt3-6.7B", layers=32, hidden=4096, heads=32))


def gpt3_13b() -> ModelDescription:
    """40 layers of 5120."""
    return describe(GPT(name="gpt3-13B", layers=40, hidden=5120, heads=40))


def deep(layers: int = 1024) -> ModelDescription:
    """Very deep and narrow: layers of 512."""
    return describe(GPT(name=f"gpt-deep-{layers}", layers=layers, hidden=512, heads=8))


def tiny() -> ModelDescription:
    """Two layers of 64, for tests."""
    return describe(GPT(name="gpt-tiny", layers=2, hidden=64, heads=4, sequence=32, vocabulary=128))


def describe(shape: GPT) -> ModelDescription:
    """Return the description of a GPT model: embedding, 13 operators a layer, final layernorm, head with the loss."""
    layer = _layer(shape)
    blocks = [
        OperatorDescription(name=f"layer{index}.{kind}", kind=kind, block_start=not place, partitions=(partition,))
        for index in range(shape.layers)
        for place, (kind, partition) in enumerate(layer)
    ]
    return ModelDescription(
        name=shape.name,
        data_type="float16",
        tokens_per_sample=shape.sequence,
        input_bytes=shape.sequence * 8,
        operators=(
            OperatorDescription(name="embedding", kind="embedding", partitions=(_embedding(shape),)),
            *blocks,
            OperatorDescription(name="final_layernorm", kind="final_layernorm", partitions=(_final_layernorm(shape),)),
            OperatorDescription(name="head", kind="head", partitions=(_head(shape),)),
        ),
        tensor_parallel_divides=math.gcd(shape.heads, shape.vocabulary),
    )


def _embedding(shape: GPT) -> Partition:
    """Token and position embedding with dropout."""
    stream = shape.sequence * shape.hidden * ELEMENT
    tokens = Size(sharded=shape.vocabulary * shape.hidden * ELEMENT)
    return Partition(
        passes=MemoryPass(
            forward=Size(sequence=8 * stream), backward=Size(sequence=12 * stream), backward_once=tokens * 4.5
        ),
        forward_kernels=12,
        backward_kernels=18,
        forward_collectives=(Collective(kind="all_reduce", size=stream),),
        weights=tokens + Size(whole=shape.sequence * shape.hidden * ELEMENT),
        kept=Size(sequence=stream * 3 // 2),
        output=Size(sequence=stream),
        forward_workspace=Size(sequence=stream),
        backward_workspace=Size(sequence=stream),
    )


def _layer(shape: GPT) -> tuple[tuple[str, Partition], ...]:
    """The operators of one layer, in order.

    `stream` is the hidden state of one sample, s h elements; `scores` the attention matrix, a s^2 elements.
    Column-parallel products all-reduce the gradient of their input, row-parallel ones their output (Megatron-LM,
    Shoeybi et al. 2019).
    """
    s, h, a, f = shape.sequence, shape.hidden, shape.heads, shape.feed_forward
    stream, scores = s * h * ELEMENT, a * s * s * ELEMENT
    residual = Size(sequence=stream)
    reduced = (Collective(kind="all_reduce", size=stream),)

    layernorm = Partition(
        passes=MemoryPass(forward=Size(sequence=round(2.6 * stream)), backward=Size(sequence=10 * stream)),
        backward_kernels=4,
        weights=Size(whole=2 * h * ELEMENT),
        kept=Size(sequence=stream),
        output=residual + Size(sequence=stream),
        backward_workspace=Size(sequence=3 * stream),
    )
    qkv = Partition(
        products=(MatrixProduct(rows=s, inner=h, columns=3 * h, split="columns"),),
        passes=MemoryPass(forward=Size(sharded=16 * stream), backward=Size(sharded=14 * stream)),
        forward_kernels=6,
        backward_kernels=13,
        backward_collectives=reduced,
        weights=Size(sharded=3 * h * (h + 1) * ELEMENT),
        kept=Size(sharded=3 * stream),
        output=residual + Size(sharded=3 * stream),
        forward_workspace=Size(sharded=3 * stream),
        backward_workspace=Size(sequence=2 * stream, sharded=6 * stream),
    )
    score = Partition(
        products=(MatrixProduct(rows=s, inner=h // a, columns=s, count=a, weight=False, split="count"),),
        forward_kernels=2,
        backward_kernels=5,
        output=residual + Size(sharded=stream + scores),
        forward_workspace=Size(sharded=scores),
        backward_workspace=Size(sharded=scores + 4 * stream),
    )
    softmax = Partition(
        passes=MemoryPass(forward=Size(sharded=round(1.7 * scores)), backward=Size(sharded=round(2.3 * scores))),
        backward_kernels=3,
        kept=Size(sharded=scores),
        output=residual + Size(sharded=stream + scores),
        backward_workspace=Size(sharded=2 * scores),
    )
    dropout = Partition(
        passes=MemoryPass(forward=Size(sharded=round(2.7 * scores)), backward=Size(sharded=round(2.3 * scores))),
        backward_kernels=2,
        kept=Size(sharded=scores + scores // 2),
        output=residual + Size(sharded=stream + scores),
        backward_workspace=Size(sharded=2 * scores),
    )
    context = Partition(
        products=(MatrixProduct(rows=s, inner=s, columns=h // a, count=a, weight=False, split="count"),),
        forward_kernels=2,
        backward_kernels=4,
        kept=Size(sharded=stream),
        output=residual + Size(sharded=stream),
        backward_workspace=Size(sharded=scores + 2 * stream),
    )
    dense = Partition(
        products=(MatrixProduct(rows=s, inner=h, columns=h, split="inner"),),
        passes=MemoryPass(forward=Size(sharded=4 * stream), backward=Size(sharded=3 * stream)),
        forward_kernels=2,
        backward_kernels=4,
        forward_collectives=reduced,
        weights=Size(sharded=h * h * ELEMENT, whole=h * ELEMENT),
        output=residual + Size(sequence=stream),
        forward_workspace=Size(sequence=stream),
        backward_workspace=Size(sequence=stream, sharded=stream),
    )
    dropout_add = Partition(
        passes=MemoryPass(forward=Size(sequence=round(8.2 * stream)), backward=Size(sequence=round(4.3 * stream))),
        forward_kernels=3,
        backward_kernels=2,
        kept=Size(sequence=stream * 3 // 2),
        output=residual,
        forward_workspace=Size(sequence=stream),
        backward_workspace=Size(sequence=3 * stream),
    )
    wide = Size(sharded=s * f * ELEMENT)
    mlp_in = Partition(
        products=(MatrixProduct(rows=s, inner=h, columns=f, split="columns"),),
        passes=MemoryPass(forward=wide * 2, backward=wide),
        forward_kernels=3,
        backward_kernels=5,
        backward_collectives=reduced,
        weights=Size(sharded=f * (h + 1) * ELEMENT),
        kept=wide,
        output=residual + wide,
        backward_workspace=wide + Size(sequence=2 * stream),
    )
    gelu = Partition(
        passes=MemoryPass(forward=wide * 2, backward=wide * 3.8),
        backward_kernels=3,
        kept=wide,
        output=residual + wide,
        backward_workspace=wide * 3,
    )
    mlp_out = Partition(
        products=(MatrixProduct(rows=s, inner=f, columns=h, split="inner"),),
        passes=MemoryPass(forward=Size(sharded=4 * stream), backward=Size(sharded=2 * stream)),
        forward_kernels=2,
        backward_kernels=5,
        forward_collectives=reduced,
        weights=Size(sharded=f * h * ELEMENT, whole=h * ELEMENT),
        output=residual + Size(sequence=stream),
        forward_workspace=Size(sequence=stream),
        backward_workspace=wide + Size(sequence=stream),
    )
    return (
        ("first_layernorm", layernorm),
        ("attention_qkv", qkv),
        ("attention_score", score),
        ("attention_softmax", softmax),
        ("attention_dropout", dropout),
        ("attention_context", context),
        ("attention_dense", dense),
        ("attention_dropout_add", dropout_add),
        ("second_layernorm", layernorm),
        ("mlp_in", mlp_in),
        ("mlp_gelu", gelu),
        ("mlp_out", mlp_out),
        ("mlp_dropout_add", dropout_add),
    )


def _final_layernorm(shape: GPT) -> Partition:
    stream = shape.sequence * shape.hidden * ELEMENT
    return Partition(
        passes=MemoryPass(forward=Size(sequence=5 * stream), backward=Size(sequence=10 * stream)),
        forward_kernels=2,
        backward_kernels=4,
        weights=Size(whole=2 * shape.hidden * ELEMENT),
        kept=Size(sequence=stream),
        output=Size(sequence=stream),
        backward_workspace=Size(sequence=3 * stream),
    )


def _head(shape: GPT) -> Partition:
    """Logits and cross-entropy in 32 bit, on the vocabulary's shard."""
    logits = shape.sequence * shape.vocabulary
    stream = shape.sequence * shape.hidden * ELEMENT
    return Partition(
        products=(MatrixProduct(rows=shape.sequence, inner=shape.hidden, columns=shape.vocabulary, split="columns"),),
        passes=MemoryPass(forward=Size(sharded=logits * 4 * 8), backward=Size(sharded=logits * 4 * 2)),
        forward_kernels=25,
        backward_kernels=20,
        forward_collectives=(Collective(kind="all_reduce", size=4 * shape.sequence),) * 3,
        backward_collectives=(Collective(kind="all_reduce", size=stream),),
        weights=Size(sharded=shape.vocabulary * shape.hidden * ELEMENT),
        kept=Size(sharded=4 * logits),
        forward_workspace=Size(sharded=2 * logits),
        backward_workspace=Size(sharded=2 * logits, sequence=stream),
    )


# Torch modules: one for each operator above, called with and returning a tuple, built in functions that import torch.
