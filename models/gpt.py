"""GPT-3 as Megatron-LM builds it: 13 operators a layer, eager attention, 16-bit with Adam.

Sizes: Brown et al. (2020), table 2.1, in the variants of Aceso's evaluation (sequence length 2048, vocabulary 51200). A
layer keeps s h (34 + 5 a s / h) bytes of a sample (Korthikanti et al., MLSys 2023, section 4).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from models.transformer import FUSED, SEPARATE, Transformer, chain, decoder_layer
from solver_plan.profiles.description import ADAM_16_BIT_GRADIENTS_32_BIT, ModelDescription, OperatorDescription


def gpt3_350m() -> ModelDescription:
    """24 layers of 1024."""
    return describe(gpt("gpt3-350M", layers=24, hidden=1024, heads=16))


def gpt3_1_3b() -> ModelDescription:
    """24 layers of 2048; 32 heads."""
    return describe(gpt("gpt3-1.3B", layers=24, hidden=2048, heads=32))


def gpt3_2_6b() -> ModelDescription:
    """32 layers of 2560."""
    return describe(gpt("gpt3-2.6B", layers=32, hidden=2560, heads=32))


def gpt3_6_7b() -> ModelDescription:
    """32 layers of 4096."""
    return describe(gpt("gpt3-6.7B", layers=32, hidden=4096, heads=32))


def gpt3_13b() -> ModelDescription:
    """40 layers of 5120."""
    return describe(gpt("gpt3-13B", layers=40, hidden=5120, heads=40))


def gpt3_175b() -> ModelDescription:
    """96 layers of 12288, as it is trained today: flash attention, fused kernels, bfloat16, gradients in 32 bit."""
    shape = gpt("gpt3-175B", layers=96, hidden=12288, heads=96)
    return describe(
        replace(
            shape,
            attention="flash",
            dropout=False,
            passes=FUSED,
            data_type="bfloat16",
            bytes_per_parameter=ADAM_16_BIT_GRADIENTS_32_BIT,
        )
    )


def deep(layers: int = 1024) -> ModelDescription:
    """Very deep and narrow: layers of 512."""
    return describe(gpt(f"gpt-deep-{layers}", layers=layers, hidden=512, heads=8))


def tiny() -> ModelDescription:
    """Two layers of 64, for tests."""
    return describe(gpt("gpt-tiny", layers=2, hidden=64, heads=4, sequence=32, vocabulary=128))


def gpt(
    name: str, *, layers: int, hidden: int, heads: int, sequence: int = 2048, vocabulary: int = 51200
) -> Transformer:
    """Return the shape of a GPT model: MLP four times as wide as the stream, positions learned, dropout."""
    return Transformer(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        key_value_heads=heads,
        head_dim=hidden // heads,
        feed_forward=4 * hidden,
        sequence=sequence,
        vocabulary=vocabulary,
        learned_positions=True,
        dropout=True,
        attention="eager",
        passes=SEPARATE,
        data_type="float16",
    )


def describe(shape: Transformer) -> ModelDescription:
    """Return the description: embedding, 13 operators a layer (10 with flash attention), last normalisation, head."""
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
