"""Torch modules of the towers of `multitask.py`: what the three multi-task families train as.

A layer is a module that takes and returns a tuple: the stream, and what is carried past it. The first layer of a tower
brings its inputs into the stream (an entrance), the last one takes out what the tower gives (an exit). Attention counts
its heads from the tensors it is given, so that a tensor rank runs on its share of them.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from models.multitask import Tower
from models.transformer_modules import NORM_EPSILON, rotated
from solver_plan.execution.model import Layer, TensorParallel, Values
from solver_plan.execution.waves.model import Given

Build = Callable[[], nn.Module]


def norm(tower: Tower) -> nn.Module:
    """Layer normalisation, or RMS with a gated feed-forward."""
    kind = nn.RMSNorm if tower.gated else nn.LayerNorm
    return kind(tower.hidden, eps=NORM_EPSILON)


class SelfAttention(nn.Module):
    """Columns of the product are laid out by heads: a head's query, key, value."""

    def __init__(self, tower: Tower, *, causal: bool, rotary: bool) -> None:
        super().__init__()
        self.head_dim = tower.hidden // tower.heads
        self.causal, self.rotary = causal, rotary
        self.qkv = nn.Linear(tower.hidden, 3 * tower.hidden, bias=not tower.gated)
        self.out = nn.Linear(tower.hidden, tower.hidden, bias=not tower.gated)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """(samples, length, hidden) -> the same."""
        heads = self.qkv(stream).unflatten(2, (-1, 3, self.head_dim)).permute(3, 0, 2, 1, 4)
        queries, keys, values = heads
        if self.rotary:
            queries, keys = rotated(queries), rotated(keys)
        attended = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=self.causal)
        left: torch.Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return left


class CrossAttention(nn.Module):
    """Of the stream to a memory; a head's key beside its value."""

    def __init__(self, tower: Tower) -> None:
        super().__init__()
        self.head_dim = tower.hidden // tower.heads
        self.queries = nn.Linear(tower.hidden, tower.hidden)
        self.pairs = nn.Linear(tower.hidden, 2 * tower.hidden)
        self.out = nn.Linear(tower.hidden, tower.hidden)

    def forward(self, stream: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """(samples, length, hidden), (samples, length of the memory, hidden) -> as the first."""
        queries = self.queries(stream).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
        keys, values = self.pairs(memory).unflatten(2, (-1, 2, self.head_dim)).permute(3, 0, 2, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(queries, keys, values)
        left: torch.Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return left


class FeedForward(nn.Module):
    """GELU; or SiLU of the gates, times what they gate, which lie side by side (Shazeer 2020)."""

    def __init__(self, tower: Tower) -> None:
        super().__init__()
        self.gated = tower.gated
        self.into = nn.Linear(tower.hidden, (2 if tower.gated else 1) * tower.wide, bias=not tower.gated)
        self.out = nn.Linear(tower.wide, tower.hidden, bias=not tower.gated)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """(samples, length, hidden) -> the same."""
        wide = self.into(stream)
        if self.gated:
            gates, values = wide.unflatten(2, (-1, 2)).unbind(-1)
            active = nn.functional.silu(gates) * values
        else:
            active = nn.functional.gelu(wide)
        left: torch.Tensor = self.out(active)
        return left


class TowerLayer(nn.Module):
    """A transformer layer, normalised before each part; the first and last one bring in and take out."""

    def __init__(
        self,
        tower: Tower,
        *,
        causal: bool = False,
        rotary: bool = False,
        memory: bool = False,
        entrance: Build | None = None,
        leaving: Build | None = None,
    ) -> None:
        super().__init__()
        self.entrance = None if entrance is None else entrance()
        self.attention_norm, self.attention = norm(tower), SelfAttention(tower, causal=causal, rotary=rotary)
        self.cross_norm = norm(tower) if memory else None
        self.cross = CrossAttention(tower) if memory else None
        self.feed_forward_norm, self.feed_forward = norm(tower), FeedForward(tower)
        self.leaving = None if leaving is None else leaving()

    def forward(self, *values: torch.Tensor) -> Values:
        """(stream, carried) -> the same; or what the entrance takes, and what the exit gives."""
        stream, *carried = values if self.entrance is None else self.entrance(*values)
        stream = stream + self.attention(self.attention_norm(stream))
        if self.cross is not None and self.cross_norm is not None:
            stream = stream + self.cross(self.cross_norm(stream), carried[0])
        stream = stream + self.feed_forward(self.feed_forward_norm(stream))
        return (stream, *carried) if self.leaving is None else self.leaving(stream, *carried)


def tower_layers(
    tower: Tower,
    *,
    entrance: Build | None = None,
    leaving: Build | None = None,
    causal: bool = False,
    rotary: bool = False,
    memory: bool = False,
) -> list[Layer]:
    """Return the layers of a tower."""

    def split(tensor_parallel: int, partition: int) -> TensorParallel | None:
        if tower.heads % tensor_parallel or tower.wide % tensor_parallel:
            return None
        columns = ["attention.qkv", "feed_forward.into", *(["cross.queries", "cross.pairs"] if memory else [])]
        rows = ["attention.out", "feed_forward.out", *(["cross.out"] if memory else [])]
        return TensorParallel(
            {**{name: ColwiseParallel() for name in columns}, **{name: RowwiseParallel() for name in rows}}
        )

    last = tower.layers - 1
    return [
        Layer(
            f"{tower.name}.{number}",
            partial(
                TowerLayer,
                tower,
                causal=causal,
                rotary=rotary,
                memory=memory,
                entrance=entrance if number == 0 else None,
                leaving=leaving if number == last else None,
            ),
            split,
        )
        for number in range(tower.layers)
    ]


class PatchEntrance(nn.Module):
    """Patches of an image, a spectrogram or a signal, projected, with learned positions."""

    def __init__(self, hidden: int, features: int, tokens: int) -> None:
        super().__init__()
        self.patches = nn.Linear(features, hidden)
        self.positions = nn.Parameter(0.02 * torch.randn(tokens, hidden))

    def forward(self, patches: torch.Tensor) -> Values:
        """(samples, length, features) -> stream."""
        return (self.patches(patches) + self.positions[: patches.shape[1]],)


class WordEntrance(nn.Module):
    """Words, with learned positions."""

    def __init__(self, hidden: int, vocabulary: int, tokens: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        nn.init.normal_(self.words.weight, std=0.02)
        self.positions = nn.Parameter(0.02 * torch.randn(tokens, hidden))

    def forward(self, words: torch.Tensor) -> Values:
        """(samples, length) -> stream."""
        return (self.words(words) + self.positions[: words.shape[1]],)


class NormExit(nn.Module):
    """The stream, normalised."""

    def __init__(self, tower: Tower) -> None:
        super().__init__()
        self.norm = norm(tower)

    def forward(self, stream: torch.Tensor) -> Values:
        """Stream -> the same, normalised."""
        return (self.norm(stream),)


class LogitsExit(nn.Module):
    """Logits of the last `words` places of the stream; what was carried ends here."""

    def __init__(self, tower: Tower, vocabulary: int) -> None:
        super().__init__()
        self.norm = norm(tower)
        self.head = nn.Linear(tower.hidden, vocabulary, bias=False)

    def forward(self, stream: torch.Tensor, *carried: torch.Tensor) -> Values:
        """Stream -> (samples, length, vocabulary)."""
        return (self.head(self.norm(stream)),)


def next_word_loss(outputs: Given, targets: Values) -> torch.Tensor:
    """Return the sum over samples of the mean cross-entropy of their words, which stand last, in 32 bit or more."""
    ((logits,),), (wanted,) = outputs.values(), targets
    last = logits[:, -wanted.shape[1] :]
    precise = last if last.dtype == torch.float64 else last.float()
    loss = nn.functional.cross_entropy(precise.flatten(0, 1), wanted.flatten(), reduction="sum")
    return loss / wanted.shape[1]


def random_patches(samples: int, tokens: int, features: int, generator: torch.Generator) -> torch.Tensor:
    """Return patches made on the fly."""
    return torch.randn(samples, tokens, features, generator=generator)


def random_words(samples: int, tokens: int, vocabulary: int, generator: torch.Generator) -> tuple[Values, Values]:
    """Return words made on the fly, and what follows each."""
    words = torch.randint(vocabulary, (samples, tokens + 1), generator=generator)
    return (words[:, :-1],), (words[:, 1:],)
