"""T5 as Megatron-LM builds it: encoder and decoder, eager attention, 16-bit with Adam.

Sizes: Raffel et al. (2020), the family that widens attention and MLP at a hidden size of 1024, in the variants of
Aceso's evaluation (EuroSys 2024): 2048 tokens into the encoder, 512 into the decoder, vocabulary 30592. The output of
the encoder is carried past the operators of the decoder, since every layer of it attends to it.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from models.transformer import (
    SEPARATE,
    Transformer,
    attention_layer,
    blocks,
    decoder_layer,
    embedding,
    head,
    mlp_layer,
    norm,
)
from solver_plan.profiles.description import ModelDescription, OperatorDescription, Partition, Size


def t5_770m() -> ModelDescription:
    """24 + 24 layers, 16 heads of 64."""
    return describe(*t5("t5-770M", layers=24, heads=16, head_dim=64, feed_forward=4096))


def t5_3b() -> ModelDescription:
    """24 + 24 layers, 32 heads of 128."""
    return describe(*t5("t5-3B", layers=24, heads=32, feed_forward=16384))


def t5_6b() -> ModelDescription:
    """24 + 24 layers, 64 heads of 128."""
    return describe(*t5("t5-6B", layers=24, heads=64, feed_forward=32768))


def t5_11b() -> ModelDescription:
    """24 + 24 layers, 128 heads of 128."""
    return describe(*t5("t5-11B", layers=24, heads=128, feed_forward=65536))


def tiny() -> ModelDescription:
    """2 + 2 layers of 64, for tests."""
    return describe(
        *t5(
            "t5-tiny", layers=2, heads=4, head_dim=16, feed_forward=128, hidden=64, source=32, target=16, vocabulary=128
        )
    )


def t5(
    name: str,
    *,
    layers: int,
    heads: int,
    feed_forward: int,
    head_dim: int = 128,
    hidden: int = 1024,
    source: int = 2048,
    target: int = 512,
    vocabulary: int = 30592,
) -> tuple[Transformer, Transformer]:
    """Return the shapes of encoder and decoder, each of so many layers."""
    encoder = Transformer(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        key_value_heads=heads,
        head_dim=head_dim,
        feed_forward=feed_forward,
        sequence=source,
        vocabulary=vocabulary,
        learned_positions=True,
        causal=False,
        dropout=True,
        attention="eager",
        passes=SEPARATE,
        data_type="float16",
    )
    return encoder, replace(encoder, sequence=target, causal=True)


def describe(encoder: Transformer, decoder: Transformer) -> ModelDescription:
    """Return the description: 13 operators for a layer of the encoder, 21 for one of the decoder, and 5 around them."""
    memory = Size(sequence=encoder.stream)
    layer = [
        ("first_norm", norm(decoder)),
        *attention_layer(decoder, "attention"),
        ("second_norm", norm(decoder)),
        *attention_layer(decoder, "cross_attention", source=encoder.sequence),
        ("third_norm", norm(decoder)),
        *mlp_layer(decoder),
    ]
    carrying = [(kind, _carrying(partition, memory)) for kind, partition in layer]
    operators = (
        OperatorDescription(name="encoder.embedding", kind="encoder_embedding", partitions=(embedding(encoder),)),
        *blocks(encoder.layers, decoder_layer(encoder), "encoder.layer", "encoder_"),
        OperatorDescription(
            name="encoder.final_norm", kind="encoder_final_norm", partitions=(norm(encoder, last=True),)
        ),
        OperatorDescription(
            name="decoder.embedding",
            kind="decoder_embedding",
            partitions=(_carrying(embedding(decoder), memory),),
        ),
        *blocks(decoder.layers, carrying, "decoder.layer", "decoder_"),
        OperatorDescription(
            name="decoder.final_norm", kind="decoder_final_norm", partitions=(norm(decoder, last=True),)
        ),
        OperatorDescription(name="head", kind="head", partitions=(head(decoder),)),
    )
    return ModelDescription(
        name=encoder.name,
        data_type=encoder.data_type,
        tokens_per_sample=encoder.sequence + decoder.sequence,
        input_bytes=(encoder.sequence + decoder.sequence) * 8,
        operators=operators,
        tensor_parallel_divides=math.gcd(encoder.heads, encoder.feed_forward, encoder.vocabulary),
        bytes_per_parameter=encoder.bytes_per_parameter,
        modules=partial(_modules, encoder, decoder, operators),
    )


def _modules(encoder: Transformer, decoder: Transformer, operators: Sequence[OperatorDescription]) -> object:
    from models.t5_modules import encoder_decoder

    return encoder_decoder(encoder, decoder, operators)


def _carrying(partition: Partition, memory: Size) -> Partition:
    return replace(partition, output=partition.output + memory)
