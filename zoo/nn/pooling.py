"""Pooling of a sequence to one vector, and the head that makes sentence embeddings."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.classes import EmbeddingConfig

__all__ = ["EmbeddingHead", "Pooling", "normalize", "pool"]

Pooling = Literal["cls", "mean", "max", "last", "mean_sqrt_len", "weighted_mean"]
"""Ways to pool the tokens of a row: see :func:`pool`."""


def pool(x: Tensor, padding: Tensor | None, how: Pooling) -> Tensor:
    """Pool (B, T, E) to (B, E), as sentence-transformers does (Reimers and Gurevych 2019).

    - ``cls``: the first token.
    - ``last``: the last token that is not padding.
    - ``mean``, ``max``: of the tokens that are not padding.
    - ``mean_sqrt_len``: their sum, divided by the square root of their number.
    - ``weighted_mean``: their mean weighted by position, 1 for the first (Muennighoff 2022).

    For a row that is all padding, ``cls`` and ``last`` are its first token, and the others 0.

    >>> x, padding = torch.tensor([[[2.0], [4.0], [9.0]]]), torch.tensor([[1, 1, 0]])
    >>> pool(x, padding, "mean"), pool(x, padding, "last")
    (tensor([[3.]]), tensor([[4.]]))
    """
    if how == "cls":
        return x[:, 0]
    if how == "last" and padding is None:
        return x[:, -1]
    places = torch.arange(x.shape[1], device=x.device)  # (T,)
    if padding is None:
        padding = torch.ones_like(places)[None].expand(x.shape[:2])
    if how == "last":
        last = (places * padding).argmax(-1)  # (B,)
        return x.gather(1, last[:, None, None].expand(-1, 1, x.shape[2])).squeeze(1)
    real = padding.unsqueeze(-1)  # (B, T, 1)
    if how == "max":
        highest = x.masked_fill(real == 0, torch.finfo(x.dtype).min).amax(1)
        return highest.masked_fill(real.sum(1) == 0, 0)
    weights = real.to(x.dtype) * (places + 1).to(x.dtype)[:, None] if how == "weighted_mean" else real.to(x.dtype)
    total, count = (x * weights).sum(1), weights.sum(1).clamp(min=1)
    return total / (count.sqrt() if how == "mean_sqrt_len" else count)


def normalize(x: Tensor) -> Tensor:
    """Scale vectors (..., E) to length 1; zero vectors stay 0 in every dtype, float16 included, where 1e-12 is 0.

    bfloat16 vectors are normalised in float32, because no ONNX Runtime provider implements ReduceL2 in bfloat16.
    """
    if x.dtype == torch.bfloat16:
        return normalize(x.float()).to(x.dtype)
    return F.normalize(x, dim=-1, eps=max(1e-12, torch.finfo(x.dtype).tiny))


_ACTIVATIONS = {"tanh": torch.tanh, "identity": lambda x: x, "relu": F.relu, "gelu": F.gelu, "silu": F.silu}


class EmbeddingHead(nn.Module):
    """Pooling, dense layers and normalisation, as in sentence-transformers (Reimers and Gurevych 2019).

    Args:
        config: chooses the pooling, the dense layers, and where vectors are scaled to unit length.
        width: width of the states to pool.
    """

    def __init__(self, config: EmbeddingConfig, width: int) -> None:
        super().__init__()
        self.config = config
        sizes = (width, *config.projection_sizes)
        self.projections = nn.ModuleList(
            nn.Linear(*layer, bias=config.projection_bias)
            for layer in zip(sizes, config.projection_sizes, strict=False)
        )

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """(B, T, E) and (B, T) -> (B, V), where V is the width of the last dense layer, or E."""
        vector = pool(x, padding, self.config.pooling)
        if self.config.normalize_first:
            vector = normalize(vector)
        for projection in self.projections:
            vector = _ACTIVATIONS[self.config.projection_activation](projection(vector))
        return normalize(vector) if self.config.normalize else vector
