"""Norms that torch lacks. E hidden size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["OffsetRMSNorm"]


class OffsetRMSNorm(nn.Module):
    """x / RMS(x) * (1 + w), the norm of Gemma, whose weights start at 0 (Gemma Team 2024, Gemma 2, section 2).

    Computed in float32 for narrower dtypes, in which 1 + w would lose most bits of a small w.

    Args:
        hidden_size: E.
        eps: added to the mean square.
    """

    def __init__(self, hidden_size: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """(..., E) -> (..., E)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = 1.0 + self.weight.to(wide)
        return F.rms_norm(x.to(wide), weight.shape, weight, self.eps).to(x.dtype)
