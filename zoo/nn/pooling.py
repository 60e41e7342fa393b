"""Pooling of a sequence to one vector."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Pooling", "normalize", "pool"]

Pooling = Literal["cls", "mean", "last"]


def pool(x: Tensor, padding: Tensor | None, how: Pooling) -> Tensor:
    """Pool (B, T, E) to (B, E): the first token, or the mean or the last of the tokens that are not padding.

    The mean of a row that is all padding is 0, as in sentence-transformers (Reimers and Gurevych 2019); the last token
    of such a row is its first.

    >>> pool(torch.tensor([[[2.0], [4.0], [9.0]]]), torch.tensor([[1, 1, 0]]), "mean")
    tensor([[3.]])
    >>> pool(torch.tensor([[[2.0], [4.0], [9.0]]]), torch.tensor([[1, 1, 0]]), "last")
    tensor([[4.]])
    """
    if how == "cls":
        return x[:, 0]
    if how == "last":
        if padding is None:
            return x[:, -1]
        places = torch.arange(x.shape[1], device=x.device) * padding  # (B, T)
        last = places.argmax(-1)  # (B,)
        return x.gather(1, last[:, None, None].expand(-1, 1, x.shape[2])).squeeze(1)
    if padding is None:
        return x.mean(1)
    weights = padding.unsqueeze(-1).to(x.dtype)  # (B, T, 1)
    return (x * weights).sum(1) / weights.sum(1).clamp(min=1)


def normalize(x: Tensor) -> Tensor:
    """Scale vectors (..., E) to length 1; zero vectors stay 0 in every dtype, float16 included, where 1e-12 is 0.

    bfloat16 vectors are normalised in float32, because no ONNX Runtime provider implements ReduceL2 in bfloat16.
    """
    if x.dtype == torch.bfloat16:
        return normalize(x.float()).to(x.dtype)
    return F.normalize(x, dim=-1, eps=max(1e-12, torch.finfo(x.dtype).tiny))
