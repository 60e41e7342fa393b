"""A student's encoder-decoder, built from the blocks of zoo.nn.  B batch, S source tokens, T target tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zoo.nn import FeedForward, MultiHeadAttention, SinusoidalPositions, build_mask


class Student(nn.Module):
    """One block of an encoder, and one of a decoder, which share their embedding with the head."""

    def __init__(self, vocab_size: int, hidden_size: int = 16, *, num_heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.positions = SinusoidalPositions(hidden_size)
        self.self_attention = MultiHeadAttention(hidden_size, num_heads)
        self.cross_attention = MultiHeadAttention(hidden_size, num_heads)
        self.mlp = FeedForward(hidden_size, 2 * hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor([hidden_size**0.5]), persistent=False)

    def embed(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.dropout(self.embedding(ids) * self.scale + self.positions(places, self.embedding.weight.dtype))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        states, x = self.embed(source), self.embed(target)
        x = x + self.self_attention(x, mask=build_mask(x.shape[1], x.shape[1], causal=True))
        x = x + self.cross_attention(x, memory=self.cross_attention.keys_values(states))
        return self.head(x + self.mlp(x))  # (B, T, V)

    def likeliest(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the likeliest next token of each row, (B,)."""
        return self(source, target)[:, -1].argmax(-1)


def stacked(depth: int) -> nn.Module:
    """Return layers that only a function knows how to put together."""
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth)))


class Outer:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)


class Settings:
    def __init__(self, width: int) -> None:
        self.width = width


def scaled(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


class Configured(nn.Module):
    """Keeps its settings in an object, a function and a list."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.settings = Settings(width)
        self.activation = torch.relu
        self.gate = scaled(2.0)
        self.sizes = [width, 2]
        self.layer = nn.Linear(4, 4)


class Made(nn.Module):
    """A module with an attribute that anything may be."""

    def __init__(self, parts: Any = None) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.parts = parts


def made() -> Made:
    """Return a module without parts."""
    return Made()


def nested(depth: int, value: int) -> dict[str, Any]:
    """Return dictionaries in dictionaries, the innermost with a value."""
    return {"value": value} if depth == 0 else {"next": nested(depth - 1, value)}


def nest() -> Made:
    """Return a module with deep parts."""
    return Made(nested(40, 1))


def doubler() -> Made:
    """Return a module with a function that differs from another one in a constant."""
    return Made(lambda x: x * 3)


def ordered() -> nn.ModuleDict:
    """Return modules in an order."""
    return nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})


class Recurrent(nn.Module):
    """A recurrent layer and a normalised one."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(4, 3, batch_first=True)
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
        self.last = [self.layer]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one vector for each row."""
        return self.last[-1](self.cells(x)[0][:, -1])


def recurrent() -> Recurrent:
    """Return such a module."""
    return Recurrent()
