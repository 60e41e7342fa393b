"""Base class of efficient encoder attention: the usual projections around a cheaper way to mix tokens.

B batch, T tokens, H heads, D head size, E hidden size.
"""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["EncoderAttention"]


class EncoderAttention(nn.Module):
    """Base class of attention whose cost is linear in T. Projections are named as in :class:`MultiHeadAttention`.

    Subclasses implement ``forward`` on ``x`` (B, T, E) and a padding ``mask`` (B, T), non-zero for a token and zero for
    padding; a (B, T, T) mask would cost as much memory as full attention.

    Args:
        hidden_size: E.
        num_heads: H.
        dropout: on the attention weights, in training only; subclasses without weights ignore it.

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

    def _query_key_value(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._split(self.query(x)), self._split(self.key(x)), self._split(self.value(x))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, T, H D) -> (B, H, T, D)

    def _merge(self, x: Tensor) -> Tensor:
        return self.output(x.transpose(1, 2).flatten(2))  # (B, H, T, D) -> (B, T, H D) -> (B, T, E)
