"""Performer: attention by random features, FAVOR+ (Choromanski et al. 2021).

B batch, T tokens, M features, H heads, D head size, E hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.nn.linear_attention import LinearAttention
from zoo.nn.recording import mix_values

__all__ = ["PerformerAttention", "orthogonal_features"]


def orthogonal_features(count: int, size: int) -> Tensor:
    """Directions w, (``count``, ``size``), each from N(0, I), those of one block of ``size`` at right angles.

    Drawn from torch's seeded generator (section 2.4 of the paper). Right angles lower the variance and keep the mean.
    """
    blocks = -(-count // size)
    # What the decomposition calls Q is uniform over rotations and reflections once the signs of R are undone.
    q, r = torch.linalg.qr(torch.randn(blocks, size, size))
    rows = (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).transpose(-2, -1).flatten(0, 1)[:count]
    return rows * torch.randn(count, size).norm(dim=-1, keepdim=True)


class PerformerAttention(LinearAttention):
    r"""phi(Q) (phi(K)^T V), each row divided by phi(Q) (phi(K)^T 1): O(T M) time and memory.

    The features ``phi(x) = exp(w x - |x|^2 / 2) / sqrt(M)`` of x / D^(1/4) are positive, and phi(q) . phi(k) is
    exp(q . k / sqrt(D)) on average over w (lemma 1 of the paper), which softmax attention is made of.

    It is computed as two softmaxes, which is the same in exact arithmetic and cannot overflow or divide by 0. With
    ``a_tm = w_m k_t - |k_t|^2 / 2``,

        output = softmax_m(w_m q + log sum_t exp a_tm) (softmax_t(a_tm)^T V);

    what is the same for all features of a query, its norm and 1 / sqrt(M) among it, cancels. Maxima are taken over the
    tokens of one row of a batch alone. No weights of pairs of tokens are made, so nothing is dropped in training; those
    that are recorded are what it amounts to, which costs O(T^2).

    Args:
        hidden_size: E.
        num_heads: H.
        num_features: M. The directions are a buffer that all heads share; they are not drawn again.

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
        """Three of (B, H, T, D) -> (B, H, T, D)."""
        scale = query.shape[-1] ** -0.25
        query, key = query * scale, key * scale
        features = self.features.transpose(0, 1)  # (D, M)
        exponents = key @ features - key.square().sum(-1, keepdim=True) / 2  # (B, H, T, M)
        if mask is not None:  # finite after a sum too, for a row that is padding alone
            lowest = torch.finfo(exponents.dtype).min / 2
            exponents = exponents.masked_fill(~mask.bool()[:, None, :, None], lowest)
        highest = exponents.amax(2, keepdim=True)  # (B, H, 1, M)
        shares = (exponents - highest).exp()
        total = shares.sum(2, keepdim=True)
        seen = (shares / total).transpose(-2, -1) @ value  # what each feature stands for, (B, H, M, D)
        return torch.softmax(query @ features + highest + total.log(), dim=-1) @ seen
