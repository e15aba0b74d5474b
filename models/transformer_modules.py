"""Torch modules of the operators of `transformer.py`: what GPT and Llama train as.

One module for each kind of operator, called with and returning a tuple; the residual travels beside what is computed
from it. Modules count heads and widths from the tensors they are given, so that each runs on its share of them. Columns
of a product are laid out by what must stay together on a tensor rank: queries with the key and value of their group,
a gate with what it gates.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from models.transformer import Transformer
from solver_plan.execution.model import Batch, Layer, Model, TensorParallel, Values, whole
from solver_plan.profiles.description import OperatorDescription

ROTARY_BASE = 500000.0
"""Of Llama 3 (Grattafiori et al. 2024, section 3.2)."""
NORM_EPSILON = 1e-5


class Embedding(nn.Module):
    """Tokens, and learned positions where there are any."""

    def __init__(self, shape: Transformer, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        nn.init.normal_(self.tokens.weight, std=0.02)
        learned = torch.randn(shape.sequence, shape.hidden) * 0.02 if shape.learned_positions else None
        self.positions = None if learned is None else nn.Parameter(learned)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: torch.Tensor) -> Values:
        """(samples, length) -> stream."""
        stream = self.tokens(tokens)
        if self.positions is not None:
            stream = stream + self.positions[: tokens.shape[1]]
        return (self.dropout(stream),)


class Norm(nn.Module):
    """Layer or RMS normalisation; the residual goes past it, except past the last one."""

    def __init__(self, shape: Transformer, dropout: float, *, last: bool) -> None:
        super().__init__()
        kind = nn.RMSNorm if shape.gated else nn.LayerNorm
        self.norm = kind(shape.hidden, eps=NORM_EPSILON)
        self.last = last

    def forward(self, stream: torch.Tensor) -> Values:
        """Stream -> (residual, normalised), or normalised alone."""
        normalised = self.norm(stream)
        return (normalised,) if self.last else (stream, normalised)


class QueryKeyValue(nn.Module):
    """Queries, keys and values in one product, laid out by groups: a group's queries, its key, its value."""

    def __init__(self, shape: Transformer, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(shape.hidden, shape.query_key_value, bias=not shape.gated)

    def forward(self, residual: torch.Tensor, normalised: torch.Tensor) -> Values:
        """(residual, normalised) -> (residual, queries, keys and values)."""
        return residual, self.linear(normalised)


def split_groups(shape: Transformer, made: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values of this rank's heads, (samples, heads, length, width) each; keys repeated."""
    samples, length, _ = made.shape
    queries_of_group = shape.heads // shape.key_value_heads
    grouped = made.view(samples, length, -1, queries_of_group + 2, shape.head_dim).permute(0, 2, 3, 1, 4)
    queries = grouped[:, :, :-2].flatten(1, 2)
    keys, values = (grouped[:, :, place].repeat_interleave(queries_of_group, dim=1) for place in (-2, -1))
    if not shape.learned_positions:
        queries, keys = rotated(queries), rotated(keys)
    return queries, keys, values


def rotated(heads: torch.Tensor) -> torch.Tensor:
    """Rotary positions (Su et al. 2021) of (samples, heads, length, width)."""
    length, width = heads.shape[-2:]
    exponents = torch.arange(0, width, 2, device=heads.device, dtype=torch.float64) / width
    angles = torch.outer(torch.arange(length, device=heads.device, dtype=torch.float64), ROTARY_BASE**-exponents)
    cosine, sine = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    even, odd = heads[..., 0::2], heads[..., 1::2]
    return torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), dim=-1).flatten(-2)


class Score(nn.Module):
    """Scaled products of queries and keys, masked."""

    def __init__(self, shape: Transformer, dropout: float) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, residual: torch.Tensor, made: torch.Tensor) -> Values:
        """(residual, queries keys values) -> (residual, values, scores)."""
        queries, keys, values = split_groups(self.shape, made)
        scores = queries @ keys.transpose(-1, -2) / self.shape.head_dim**0.5
        if self.shape.causal:
            length = scores.shape[-1]
            future = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(future, -torch.inf)
        return residual, values, scores


class Softmax(nn.Module):
    """Of the scores."""

    def __init__(self, shape: Transformer, dropout: float) -> None:
        super().__init__()

    def forward(self, residual: torch.Tensor, values: torch.Tensor, scores: torch.Tensor) -> Values:
        """(residual, values, scores) -> (residual, values, weights)."""
        return residual, values, scores.softmax(dim=-1)


class AttentionDropout(nn.Module):
    """Of the attention weights."""

    def __init__(self, shape: Transformer, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, residual: torch.Tensor, values: torch.Tensor, weights: torch.Tensor) -> Values:
        """(residual, values, weights) -> the same."""
        return residual, values, self.dropout(weights)


class Context(nn.Module):
    """Values, weighted."""

    def __init__(self, shape: Transformer, dropout: float) -> None:
        super().__init__()

    def forward(self, residual: torch.Tensor, values: torch.Tensor, weights: torch.Tensor) -> Values:
        """(residual, values, weights) -> (residual, attended)."""
        return residual, (weights @ values).transpose(1, 2).flatten(2)


class FlashCore(nn.Module):
    """Scores, softmax and context in one kernel."""

    def __init__(self, shape: Transformer, dropout: float) -> None:
        super().__init__()
        self.shape = shape
        self.dropout = dropout

    def forward(self, residual: torch.Tensor, made: torch.Tensor) -> Values:
        """(residual, queries keys values) -> (residual, attended)."""
        queries, keys, values = split_groups(self.shape, made)
        attended = nn.functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.shape.causal,
        )
        return residual, attended.transpose(1, 2).flatten(2)


class Product(nn.Module):
    """A product with weights, beside the residual."""

    def __init__(self, shape: Transformer, dropout: float, *, inner: int, columns: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inner, columns, bias=not shape.gated)

    def forward(self, residual: torch.Tensor, entering: torch.Tensor) -> Values:
        """(residual, entering) -> (residual, product)."""
        return residual, self.linear(entering)


class DropoutAdd(nn.Module):
    """Dropout, and adding the residual."""

    def __init__(self, shape: Transformer, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, residual: torch.Tensor, branch: torch.Tensor) -> Values:
        """(residual, branch) -> stream."""
        return (residual + self.dropout(branch),)


class Activation(nn.Module):
    """GELU; or SiLU of the gates, times what they gate, which lie side by side (Shazeer 2020)."""

    def __init__(self, shape: Transformer, dropout: float) -> None:
        super().__init__()
        self.gated = shape.gated

    def forward(self, residual: torch.Tensor, wide: torch.Tensor) -> Values:
        """(residual, wide) -> (residual, activated)."""
        if not self.gated:
            return residual, nn.functional.gelu(wide)
        gates, values = wide.reshape(*wide.shape[:-1], -1, 2).unbind(-1)
        return residual, nn.functional.silu(gates) * values


class Head(nn.Module):
    """Logits of the vocabulary."""

    def __init__(self, shape: Transformer, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, normalised: torch.Tensor) -> Values:
        """Normalised -> logits."""
        return (self.linear(normalised),)


def _columns(tensor_parallel: int, partition: int) -> TensorParallel:
    return TensorParallel({"linear": ColwiseParallel()}, outputs=(None, 2))


def _rows(tensor_parallel: int, partition: int) -> TensorParallel:
    return TensorParallel({"linear": RowwiseParallel()}, inputs=(None, 2))


def _vocabulary(tensor_parallel: int, partition: int) -> TensorParallel:
    return TensorParallel({"tokens": RowwiseParallel(input_layouts=Replicate())})


def _logits(tensor_parallel: int, partition: int) -> TensorParallel:
    return TensorParallel({"linear": ColwiseParallel(output_layouts=Replicate())})


def split_as(inputs: tuple[int | None, ...], outputs: tuple[int | None, ...]) -> Callable[[int, int], TensorParallel]:
    """Return the choice of an operator without weights that runs on each rank's share."""

    def choice(tensor_parallel: int, partition: int) -> TensorParallel:
        return TensorParallel(inputs=inputs, outputs=outputs)

    return choice


HEADS, WIDE = (None, 1, 1), (None, 2)
"""Residual whole, values and scores split by heads; residual whole, the other split by columns."""

Kind = tuple[Callable[[Transformer, float], nn.Module], Callable[[int, int], TensorParallel | None]]
"""Module of a kind of operator, from shape and dropout; and how it is split over tensor ranks."""


def kinds_of(shape: Transformer) -> dict[str, Kind]:
    """Return module and split of each kind of operator of a decoder."""
    ways = 2 if shape.gated else 1
    return {
        "embedding": (Embedding, _vocabulary),
        "first_norm": (partial(Norm, last=False), whole),
        "attention_qkv": (QueryKeyValue, _columns),
        "attention_score": (Score, split_as(WIDE, HEADS)),
        "attention_softmax": (Softmax, split_as(HEADS, HEADS)),
        "attention_dropout": (AttentionDropout, split_as(HEADS, HEADS)),
        "attention_context": (Context, split_as(HEADS, WIDE)),
        "attention_core": (FlashCore, split_as(WIDE, WIDE)),
        "attention_dense": (partial(Product, inner=shape.attended, columns=shape.hidden), _rows),
        "attention_dropout_add": (DropoutAdd, whole),
        "second_norm": (partial(Norm, last=False), whole),
        "mlp_in": (partial(Product, inner=shape.hidden, columns=ways * shape.feed_forward), _columns),
        "mlp_activation": (Activation, split_as(WIDE, WIDE)),
        "mlp_out": (partial(Product, inner=shape.feed_forward, columns=shape.hidden), _rows),
        "mlp_dropout_add": (DropoutAdd, whole),
        "final_norm": (partial(Norm, last=True), whole),
        "head": (Head, _logits),
    }


def decoder(shape: Transformer, operators: Sequence[OperatorDescription], dropout: float | None = None) -> Model:
    """Return the modules of a decoder: next-token prediction on random tokens.

    Parameters
    ----------
    shape, operators
        As in its description.
    dropout
        Probability; None: 0.1 where the shape has dropout, else 0.
    """
    probability = (0.1 if shape.dropout else 0.0) if dropout is None else dropout
    kinds = kinds_of(shape)
    tied = {"embedding": "tokens.weight", "head": "linear.weight"} if shape.tied_head else {}
    layers = tuple(
        Layer(
            name=operator.name,
            build=partial(kinds[operator.kind][0], shape, probability),
            tensor_parallel=kinds[operator.kind][1],
            shared_weights={"embedding": tied[operator.kind]} if operator.kind in tied else {},
        )
        for operator in operators
    )
    return Model(layers, next_token_loss, partial(random_tokens, shape))


def next_token_loss(outputs: Values, targets: Values) -> torch.Tensor:
    """Return the sum over samples of the mean cross-entropy of their tokens, in 32 bit or more."""
    logits, (wanted,) = outputs[0], targets
    precise = logits if logits.dtype == torch.float64 else logits.float()
    loss = nn.functional.cross_entropy(precise.flatten(0, 1), wanted.flatten(), reduction="sum")
    return loss / wanted.shape[1]


def random_tokens(shape: Transformer, samples: int, generator: torch.Generator) -> Batch:
    """Return random tokens and what follows each."""
    tokens = torch.randint(shape.vocabulary, (samples, shape.sequence + 1), generator=generator)
    return Batch((tokens[:, :-1],), (tokens[:, 1:],))
