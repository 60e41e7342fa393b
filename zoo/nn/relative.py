"""Relative position biases on attention scores. T queries, S keys, H heads, M maximum distance."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

__all__ = ["LinearBiases", "RelativePositionBias", "relative_buckets"]


def relative_buckets(relative: Tensor, num_buckets: int, max_distance: int, *, causal: bool) -> Tensor:
    """Map positions relative to a query to buckets (Raffel et al. 2020, section 2.1).

    Half of the buckets hold one distance each. The others cover ranges that grow logarithmically; the last holds every
    distance from ``max_distance`` on. With ``causal``, keys after the query share the query's own bucket; otherwise
    they get half of the buckets, and keys before the query the other half.

    Args:
        relative: integers of any shape, key position minus query position.
        num_buckets: number of buckets.
        max_distance: M.
        causal: whether queries never see later keys.

    Returns:
        Integers of the same shape, in [0, num_buckets).

    Raises:
        ValueError: there are too few buckets, or ``max_distance`` leaves nothing for the logarithmic ones.

    >>> relative_buckets(torch.tensor([0, -1, -2, -5, -9, -500]), 8, 16, causal=True)
    tensor([0, 1, 2, 4, 6, 7])
    """
    one_side = num_buckets if causal else num_buckets // 2
    single = one_side // 2
    if single < 1 or max_distance <= single:
        raise ValueError(f"{num_buckets} relative buckets do not fit a maximum distance of {max_distance}")
    distance = (-relative).clamp(min=0) if causal else relative.abs()
    bucket = distance.clamp(max=single)
    for first in _growing_buckets(single, one_side - single, max_distance):
        bucket = bucket + (distance >= first)
    return bucket if causal else bucket + (relative > 0) * one_side


def _growing_buckets(single: int, count: int, max_distance: int) -> list[int]:
    """Return the first distance of each logarithmic bucket after the first, which begins at ``single``.

    Bucket n begins where count log(d / single) = n log(max_distance / single). Integer arithmetic finds it exactly;
    logarithms near a boundary round differently on different runtimes.
    """
    firsts, distance = [], single
    for n in range(1, count):
        while distance**count < max_distance**n * single ** (count - n):
            distance += 1
        firsts.append(distance)
    return firsts


class RelativePositionBias(nn.Module):
    """A learned bias for each head and bucket of :func:`relative_buckets`, added to the scores.

    Args:
        num_heads: H.
        num_buckets: rows of the table.
        max_distance: M.
        causal: whether queries never see later keys.
    """

    def __init__(self, num_heads: int, *, num_buckets: int = 32, max_distance: int = 128, causal: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(num_buckets, num_heads)
        self.max_distance = max_distance
        self.causal = causal

    def forward(self, query_length: int, key_length: int) -> Tensor:
        """Return the bias (1, H, T, S) for queries at the last T of S positions."""
        device, farthest = self.table.weight.device, self.max_distance
        every = torch.arange(-farthest, farthest + 1, device=device)
        buckets = relative_buckets(every, self.table.num_embeddings, farthest, causal=self.causal)
        by_distance = self.table(buckets).T  # (H, 2 M + 1)
        keys = torch.arange(key_length, device=device)
        queries = torch.arange(key_length - query_length, key_length, device=device)
        relative = (keys - queries.unsqueeze(1)).clamp(-farthest, farthest)  # (T, S)
        return by_distance.index_select(1, (relative + farthest).flatten()).unflatten(1, relative.shape).unsqueeze(0)


class LinearBiases(nn.Module):
    """ALiBi: scores fall linearly with the distance of a key (Press et al. 2022, section 3). No weights.

    Head h has the slope 2^(-8 h / n) for a power of two of heads, n = H. For others, the slopes for the next lower
    power come first, then every other one of those for twice as many heads, as in the published code.

    Softmax does not change when all scores of a query do by the same amount, so the bias depends on the key alone: the
    slope times its position, counted from the last key.

    Args:
        num_heads: H.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        power = 2 ** math.floor(math.log2(num_heads))
        slopes = [2 ** (-8 * head / power) for head in range(1, power + 1)]
        slopes += [2 ** (-4 * head / power) for head in range(1, 2 * (num_heads - power), 2)]
        self.slopes = tuple(slopes)
        """The slope of each head."""

    def forward(self, key_length: int, x: Tensor) -> Tensor:
        """Return the bias (1, H, 1, S), computed in float32 at least, in the dtype and on the device of ``x``."""
        wide = torch.promote_types(x.dtype, torch.float32)
        slopes = torch.tensor(self.slopes, dtype=wide, device=x.device)
        positions = torch.arange(1 - key_length, 1, device=x.device).to(wide)
        return (slopes[:, None, None] * positions).to(x.dtype).unsqueeze(0)
