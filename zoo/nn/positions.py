"""Sinusoidal positions (Vaswani et al. 2017, section 3.5). Learned positions are an ``nn.Embedding``."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

__all__ = ["SinusoidalPositions", "sinusoids"]


def sinusoids(positions: Tensor, hidden_size: int, dtype: torch.dtype) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i/E)), PE(pos, 2i+1) = cos(...): (..., T) -> (..., T, E).

    Computed in float64 and rounded once, whatever the model's dtype: in float32 the angle alone is off by 3e-5 at
    position 500.
    """
    exponents = torch.arange(0, hidden_size, 2, dtype=torch.float64, device=positions.device)
    frequencies = torch.exp(exponents * (-math.log(10000.0) / hidden_size))  # (E / 2,)
    angles = positions.double().unsqueeze(-1) * frequencies  # (..., T, E / 2)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2).to(dtype)


class SinusoidalPositions(nn.Module):
    """:func:`sinusoids` in the place of a learned ``nn.Embedding``; it owns no weights."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        if hidden_size % 2:
            raise ValueError(f"sinusoidal positions need an even hidden_size, got {hidden_size}")
        self.hidden_size = hidden_size

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """(B, T) -> (B, T, E) in ``dtype``."""
        return sinusoids(positions, self.hidden_size, dtype)
