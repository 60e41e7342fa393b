"""Performer: attention by random features, FAVOR+ (Choromanski et al. 2021).

B batch, T tokens, M features, H heads, D head size, E hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.nn.encoder_attention import EncoderAttention
from zoo.nn.recording import mix_values

__all__ = ["PerformerAttention", "orthogonal_features"]


def orthogonal_features(count: int, size: int) -> Tensor:
    """Return random directions w, (``count``, ``size``), each from N(0, I) and orthogonal within blocks of ``size``.

    Drawn from torch's seeded generator (section 2.4 of the paper). Orthogonality lowers the variance of the estimate
    and keeps its mean.
    """
    blocks = -(-count // size)
    # Multiplying Q's columns by the signs of R's diagonal makes Q uniform over the orthogonal matrices.
    q, r = torch.linalg.qr(torch.randn(blocks, size, size))
    rows = (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).transpose(-2, -1).flatten(0, 1)[:count]
    return rows * torch.randn(count, size).norm(dim=-1, keepdim=True)


class PerformerAttention(EncoderAttention):
    r"""phi(Q) (phi(K)^T V), each row divided by phi(Q) (phi(K)^T 1): O(T M) time and memory.

    The features ``phi(x) = exp(w x - |x|^2 / 2) / sqrt(M)`` of x / D^(1/4) are positive, and the mean of
    phi(q) . phi(k) over w is the softmax kernel exp(q . k / sqrt(D)) (lemma 1 of the paper).

    The implementation takes two softmaxes, equal to the above in exact arithmetic, so that nothing overflows and no
    divisor is 0. With ``a_tm = w_m k_t - |k_t|^2 / 2``,

        output = softmax_m(w_m q + log sum_t exp a_tm) (softmax_t(a_tm)^T V);

    factors common to all features of a query, such as its norm and 1 / sqrt(M), cancel. Each row of a batch has its
    own maxima. Pairwise weights are never computed, so there is no dropout on them; recording computes the weights that
    the features imply, at a cost of O(T^2).

    Args:
        hidden_size: E.
        num_heads: H.
        num_features: M. All heads share the directions, a buffer drawn once.

    Raises:
        ValueError: when E is not divisible by H, or M is not positive.
    """

    def __init__(self, hidden_size: int, num_heads: int, num_features: int) -> None:
        super().__init__(hidden_size, num_heads)
        if num_features < 1:
            raise ValueError(f"num_features must be positive, got {num_features}")
        self.features: Tensor
        self.register_buffer("features", orthogonal_features(num_features, hidden_size // num_heads))

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """(B, T, E) -> (B, T, E). ``mask`` is (B, T), non-zero for a token and zero for padding."""
        query, key, value = self._query_key_value(x)
        return self._merge(mix_values(lambda value: self.mix(query, key, value, mask), value))

    def mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """``query``, ``key`` and ``value``, (B, H, T, D) each -> (B, H, T, D)."""
        scale = query.shape[-1] ** -0.25
        query, key = query * scale, key * scale
        features = self.features.transpose(0, 1)  # (D, M)
        exponents = key @ features - key.square().sum(-1, keepdim=True) / 2  # (B, H, T, M)
        if mask is not None:  # half of the minimum, so that sums stay finite in rows that are all padding
            lowest = torch.finfo(exponents.dtype).min / 2
            exponents = exponents.masked_fill(~mask.bool()[:, None, :, None], lowest)
        highest = exponents.amax(2, keepdim=True)  # (B, H, 1, M)
        shares = (exponents - highest).exp()
        total = shares.sum(2, keepdim=True)
        seen = (shares / total).transpose(-2, -1) @ value  # the values averaged by each feature, (B, H, M, D)
        return torch.softmax(query @ features + highest + total.log(), dim=-1) @ seen
