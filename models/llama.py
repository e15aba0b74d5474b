"""Llama 3: grouped-query attention, gated MLP, RMS normalisation, rotary positions, flash attention, bfloat16, Adam.

Sizes: Grattafiori et al., "The Llama 3 Herd of Models" (2024), table 3; vocabulary 128256, sequence length 8192.
"""

import math
from collections.abc import Sequence
from functools import partial

from models.transformer import Transformer, chain, decoder_layer
from solver_plan.profiles.description import ADAM_16_BIT_GRADIENTS_32_BIT, ModelDescription, OperatorDescription


def llama3_8b() -> ModelDescription:
    """32 layers of 4096."""
    return describe(llama("llama3-8B", layers=32, hidden=4096, heads=32, feed_forward=14336))


def llama3_70b() -> ModelDescription:
    """80 layers of 8192."""
    return describe(llama("llama3-70B", layers=80, hidden=8192, heads=64, feed_forward=28672))


def llama3_405b() -> ModelDescription:
    """126 layers of 16384."""
    return describe(llama("llama3.1-405B", layers=126, hidden=16384, heads=128, feed_forward=53248))


def tiny() -> ModelDescription:
    """Two layers of 64, for tests."""
    return describe(
        llama(
            "llama-tiny", layers=2, hidden=64, heads=4, key_value_heads=2, feed_forward=128, sequence=32, vocabulary=128
        )
    )


def llama(
    name: str,
    *,
    layers: int,
    hidden: int,
    heads: int,
    feed_forward: int,
    key_value_heads: int = 8,
    sequence: int = 8192,
    vocabulary: int = 128256,
) -> Transformer:
    """Return the shape of a Llama model; key_value_heads is the number of groups that share keys and values."""
    return Transformer(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        key_value_heads=key_value_heads,
        head_dim=hidden // heads,
        feed_forward=feed_forward,
        sequence=sequence,
        vocabulary=vocabulary,
        gated=True,
        bytes_per_parameter=ADAM_16_BIT_GRADIENTS_32_BIT,
    )


def describe(shape: Transformer) -> ModelDescription:
    """Return the description: embedding, 10 operators a layer, last normalisation, head."""
    operators = chain(shape, decoder_layer(shape))
    return ModelDescription(
        name=shape.name,
        data_type=shape.data_type,
        tokens_per_sample=shape.sequence,
        input_bytes=shape.sequence * 8,
        operators=operators,
        tensor_parallel_divides=math.gcd(shape.heads, shape.key_value_heads, shape.feed_forward, shape.vocabulary),
        bytes_per_parameter=shape.bytes_per_parameter,
        modules=partial(_modules, shape, operators),
    )


def _modules(shape: Transformer, operators: Sequence[OperatorDescription]) -> object:
    from models.transformer_modules import decoder

    return decoder(shape, operators)
