"""Causal attention within chunks: of neighbours, or of what hashes alike (Kitaev et al. 2020, section 2).

B batch, T tokens, a multiple of the chunk; H heads, D head size, E hidden, C tokens a chunk, N chunks, R hash rounds.
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
"""Score of a token with itself: so low that any other key wins, and still a number in float16."""


def _with_previous(x: Tensor, dim: int) -> Tensor:
    """Put before each chunk the one before it: (..., N, C, ...) -> (..., N, 2 C, ...), where chunks lie along ``dim``.

    The first has the last before it.
    """
    previous = torch.cat((x.narrow(dim, -1, 1), x.narrow(dim, 0, x.shape[dim] - 1)), dim)
    return torch.cat((previous, x), dim + 1)


class LocalAttention(nn.Module):
    """Each token sees those of its own chunk and of the chunk before, up to itself.

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
        self.num_heads, self.chunk_length, self.dropout = num_heads, chunk_length, dropout
        self.query, self.key, self.value = (nn.Linear(hidden_size, num_heads * head_dim, bias=False) for _ in range(3))
        self.output = nn.Linear(num_heads * head_dim, hidden_size, bias=False)

    def find_buckets(self, x: Tensor, tokens: Tensor) -> None:
        """It needs none."""

    def forward(self, x: Tensor, tokens: Tensor, buckets: Tensor | None = None) -> Tensor:
        """(B, T, E) and (B, T), True for a token and False for padding -> (B, T, E)."""
        length, size = x.shape[1], self.chunk_length
        query, key = (self._chunks(self._split(part(x))) for part in (self.query, self.key))  # (B, H, N, C, D)
        query, key = self._fold(query), self._fold(_with_previous(key, 2))
        places = torch.arange(length, device=x.device).unflatten(0, (-1, size))  # (N, C)
        others = torch.cat((places - size, places), 1)  # (N, 2 C); there is none below 0
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
    """Each token sees earlier ones that hash alike, by several hashes, where queries and keys are the same.

    A hash is argmax([x R; -x R]) with a random matrix R. Tokens are sorted by it and then by position, and cut into
    chunks; each sees those of its own chunk and of the one before that come earlier in the text. Keys have length 1. A
    token sees itself only where it sees nothing else. The rounds are weighed by the sum of exp(scores) that each found.
    R is drawn once and saved: the same input has the same hashes.

    What lies in a chunk depends on all that is sorted, so a later token may change *which* earlier ones are seen,
    though never what they say. With one chunk it is full attention and strictly causal.

    Args:
        hidden_size: E.
        num_heads: H.
        head_dim: D.
        chunk_length: C.
        num_hashes: R.
        num_buckets: values of a hash, even; several make one hash of several smaller ones.
        wrap: whether the first chunk of a round also sees the last of the round before (and that of the first round the
            very last), as published implementations have it. Padding then changes what is seen.
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
            raise ValueError(f"num_buckets must be even numbers from 2 on, got {tuple(num_buckets)}")
        self.num_heads, self.chunk_length, self.num_hashes = num_heads, chunk_length, num_hashes
        self.num_buckets, self.wrap, self.dropout = tuple(num_buckets), wrap, dropout
        self.query_key = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.value = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.output = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        self.rotations: Tensor
        """(H, D, R x half of the buckets)."""
        self.register_buffer("rotations", torch.randn(num_heads, head_dim, num_hashes * sum(num_buckets) // 2))

    @torch.no_grad()
    def find_buckets(self, x: Tensor, tokens: Tensor) -> Tensor:
        """The hash of each token in each head and round, (B, H, R, T); padding has one of its own, the last."""
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

        ``buckets`` are those of :meth:`find_buckets`, where they are known.
        """
        length = x.shape[1]
        shared, value = self._split(self.query_key(x)), self._split(self.value(x))  # (B, H, T, D)
        buckets = self._hash(shared, tokens) if buckets is None else buckets.long()
        places = torch.arange(length, device=x.device)
        # No two are equal, so all runtimes sort alike.
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
        found = self._rounds(top + total.log()).gather(3, back)  # (B, H, R, T, 1), the logarithm of what each weighs

        def mix(value: Tensor) -> Tensor:
            """(B, H, T, D) -> (B, H, T, D)."""
            mixed = weights @ _with_previous(self._chunks(_pick(value, flat)), 2)  # (B, H, R N, C, D)
            mixed = self._rounds(mixed).gather(3, back.expand(-1, -1, -1, -1, mixed.shape[-1]))
            return (mixed * found.softmax(2)).sum(2)

        return self.output(mix_values(mix, value).transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, T, H D) -> (B, H, T, D)

    def _chunks(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, self.chunk_length))  # (B, H, R T, ...) -> (B, H, R N, C, ...)

    def _rounds(self, x: Tensor) -> Tensor:
        return x.flatten(2, 3).unflatten(2, (self.num_hashes, -1))  # (B, H, R N, C, D) -> (B, H, R, T, D)

    def _unit(self, x: Tensor) -> Tensor:
        """Of length 1, as published weights have it: the root of the mean square, and then of D."""
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * x.shape[-1] ** -0.5

    def _inside(self, chunks: int, device: torch.device) -> Tensor:
        """Whether the chunk before, and then the chunk itself, is one that may be seen: (R N, 1, 2 C)."""
        later = (torch.arange(chunks, device=device) > 0).repeat(self.num_hashes).unsqueeze(1)
        own = torch.ones_like(later)
        both = torch.cat((own if self.wrap else later, own), 1)  # (R N, 2)
        return both.repeat_interleave(self.chunk_length, 1).unsqueeze(1)


def _pick(x: Tensor, places: Tensor) -> Tensor:
    """(B, H, T, D) and (B, H, R T) -> (B, H, R T, D)."""
    return x.gather(2, places.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1]))
