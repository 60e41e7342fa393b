"""Linformer: attention to a fixed number of linear combinations of the tokens (Wang et al. 2020, equation 7).

B batch, T tokens, N maximum length, R rank (the paper's k), H heads, D head size, E hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.nn.attention import scaled_dot_product_attention
from zoo.nn.encoder_attention import EncoderAttention

__all__ = ["LinformerAttention"]


class LinformerAttention(EncoderAttention):
    """softmax(Q (E K)^T / sqrt(D)) (F V), with E and F (R, N) shared by all heads: O(T R) time and memory.

    An input shorter than N uses the first T columns of both. Every output depends on every token: not causal.

    Args:
        hidden_size: E.
        num_heads: H.
        max_seq_len: N.
        rank: R, from 1 to N.
        dropout: on the attention weights, in training only.

    Raises:
        ValueError: when E is not divisible by H, or R is not in 1 ... N.
    """

    def __init__(self, hidden_size: int, num_heads: int, max_seq_len: int, rank: int, *, dropout: float = 0.0) -> None:
        super().__init__(hidden_size, num_heads, dropout=dropout)
        if not 1 <= rank <= max_seq_len:
            raise ValueError(f"rank {rank} lies outside 1 ... max_seq_len {max_seq_len}")
        # N(0, 1 / R) approximately preserves lengths and angles (Johnson-Lindenstrauss; the paper's theorem 2).
        self.key_mixture = nn.Parameter(torch.randn(rank, max_seq_len) * rank**-0.5)
        self.value_mixture = nn.Parameter(torch.randn(rank, max_seq_len) * rank**-0.5)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """(B, T, E) -> (B, T, E). ``mask`` is (B, T), non-zero for a token and zero for padding."""
        return self._merge(self.mix(*self._query_key_value(x), mask))

    def mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """``query``, ``key`` and ``value``, (B, H, T, D) each -> (B, H, T, D)."""
        length = query.shape[2]
        if mask is not None:  # before the projections mix tokens with padding
            padding = ~mask.bool()[:, None, :, None]  # (B, 1, T, 1)
            key, value = key.masked_fill(padding, 0.0), value.masked_fill(padding, 0.0)
        key = self.key_mixture[:, :length] @ key  # (R, T) (B, H, T, D) -> (B, H, R, D)
        value = self.value_mixture[:, :length] @ value
        return scaled_dot_product_attention(query, key, value, dropout=self.dropout if self.training else 0.0)
