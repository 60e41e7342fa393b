"""One vector for a sequence."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

__all__ = ["Pooling", "pool"]

Pooling = Literal["cls", "mean"]


def pool(x: Tensor, padding: Tensor | None, how: Pooling) -> Tensor:
    """Pool (B, T, E) to (B, E): the first token, or the mean over tokens that are not padding.

    The mean of a row that is all padding is 0, as in sentence-transformers (Reimers and Gurevych 2019).
    """
    if how == "cls":
        return x[:, 0]
    if padding is None:
        return x.mean(1)
    weights = padding.unsqueeze(-1).to(x.dtype)  # (B, T, 1)
    return (x * weights).sum(1) / weights.sum(1).clamp(min=1)
