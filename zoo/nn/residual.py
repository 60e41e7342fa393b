"""Residual connections with post- or pre-normalisation."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

__all__ = ["Residual"]


class Residual(nn.Module):
    """LN(x + f(x)) as in Vaswani et al. 2017, or x + f(LN(x)) with ``norm_first`` (Xiong et al. 2020)."""

    def __init__(self, hidden_size: int, *, eps: float, norm_first: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size, eps=eps)
        self.dropout = nn.Dropout(dropout)
        self.norm_first = norm_first

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        if self.norm_first:
            return x + self.dropout(sublayer(self.norm(x)))
        return self.norm(x + self.dropout(sublayer(x)))
