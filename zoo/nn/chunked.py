"""Causal attention within chunks of neighbouring or similarly hashed tokens (Kitaev et al. 2020, section 2).

B batch, T tokens (a multiple of C), H heads, D head size, E hidden size, C tokens per chunk, N chunks, R hash rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.nn.attention import scaled_dot_product_attention
from zoo.nn.recording import mix_values

__all__ = ["LSHAttention", "LocalAttention"]

_ITSELF = -1e4
"""Score of a token with itself: low enough that any other key wins, and finite in float16."""


def _with_previous(x: Tensor, dim: int) -> Tensor:
    """Prepend to each chunk the previous one: (..., N, C, ...) -> (..., N, 2 C, ...), with the chunks along ``dim``.

    The first chunk gets the last one.
    """
    previous = torch.cat((x.narrow(dim, -1, 1), x.narrow(dim, 0, x.shape[dim] - 1)), dim)
    return torch.cat((previous, x), dim + 1)


class LocalAttention(nn.Module):
    """Causal attention of each token to its own chunk and the previous one.

    Args:
        hidden_size: E.
        num_heads: H.
        head_dim: D.
        chunk_length: C.
        dropout: on the attention weights, in training only.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, *, head_dim: int, chunk_length: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.chunk_length = chunk_length
        self.dropout = dropout
        self.query, self.key, self.value = (nn.Linear(hidden_size, num_heads * head_dim, bias=False) for _ in range(3))
        self.output = nn.Linear(num_heads * head_dim, hidden_size, bias=False)

    def find_buckets(self, x: Tensor, tokens: Tensor) -> None:
        """No-op: local attention has no buckets."""

    def forward(self, x: Tensor, tokens: Tensor, buckets: Tensor | None = None) -> Tensor:
        """(B, T, E) and (B, T), True for a token and False for padding -> (B, T, E)."""
        length, size = x.shape[1], self.chunk_length
        query, key = (self._chunks(self._split(part(x))) for part in (self.query, self.key))  # (B, H, N, C, D)
        query, key = self._fold(query), self._fold(_with_previous(key, 2))
        places = torch.arange(length, device=x.device).unflatten(0, (-1, size))  # (N, C)
        others = torch.cat((places - size, places), 1)  # (N, 2 C); negative before the first chunk
        seen = (others.unsqueeze(1) <= places.unsqueeze(2)) & (others.unsqueeze(1) >= 0)  # (N, C, 2 C)
        real = _with_previous(tokens.unflatten(1, (-1, size)), 1)  # (B, N, 2 C)
        mask = (seen & real.unsqueeze(2)).flatten(0, 1).unsqueeze(1)  # (B N, 1, C, 2 C)
        dropout = self.dropout if self.training else 0.0

        def mix(value: Tensor) -> Tensor:
            """(B, H, T, D) -> (B, H, T, D)."""
            value = self._fold(_with_previous(self._chunks(value), 2))
            mixed = scaled_dot_product_attention(query, key, value, mask=mask, dropout=dropout)  # (B N, H, C, D)
            return mixed.unflatten(0, (x.shape[0], -1)).transpose(1, 2).flatten(2, 3)

        mixed = mix_values(mix, self._split(self.value(x)))
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, T, H D) -> (B, H, T, D)

    def _chunks(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, self.chunk_length))  # (B, H, T, D) -> (B, H, N, C, D)

    def _fold(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(0, 1)  # (B, H, N, ...) -> (B N, H, ...)


class LSHAttention(nn.Module):
    """Causal attention to tokens with the same hash, in several hash rounds, with shared queries and keys.

    A hash is argmax([x W; -x W]) with a random matrix W. Tokens are sorted by hash, then by position, and cut into
    chunks; each token attends to the earlier tokens of its own chunk and the previous one. Keys are scaled to length
    1. A token attends to itself only if it sees no other token. Rounds are weighted by their sums of exp(scores). W is
    drawn once and saved, so equal inputs have equal hashes.

    Chunks depend on the whole sorted sequence, so a later token may change *which* earlier tokens are seen, but never
    their content. With a single chunk this is full attention and strictly causal.

    Args:
        hidden_size: E.
        num_heads: H.
        head_dim: D.
        chunk_length: C.
        num_hashes: R.
        num_buckets: number of values of a hash, even; several numbers make a hash that combines several smaller ones.
        wrap: whether the first chunk of a round also sees the last chunk of the previous round (in the first round, of
            the last round), as in published implementations. Padding then changes which tokens are seen.
        dropout: on the attention weights, in training only.

    Raises:
        ValueError: a number of buckets is odd.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        head_dim: int,
        chunk_length: int,
        num_hashes: int,
        num_buckets: Sequence[int],
        wrap: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if not num_buckets or any(number < 2 or number % 2 for number in num_buckets):
            raise ValueError(f"num_buckets must be even positive numbers, got {tuple(num_buckets)}")
        self.num_heads = num_heads
        self.chunk_length = chunk_length
        self.num_hashes = num_hashes
        self.num_buckets = tuple(num_buckets)
        self.wrap = wrap
        self.dropout = dropout
        self.query_key = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.value = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.output = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        self.rotations: Tensor
        """W, (H, D, R x half of the buckets)."""
        self.register_buffer("rotations", torch.randn(num_heads, head_dim, num_hashes * sum(num_buckets) // 2))

    @torch.no_grad()
    def find_buckets(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Return the hash of each token in each head and round, (B, H, R, T); padding has its own bucket, the last."""
        return self._hash(self._split(self.query_key(x)), tokens)

    def _hash(self, shared: Tensor, tokens: Tensor) -> Tensor:
        rotated = (shared.detach() @ self.rotations).unflatten(-1, (self.num_hashes, -1))  # (B, H, T, R, ...)
        bucket = torch.zeros_like(rotated[..., 0], dtype=torch.long)  # (B, H, T, R)
        start, values = 0, 1
        for number in self.num_buckets:
            part = rotated[..., start : start + number // 2]
            bucket = bucket + values * torch.cat((part, -part), -1).argmax(-1)
            start, values = start + number // 2, values * number
        return bucket.transpose(2, 3).masked_fill(~tokens.unsqueeze(1).unsqueeze(1), values)

    def forward(self, x: Tensor, tokens: Tensor, buckets: Tensor | None = None) -> Tensor:
        """(B, T, E) and (B, T), True for a token and False for padding -> (B, T, E).

        ``buckets``, if given, are the result of :meth:`find_buckets`.
        """
        length = x.shape[1]
        shared, value = self._split(self.query_key(x)), self._split(self.value(x))  # (B, H, T, D)
        buckets = self._hash(shared, tokens) if buckets is None else buckets.long()
        places = torch.arange(length, device=x.device)
        # The sort keys are distinct, so the order is the same on every runtime.
        order = (buckets * length + places).sort(dim=-1).indices  # (B, H, R, T)
        back = torch.zeros_like(order).scatter(-1, order, places.expand_as(order)).unsqueeze(-1)  # (B, H, R, T, 1)

        key = self._unit(shared)
        flat = order.flatten(2)  # (B, H, R T)
        query, key = (self._chunks(_pick(part, flat)) for part in (shared, key))  # (B, H, R N, C, D)
        place = self._chunks(flat)  # (B, H, R N, C)
        real = self._chunks(tokens.unsqueeze(1).expand(-1, self.num_heads, -1).gather(2, flat))

        key, others, real = (_with_previous(part, 2) for part in (key, place, real))  # 2 C each
        inside = self._inside(length // self.chunk_length, x.device)  # (R N, 1, 2 C)
        others, place = others.unsqueeze(3), place.unsqueeze(4)
        itself = (others == place) & inside  # (B, H, R N, C, 2 C)
        seen = (others < place) & real.unsqueeze(3) & inside
        scores = query @ key.transpose(-2, -1)
        scores = scores.masked_fill(itself, _ITSELF).masked_fill(~(seen | itself), -math.inf)
        top = scores.amax(-1, keepdim=True)
        weights = (scores - top).exp()
        total = weights.sum(-1, keepdim=True)
        weights = F.dropout(weights / total, self.dropout, self.training)
        log_weights = self._rounds(top + total.log()).gather(3, back)  # (B, H, R, T, 1), log-weights of the rounds

        def mix(value: Tensor) -> Tensor:
            """(B, H, T, D) -> (B, H, T, D)."""
            mixed = weights @ _with_previous(self._chunks(_pick(value, flat)), 2)  # (B, H, R N, C, D)
            mixed = self._rounds(mixed).gather(3, back.expand(-1, -1, -1, -1, mixed.shape[-1]))
            return (mixed * log_weights.softmax(2)).sum(2)

        return self.output(mix_values(mix, value).transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, T, H D) -> (B, H, T, D)

    def _chunks(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, self.chunk_length))  # (B, H, R T, ...) -> (B, H, R N, C, ...)

    def _rounds(self, x: Tensor) -> Tensor:
        return x.flatten(2, 3).unflatten(2, (self.num_hashes, -1))  # (B, H, R N, C, D) -> (B, H, R, T, D)

    def _unit(self, x: Tensor) -> Tensor:
        """Scale to length 1, as published implementations do: by the root mean square, then by 1 / sqrt(D)."""
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * x.shape[-1] ** -0.5

    def _inside(self, chunks: int, device: torch.device) -> Tensor:
        """Boolean mask, (R N, 1, 2 C), of the visible keys in the previous chunk and the chunk itself."""
        later = (torch.arange(chunks, device=device) > 0).repeat(self.num_hashes).unsqueeze(1)
        itself = torch.ones_like(later)
        both = torch.cat((itself if self.wrap else later, itself), 1)  # (R N, 2)
        return both.repeat_interleave(self.chunk_length, 1).unsqueeze(1)


def _pick(x: Tensor, places: Tensor) -> Tensor:
    """(B, H, T, D) and (B, H, R T) -> (B, H, R T, D)."""
    return x.gather(2, places.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1]))
