"""Small models for the tests of execution, in the form that execution takes."""

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from solver_plan.execution.model import Batch, Layer, Model, TensorParallel, Values

VOCABULARY, HIDDEN, HEADS, LENGTH = 32, 16, 4, 6


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Parameter(0.1 * torch.randn(LENGTH, HIDDEN))

    def forward(self, tokens: torch.Tensor) -> Values:
        return (self.tokens(tokens) + self.positions,)


class Attention(nn.Module):
    """Normalised, with its residual; heads are counted from what is there, so that any share of them runs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> Values:
        batch, length, _ = hidden.shape
        heads = self.qkv(self.norm(hidden)).view(batch, length, -1, 3, HIDDEN // HEADS)
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(3))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, -1)),)


class Wide(nn.Module):
    """First half of an MLP; the residual passes through beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.linear = nn.Linear(HIDDEN, 4 * HIDDEN)

    def forward(self, hidden: torch.Tensor) -> Values:
        return hidden, nn.functional.gelu(self.linear(self.norm(hidden)))


class Narrow(nn.Module):
    """Second half of an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, residual: torch.Tensor, wide: torch.Tensor) -> Values:
        return (residual + self.linear(wide),)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.linear = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, hidden: torch.Tensor) -> Values:
        return (self.linear(self.norm(hidden)),)


def _styles(**choices: ParallelStyle) -> dict[str, ParallelStyle]:
    return choices


def _embed(tensor_parallel: int, partition: int) -> TensorParallel:
    return TensorParallel({"tokens": RowwiseParallel(input_layouts=Replicate())})


def _attention(tensor_parallel: int, partition: int) -> TensorParallel | None:
    if HEADS % tensor_parallel:
        return None
    return TensorParallel({"qkv": ColwiseParallel(), "out": RowwiseParallel()})


def _wide(tensor_parallel: int, partition: int) -> TensorParallel:
    if partition == 1:
        return TensorParallel({"linear": ColwiseParallel(output_layouts=Replicate())})
    return TensorParallel({"linear": ColwiseParallel()}, outputs=(None, 2))


def _narrow(tensor_parallel: int, partition: int) -> TensorParallel:
    return TensorParallel({"linear": RowwiseParallel()}, inputs=(None, 2))


def _head(tensor_parallel: int, partition: int) -> TensorParallel:
    return TensorParallel({"linear": ColwiseParallel(output_layouts=Replicate())})


def _loss(outputs: Values, targets: Values) -> torch.Tensor:
    logits, (wanted,) = outputs[0], targets
    return nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum") / LENGTH


def _batch(samples: int, generator: torch.Generator) -> Batch:
    tokens = torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=generator)
    return Batch((tokens[:, :-1],), (tokens[:, 1:],))


def transformer(layers: int = 2, *, tied: bool = False) -> Model:
    """A transformer of three operators a layer."""
    shared = {"embed": "tokens.weight"} if tied else {}
    chain = [Layer("embed", Embed, _embed, shared)]
    for index in range(layers):
        chain += [
            Layer(f"attention{index}", Attention, _attention),
            Layer(f"wide{index}", Wide, _wide),
            Layer(f"narrow{index}", Narrow, _narrow),
        ]
    chain.append(Layer("head", Head, _head, {"embed": "linear.weight"} if tied else {}))
    return Model(tuple(chain), _loss, _batch)


def names(model: Model) -> tuple[str, ...]:
    return tuple(layer.name for layer in model.layers)
