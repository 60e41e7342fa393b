"""Position-wise feed-forward networks. B batch, T tokens, E hidden size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.config import Activation

__all__ = ["ACTIVATIONS", "FeedForward", "GatedFeedForward"]

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "silu": F.silu,
}
"""The functions that activations name."""


class FeedForward(nn.Module):
    """W_2 f(W_1 x + b_1) + b_2 (Vaswani et al. 2017, equation 2), with dropout after f in training."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation = "gelu",
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.up = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.activation = ACTIVATIONS[activation]
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        return self.down(self.dropout(self.activation(self.up(x))))


class GatedFeedForward(nn.Module):
    """W_2 (f(W_g x) * W_1 x), a gated linear unit (Shazeer 2020, equation 6), with dropout before W_2 in training."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation = "silu",
        bias: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.activation = ACTIVATIONS[activation]
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        return self.down(self.dropout(self.activation(self.gate(x)) * self.up(x)))
