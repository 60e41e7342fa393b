"""Attention over a limited span with relative positions, learned spans and persistent memory.

B batch, T queries, S keys, H heads, D head size, E hidden size, N persistent vectors per head.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.nn.attention import attention_weights, scaled_dot_product_attention
from zoo.nn.cache import LayerCache
from zoo.nn.masks import positions_of

__all__ = ["AdaptiveSpan", "SpanAttention", "distances_of"]


def distances_of(
    query_length: int, key_length: int, *, padding: Tensor | None = None, device: torch.device | None = None
) -> Tensor:
    """Return the distance back from each of the last T positions to each of S keys, (B or 1, T, S).

    Padding (``padding`` is (B, S)) is not counted. The query's own key has distance 0, and so have later keys: mask
    those.
    """
    keys = positions_of(key_length, key_length, padding=padding, device=device)  # (B or 1, S)
    queries = keys[:, key_length - query_length :].unsqueeze(2)  # (B or 1, T, 1)
    return (queries - keys.unsqueeze(1)).clamp(min=0)


class AdaptiveSpan(nn.Module):
    """Soft mask m_z(x) = clamp((R + z - x) / R, 0, 1) of a key at distance x (Sukhbaatar et al. 2019a, section 2.2).

    ``length`` is a parameter, one z per head, in tokens. ``forward`` clamps it to [0, ``limit``], outside which it has
    no gradient, so training should call :meth:`clamp` after each step.

    Args:
        num_heads: H.
        limit: the largest z.
        ramp: R, the number of tokens over which the mask falls from 1 to 0.
        initial: the initial z.
    """

    def __init__(self, num_heads: int, *, limit: int, ramp: int, initial: float = 0.0) -> None:
        super().__init__()
        self.limit = limit
        self.ramp = ramp
        self.length = nn.Parameter(torch.full((num_heads,), initial))

    def forward(self, distances: Tensor) -> Tensor:
        """(S) -> (H, S), in float32 at least: float16 cannot represent odd integers above 2,048."""
        length = self.clamped().to(torch.promote_types(self.length.dtype, torch.float32))
        return ((self.ramp + length.unsqueeze(1) - distances) / self.ramp).clamp(0, 1)

    def clamped(self) -> Tensor:
        """Return z clamped to its limits, (H)."""
        return self.length.clamp(0, self.limit)

    def clamp(self) -> None:
        """Clamp the parameter to its limits in place."""
        with torch.no_grad():
            self.length.clamp_(0, self.limit)


class SpanAttention(nn.Module):
    """Multi-head attention to the most recent tokens and to learned persistent vectors.

    A query scores the key at distance x with q (k + p_x) / sqrt(D), where p_x is the embedding of that distance
    (Sukhbaatar et al. 2019a, section 2.1), and a persistent vector with q k / sqrt(D) (Sukhbaatar et al. 2019b,
    section 4). Weights are proportional to m_z(x) exp(score) for tokens and to exp(score) for persistent vectors,
    which every query sees. Projections have no biases.

    Args:
        hidden_size: E.
        num_heads: H.
        span: the largest number of keys that a query sees, its own included.
        ramp: R of :class:`AdaptiveSpan`; if None, every head has the whole span.
        initial_span: the initial z of :class:`AdaptiveSpan`.
        num_memories: N; 0 by default.
        dropout: on the attention weights, in training only.

    Raises:
        ValueError: when E is not divisible by H.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        span: int,
        ramp: int | None = None,
        initial_span: float = 0.0,
        num_memories: int = 0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if hidden_size % num_heads:
            raise ValueError(f"hidden_size {hidden_size} is not divisible by num_heads {num_heads}")
        self.num_heads = num_heads
        self.span = span
        self.num_memories = num_memories
        self.dropout = dropout
        self.query = nn.Linear(hidden_size, hidden_size, bias=False)
        self.key = nn.Linear(hidden_size, hidden_size, bias=False)
        self.value = nn.Linear(hidden_size, hidden_size, bias=False)
        self.output = nn.Linear(hidden_size, hidden_size, bias=False)
        self.adaptive = None if ramp is None else AdaptiveSpan(num_heads, limit=span, ramp=ramp, initial=initial_span)
        if num_memories:
            # Unit variance, that of normalised tokens' keys and values (Sukhbaatar et al. 2019b).
            shape = (num_heads, num_memories, hidden_size // num_heads)
            self.memory_key = nn.Parameter(torch.randn(shape))
            self.memory_value = nn.Parameter(torch.randn(shape))

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        distances: Tensor,
        *,
        mask: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Attend from ``x`` (B, T, E) to itself and to the cached tokens.

        Args:
            x: (B, T, E).
            positions: (span, D), an embedding of each distance, shared by all heads.
            distances: (B or 1, T, S), see :func:`distances_of`.
            mask: boolean, (B or 1, 1, T, S), True where a query may see a key; persistent vectors are never masked.
            cache: keys and values of the tokens before ``x``; those of ``x`` are appended.
        """
        query, key, value, bias = self._prepare(x, positions, distances, mask, cache)
        dropout = self.dropout if self.training else 0.0
        return self._merge(scaled_dot_product_attention(query, key, value, bias=bias, dropout=dropout))

    def weights(self, x: Tensor, positions: Tensor, distances: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Return the attention weights (B, H, T, N + S) of :meth:`forward`, persistent vectors first."""
        query, key, _, bias = self._prepare(x, positions, distances, mask, None)
        return attention_weights(query, key, bias=bias)

    def _prepare(
        self, x: Tensor, positions: Tensor, distances: Tensor, mask: Tensor | None, cache: LayerCache | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys, values and the bias on the scores, (B, H, T, N + S)."""
        query, key, value = (self._split(layer(x)) for layer in (self.query, self.key, self.value))
        if cache is not None:
            key, value = cache.extend(key, value)
        bias = self._bias(query, positions, distances)
        if mask is not None:
            bias = bias.masked_fill(~mask, -math.inf)
        if self.num_memories:
            rows = (x.shape[0], -1, -1, -1)
            key = torch.cat((self.memory_key.expand(rows), key), dim=2)
            value = torch.cat((self.memory_value.expand(rows), value), dim=2)
            bias = F.pad(bias, (self.num_memories, 0))
        return query, key, value, bias

    def _bias(self, query: Tensor, positions: Tensor, distances: Tensor) -> Tensor:
        """q p_x / sqrt(D) + log m_z(x): (B, H, T, S), computed per distance and then gathered per key."""
        every = torch.arange(distances.shape[-1], device=query.device)
        embedded = positions.index_select(0, every.clamp(max=self.span - 1))  # (S, D)
        by_distance = query @ embedded.T * query.shape[-1] ** -0.5  # (B, H, T, S)
        seen = (every < self.span).unsqueeze(0)  # (1, S)
        if self.adaptive is not None:
            share = self.adaptive(every)  # (H, S)
            seen = seen & (share > 0)
            # Replace hidden entries by 1 before the logarithm: log 0 would make the gradient of z NaN.
            by_distance = by_distance + share.masked_fill(~seen, 1).log().to(query.dtype).unsqueeze(1)
        by_distance = by_distance.masked_fill(~seen.unsqueeze(1), -math.inf)
        return by_distance.gather(-1, distances.unsqueeze(1).expand(query.shape[0], self.num_heads, -1, -1))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, T, H D) -> (B, H, T, D)

    def _merge(self, x: Tensor) -> Tensor:
        return self.output(x.transpose(1, 2).flatten(2))  # (B, H, T, D) -> (B, T, H D) -> (B, T, E)
