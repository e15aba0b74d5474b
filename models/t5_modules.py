"""Torch modules of the operators of `t5.py`: those of `transformer_modules.py`, with what each carries past it.

The target tokens travel past the encoder, and the encoder's output (the memory) past the decoder, as the last tensor.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from models.transformer import Transformer
from models.transformer_modules import HEADS, Embedding, Kind, Norm, kinds_of, next_token_loss, split_as
from solver_plan.execution.model import Batch, Layer, Model, TensorParallel, Values, whole
from solver_plan.profiles.description import OperatorDescription


class Carrying(nn.Module):
    """An operator past which the last tensor is carried."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *values: torch.Tensor) -> Values:
        """(inputs, carried) -> (outputs, carried)."""
        return (*self.module(*values[:-1]), values[-1])


class DecoderEmbedding(Embedding):
    """Target tokens; what was carried past the encoder is used, the encoder's output carried from here on."""

    def forward(self, memory: torch.Tensor, tokens: torch.Tensor) -> Values:  # type: ignore[override]
        """(memory, target tokens) -> (stream, memory)."""
        return (*super().forward(tokens), memory)


class CrossQueryKeyValue(nn.Module):
    """Queries of the stream; keys and values of the memory, a group's key beside its value."""

    def __init__(self, shape: Transformer, dropout: float) -> None:
        super().__init__()
        pairs = 2 * shape.key_value_heads * shape.head_dim
        self.queries = nn.Linear(shape.hidden, shape.attended, bias=not shape.gated)
        self.pairs = nn.Linear(shape.hidden, pairs, bias=not shape.gated)

    def forward(self, residual: torch.Tensor, normalised: torch.Tensor, memory: torch.Tensor) -> Values:
        """(residual, normalised, memory) -> (residual, queries, keys and values, memory)."""
        return residual, self.queries(normalised), self.pairs(memory), memory


class CrossScore(nn.Module):
    """Scaled products of queries and keys of the memory."""

    def __init__(self, shape: Transformer, dropout: float) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, residual: torch.Tensor, queries: torch.Tensor, pairs: torch.Tensor) -> Values:
        """(residual, queries, keys and values) -> (residual, values, scores)."""
        shape = self.shape
        asking = queries.unflatten(2, (-1, shape.head_dim)).transpose(1, 2)
        grouped = pairs.unflatten(2, (-1, 2, shape.head_dim)).permute(3, 0, 2, 1, 4)
        keys, values = (part.repeat_interleave(shape.heads // shape.key_value_heads, dim=1) for part in grouped)
        return residual, values, asking @ keys.transpose(-1, -2) / shape.head_dim**0.5


def _cross_columns(tensor_parallel: int, partition: int) -> TensorParallel:
    return TensorParallel({"queries": ColwiseParallel(), "pairs": ColwiseParallel()}, outputs=(None, 2, 2))


def _carried(kind: Kind) -> Kind:
    build, split = kind

    def carrying(shape: Transformer, dropout: float) -> nn.Module:
        return Carrying(build(shape, dropout))

    def choice(tensor_parallel: int, partition: int) -> TensorParallel | None:
        found = split(tensor_parallel, partition)
        if found is None:
            return None
        styles = {f"module.{name}": style for name, style in found.styles.items()}
        return TensorParallel(styles, found.inputs, found.outputs)

    return carrying, choice


def _kinds(encoder: Transformer, decoder: Transformer) -> dict[str, tuple[Transformer, Kind]]:
    """Shape, module and split of each kind of operator."""
    of_encoder, of_decoder = kinds_of(encoder), kinds_of(decoder)
    cross = {
        f"cross_{name}": kind
        for name, kind in of_decoder.items()
        if name.startswith("attention_") and name not in ("attention_qkv", "attention_score")
    }
    cross["cross_attention_score"] = (CrossScore, split_as((None, 2, 2), HEADS))
    third = {"third_norm": (partial(Norm, last=False), whole)}
    found = {f"encoder_{name}": (encoder, _carried(kind)) for name, kind in of_encoder.items()}
    found |= {f"decoder_{name}": (decoder, _carried(kind)) for name, kind in (of_decoder | cross | third).items()}
    found["decoder_embedding"] = (decoder, (DecoderEmbedding, of_decoder["embedding"][1]))
    found["decoder_cross_attention_qkv"] = (decoder, (CrossQueryKeyValue, _cross_columns))
    found["decoder_final_norm"] = (decoder, (_last_norm, whole))
    found["head"] = (decoder, of_decoder["head"])
    return found


class _LastNorm(Norm):
    """The memory ends here."""

    def forward(self, stream: torch.Tensor, memory: torch.Tensor) -> Values:  # type: ignore[override]
        """(stream, memory) -> normalised."""
        return super().forward(stream)


def _last_norm(shape: Transformer, dropout: float) -> nn.Module:
    return _LastNorm(shape, dropout, last=True)


def encoder_decoder(
    encoder: Transformer,
    decoder: Transformer,
    operators: Sequence[OperatorDescription],
    dropout: float | None = None,
) -> Model:
    """Return the modules of an encoder and a decoder; `dropout` None: 0.1 where the shape has dropout, else 0."""
    probability = (0.1 if encoder.dropout else 0.0) if dropout is None else dropout
    kinds = _kinds(encoder, decoder)
    layers: list[Layer] = []
    for operator in operators:
        shape, (build, split) = kinds[operator.kind]
        module: Callable[[], nn.Module] = partial(build, shape, probability)
        layers.append(Layer(operator.name, module, split))
    return Model(tuple(layers), next_token_loss, partial(_random_tokens, encoder, decoder))


def _random_tokens(encoder: Transformer, decoder: Transformer, samples: int, generator: torch.Generator) -> Batch:
    source = torch.randint(encoder.vocabulary, (samples, encoder.sequence), generator=generator)
    target = torch.randint(decoder.vocabulary, (samples, decoder.sequence + 1), generator=generator)
    return Batch((source, target[:, :-1]), (target[:, 1:],))
