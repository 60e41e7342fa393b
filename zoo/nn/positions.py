"""Positions without weights: sinusoids that are added, rotations. Learned positions are an ``nn.Embedding``.

B batch, T tokens, E hidden size, D head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

__all__ = ["RotaryPositions", "Rotation", "SinusoidalPositions", "rotate", "sinusoids"]

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of each position's angles, (B or 1, 1, T, D) each."""


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


class RotaryPositions(nn.Module):
    """Rotary position embedding (Su et al. 2021, equation 15): pair i of a head turns by position x theta^(-2i/D).

    A pair is made of the elements i and i + D/2, as in Llama. Angles, cosines and sines are computed in float32 and
    rounded to the model's dtype, because that is what published weights were trained with.

    Args:
        head_dim: D, even.
        theta: base of the frequencies.

    Raises:
        ValueError: when D is odd.
    """

    def __init__(self, head_dim: int, theta: float = 10000.0) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, got {head_dim}")
        self.head_dim = head_dim
        self.theta = theta

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        """Radians a position, float32, (D / 2,)."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device) / self.head_dim
        return 1.0 / self.theta**exponents

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """(B or 1, T) -> cosines and sines in ``dtype``."""
        angles = positions.float().unsqueeze(-1) * self.frequencies(positions.device)  # (B, T, D / 2)
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)  # (B, 1, T, D)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn queries or keys (B, H, T, D) by their positions."""
    cosine, sine = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine
