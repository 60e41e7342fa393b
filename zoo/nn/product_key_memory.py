"""A memory of n^2 slots, searched by two nearest-neighbour searches over n half-keys each (Lample et al. 2019).

M tokens of the whole batch, H heads, n half-keys per side, k slots read per head, Q query size, E hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["ProductKeyMemory"]


class ProductKeyMemory(nn.Module):
    """Sum of softmax(score) value over all heads and each head's k best slots (Lample et al. 2019, section 3).

    Slot (i, j) has the key [c_i ; c'_j] and therefore the score q_1 c_i + q_2 c'_j, where q_1 and q_2 are the halves of
    a query. The k best of all n^2 slots are among the k x k pairs of each side's k best half-keys, so the search is
    exact. Each head has its own half-keys; all heads share the values.

    In training, batch normalisation of the queries makes every output depend on all tokens of the batch, later tokens
    and padding included. In evaluation it does not.

    Args:
        hidden_size: E.
        num_keys: n.
        top_k: k.
        num_heads: H.
        query_size: Q, even.

    Raises:
        ValueError: when k is above n, or Q is odd.
    """

    def __init__(
        self, hidden_size: int, *, num_keys: int, top_k: int, num_heads: int = 4, query_size: int = 512
    ) -> None:
        super().__init__()
        if top_k > num_keys:
            raise ValueError(f"top_k {top_k} is above num_keys {num_keys}")
        if query_size % 2:
            raise ValueError(f"query_size must be even, got {query_size}")
        self.num_heads = num_heads
        self.num_keys = num_keys
        self.top_k = top_k
        self.query = nn.Linear(hidden_size, num_heads * query_size)
        self.query_norm = nn.BatchNorm1d(num_heads * query_size)
        half = query_size // 2
        self.keys = nn.Parameter(torch.randn(2, num_heads, num_keys, half) * half**-0.5)
        self.values = nn.Embedding(num_keys**2, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        scores, slots = self.search(x)
        weights = scores.softmax(-1).to(x.dtype).flatten(1).unsqueeze(1)  # (M, 1, H k)
        read = weights @ self.values(slots.flatten(1))  # (M, 1, H k) @ (M, H k, E)
        return read.view(x.shape)

    def search(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The k best slots for (B, T, E) and their scores, best first: (M, H, k) each."""
        best, places = self.score(x).transpose(1, 2).topk(self.top_k)  # (2, M, H, k)
        pairs = best[0].unsqueeze(-1) + best[1].unsqueeze(-2)  # (M, H, k, k)
        top, pair = pairs.flatten(-2).topk(self.top_k)  # (M, H, k)
        first = places[0].gather(-1, pair // self.top_k)
        second = places[1].gather(-1, pair % self.top_k)
        return top, first * self.num_keys + second

    def score(self, x: Tensor) -> Tensor:
        """The score of every half-key of both sides for (B, T, E): (2, H, M, n)."""
        queries = self.query_norm(self.query(x.flatten(0, 1)))  # (M, H Q)
        halves = queries.unflatten(-1, (self.num_heads, 2, -1)).permute(2, 1, 0, 3)  # (2, H, M, Q / 2)
        # In float32 at least: in 16 bits many scores tie, and the choice between ties is arbitrary.
        wide = torch.promote_types(x.dtype, torch.float32)
        return halves.to(wide) @ self.keys.to(wide).transpose(-2, -1)
