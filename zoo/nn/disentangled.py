"""Disentangled attention, whose scores depend on contents and on relative positions apart (He et al. 2021, DeBERTa).

B batch, T tokens, H heads, D head size, E hidden size, N rows of the table of distances.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from zoo.nn.attention import scaled_dot_product_attention
from zoo.nn.recording import recorded_attentions

__all__ = ["DisentangledAttention", "DistanceTable", "PositionTerm", "distance_rows"]

PositionTerm = Literal["c2p", "p2c"]
"""A term of the scores: content of the query to position of the key, or position of the query to content of the key."""


def distance_rows(max_distance: int, num_buckets: int = 0) -> list[int]:
    """Return the row of a table of distances for each distance from -``max_distance`` to ``max_distance``.

    Without buckets, each distance has a row (section 3.1, equation 3), and the last ones also stand for those beyond:
    2 ``max_distance`` rows, of which row ``max_distance`` is that of the token itself. With buckets, distances up to
    half of ``num_buckets`` have rows of their own, and the others share rows whose ranges grow logarithmically up to
    ``max_distance`` - 1: 2 ``num_buckets`` rows (He et al. 2023, DeBERTaV3, whose published code defines them).

    Integer arithmetic finds the buckets exactly; logarithms near a boundary round differently on different runtimes.

    Raises:
        ValueError: the number of buckets is odd or less than 4, or ``max_distance`` leaves nothing for the logarithmic
            ones.

    >>> distance_rows(3)
    [0, 1, 2, 3, 4, 5, 5]
    >>> distance_rows(7, 4)
    [0, 1, 1, 1, 1, 2, 3, 4, 5, 6, 7, 7, 7, 7, 7]
    """
    half = num_buckets // 2
    if num_buckets and (num_buckets % 2 or half < 2 or max_distance <= half + 1):
        raise ValueError(f"{num_buckets} distance buckets do not fit a maximum distance of {max_distance}")
    span, buckets, bucket = num_buckets or max_distance, [], 0
    for distance in range(max_distance + 1):
        if not num_buckets or distance <= half:
            bucket = distance
        else:
            while not _within(distance, bucket - half, half=half, last=max_distance - 1):
                bucket += 1
        buckets.append(bucket)
    signed = [-bucket for bucket in reversed(buckets[1:])] + buckets
    return [min(max(bucket + span, 0), 2 * span - 1) for bucket in signed]


def _within(distance: int, n: int, *, half: int, last: int) -> bool:
    """Whether (half - 1) log(distance / half) <= n log(last / half): a distance lies within the n-th growing range."""
    return distance ** (half - 1) * half**n <= last**n * half ** (half - 1)


class DistanceTable(nn.Module):
    """Embeddings of distances, which the blocks of a model share, and the row of each pair of tokens.

    Args:
        hidden_size: E.
        max_distance: see :func:`distance_rows`.
        num_buckets: see :func:`distance_rows`; 0 for none.
        norm_eps: epsilon of a LayerNorm of the embeddings; none by default.
    """

    def __init__(
        self, hidden_size: int, *, max_distance: int, num_buckets: int = 0, norm_eps: float | None = None
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(2 * (num_buckets or max_distance), hidden_size)
        self.norm = None if norm_eps is None else nn.LayerNorm(hidden_size, eps=norm_eps)
        self.rows = distance_rows(max_distance, num_buckets)

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        """Return the embeddings, (N, E), and the row of the distance of each query from each key, (T, T)."""
        device, farthest = self.table.weight.device, len(self.rows) // 2
        places = torch.arange(length, device=device)
        distances = (places.unsqueeze(1) - places).clamp(-farthest, farthest)  # (T, T)
        rows = torch.tensor(self.rows, device=device)
        chosen = rows.index_select(0, (distances + farthest).flatten()).unflatten(0, distances.shape)
        embeddings = self.table.weight
        return embeddings if self.norm is None else self.norm(embeddings), chosen


class DisentangledAttention(nn.Module):
    """Multi-head self-attention with scores of contents and of relative positions (He et al. 2021, equation 4).

    The score of a query i and a key j is (q_i k_j + q_i k'_r + q'_r k_j) / sqrt(n D), where r is the row of the
    distance i - j, k' and q' are keys and queries of the embeddings of distances, and n is the number of terms, 3 with
    both terms of positions. As in the published code, r is also the row of the last term, where the paper has that of
    j - i.

    Args:
        hidden_size: E.
        num_heads: H.
        terms: the terms of positions; if empty, this is multi-head attention.
        shared: whether the projections of tokens also project the embeddings of distances (DeBERTaV3).
        dropout: on the attention weights, in training only.

    Raises:
        ValueError: when E is not divisible by H.

    >>> distances = DistanceTable(64, max_distance=16)
    >>> attention = DisentangledAttention(64, num_heads=4)
    >>> attention(torch.randn(3, 7, 64), distances=distances(7)).shape
    torch.Size([3, 7, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        terms: Sequence[PositionTerm] = ("c2p", "p2c"),
        shared: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if hidden_size % num_heads:
            raise ValueError(f"hidden_size {hidden_size} is not divisible by num_heads {num_heads}")
        self.num_heads = num_heads
        self.terms = tuple(terms)
        self.dropout = dropout
        # The published code computes this root in float32, also in models of float64.
        root = torch.tensor(hidden_size // num_heads * (1 + len(self.terms)), dtype=torch.float32, device="cpu").sqrt()
        self.scale = 1 / root.item()
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.output = nn.Linear(hidden_size, hidden_size)
        self.position_key = nn.Linear(hidden_size, hidden_size) if "c2p" in self.terms and not shared else None
        self.position_query = nn.Linear(hidden_size, hidden_size) if "p2c" in self.terms and not shared else None

    def forward(
        self, x: Tensor, *, mask: Tensor | None = None, distances: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """(B, T, E) -> (B, T, E). ``distances`` comes from :class:`DistanceTable`; None if there are no ``terms``."""
        query, key, value = self._split(self.query(x)), self._split(self.key(x)), self._split(self.value(x))
        bias = None if distances is None else self.bias(query, key, *distances)
        dropout = self.dropout if self.training else 0.0
        heads = scaled_dot_product_attention(query, key, value, mask=mask, bias=bias, scale=self.scale, dropout=dropout)
        return self.output(heads.transpose(1, 2).flatten(2))  # (B, H, T, D) -> (B, T, H D) -> (B, T, E)

    def bias(self, query: Tensor, key: Tensor, embeddings: Tensor, rows: Tensor) -> Tensor:
        """Return the scaled scores of positions, (B, H, T, T).

        Args:
            query: (B, H, T, D).
            key: (B, H, T, D).
            embeddings: of distances, (N, E).
            rows: the row of ``embeddings`` for each query and key, (T, T).
        """
        embeddings, parts = embeddings.unsqueeze(0), []
        shape = (*query.shape[:3], rows.shape[1])
        if "c2p" in self.terms:
            project = self.key if self.position_key is None else self.position_key
            by_row = query @ self._split(project(embeddings)).transpose(-2, -1)  # (B, H, T, N)
            parts.append(by_row.gather(-1, rows.expand(shape)))
        if "p2c" in self.terms:
            project = self.query if self.position_query is None else self.position_query
            by_row = key @ self._split(project(embeddings)).transpose(-2, -1)  # (B, H, T, N), of keys
            parts.append(by_row.gather(-1, rows.T.expand(shape)).transpose(-2, -1))
        return torch.stack(parts).sum(0) * self.scale if len(parts) > 1 else parts[0] * self.scale

    def with_weights(
        self, x: Tensor, *, mask: Tensor | None = None, distances: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the output of :meth:`forward` and its attention weights (B, H, T, T)."""
        with recorded_attentions() as weights:
            output = self(x, mask=mask, distances=distances)
        return output, weights[0]

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, T, H D) -> (B, H, T, D)
