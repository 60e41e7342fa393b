"""Residual connections with post- or pre-normalisation, and learned factors of their sub-layers. E hidden size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from zoo.config import Norm
from zoo.nn.norms import build_norm

__all__ = ["LayerScale", "Residual"]


class LayerScale(nn.Module):
    """Multiplication of each channel by a learned factor (Touvron et al. 2021, Going Deeper, equation 3).

    Args:
        hidden_size: E.
        initial: the initial value of the factors.
    """

    def __init__(self, hidden_size: int, initial: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((hidden_size,), initial))

    def forward(self, x: Tensor) -> Tensor:
        """(..., E) -> (..., E)."""
        return x * self.weight


class Residual(nn.Module):
    """LN(x + f(x)) as in Vaswani et al. 2017, or x + f(LN(x)) with ``norm_first`` (Xiong et al. 2020).

    ``norm`` and ``norm_bias`` are the ``kind`` and ``bias`` of :func:`zoo.nn.build_norm`.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        eps: float,
        norm_first: bool,
        dropout: float = 0.0,
        norm: Norm = "layer",
        norm_bias: bool = True,
    ) -> None:
        super().__init__()
        self.norm = build_norm(hidden_size, eps=eps, kind=norm, bias=norm_bias)
        self.dropout = nn.Dropout(dropout)
        self.norm_first = norm_first

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        if self.norm_first:
            return x + self.dropout(sublayer(self.norm(x)))
        return self.norm(x + self.dropout(sublayer(x)))
