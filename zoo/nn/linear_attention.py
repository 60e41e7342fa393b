"""What replaces full attention in an encoder: the same projections around another way to mix tokens.

B batch, T tokens, H heads, D head size, E hidden size.
"""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, nn

__all__ = ["LinearAttention"]


class LinearAttention(nn.Module):
    """Base of attention whose cost is linear in T. Its weights are named as :class:`MultiHeadAttention`'s are.

    Args:
        hidden_size: E.
        num_heads: H.
        dropout: on the attention weights, in training only; what has no weights ignores it.

    Raises:
        ValueError: when E is not divisible by H.
    """

    def __init__(self, hidden_size: int, num_heads: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        if hidden_size % num_heads:
            raise ValueError(f"hidden_size {hidden_size} is not divisible by num_heads {num_heads}")
        self.num_heads = num_heads
        self.dropout = dropout
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.output = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """(B, T, E) -> (B, T, E). ``mask`` is (B, T), non-zero for a token and zero for padding."""
        query, key, value = (self._split(layer(x)) for layer in (self.query, self.key, self.value))
        return self._merge(self.mix(query, key, value, mask))

    @abstractmethod
    def mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Three of (B, H, T, D) -> (B, H, T, D)."""

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, T, H D) -> (B, H, T, D)

    def _merge(self, x: Tensor) -> Tensor:
        return self.output(x.transpose(1, 2).flatten(2))  # (B, H, T, D) -> (B, T, H D) -> (B, T, E)
