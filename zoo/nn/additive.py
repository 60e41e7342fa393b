"""Additive attention (Bahdanau et al. 2015, section 3.1 and appendix A.1.2).

B batch, T queries, S keys, A attention size, M memory size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.nn.recording import record_attention

__all__ = ["AdditiveAttention"]


class AdditiveAttention(nn.Module):
    """e_ij = v^T tanh(W s_i + U h_j), a_i = softmax(e_i), c_i = sum_j a_ij h_j.

    Args:
        query_size: width of s.
        memory_size: M, width of h.
        attention_size: A, width of v.
        bias: whether U h has a bias, which the paper's equations omit.
    """

    def __init__(self, query_size: int, memory_size: int, attention_size: int, *, bias: bool = True) -> None:
        super().__init__()
        self.query = nn.Linear(query_size, attention_size, bias=False)
        self.key = nn.Linear(memory_size, attention_size, bias=bias)
        self.score = nn.Linear(attention_size, 1, bias=False)

    def forward(
        self, query: Tensor, memory: Tensor, *, keys: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Return the contexts c.

        Args:
            query: (B, T, query size).
            memory: (B, S, M).
            keys: U h, (B, S, A), from :meth:`keys`; pass it to reuse one projection of ``memory`` across calls.
            mask: boolean, (B or 1, T or 1, S), True where a query may see a key. A query that sees no key gets 0.

        Returns:
            (B, T, M).
        """
        context, weights = self.with_weights(query, memory, keys=keys, mask=mask)
        record_attention(lambda: weights.unsqueeze(1))
        return context

    def with_weights(
        self, query: Tensor, memory: Tensor, *, keys: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the contexts of :meth:`forward` and their attention weights (B, T, S)."""
        keys = self.keys(memory) if keys is None else keys
        sums = self.query(query).unsqueeze(2) + keys.unsqueeze(1)  # (B, T, S, A)
        scores = self.score(torch.tanh(sums)).squeeze(-1)  # (B, T, S)
        if mask is not None:
            # Not -inf: in a fully masked row, the softmax and its gradients would be NaN.
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores, dim=-1)
        weights = weights if mask is None else weights.masked_fill(~mask, 0.0)
        return weights @ memory, weights

    def keys(self, memory: Tensor) -> Tensor:
        """Project the memory, U h: (B, S, M) -> (B, S, A)."""
        projected: Tensor = self.key(memory)
        return projected
