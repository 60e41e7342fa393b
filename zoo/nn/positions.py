"""Positions without weights: sinusoids that are added, rotations.

Learned positions are an ``nn.Embedding``; what becomes of them in a model of another size is here too.

B batch, T tokens, E hidden size, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.errors import UsageError

__all__ = [
    "RotaryPositions",
    "Rotation",
    "SinusoidalPositions",
    "interpolate_frequencies",
    "interpolate_low_frequencies",
    "resize_grid",
    "rotate",
    "shorten",
    "sinusoids",
]

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of each position's angles, (B or 1, 1, T, D) each."""


def sinusoids(positions: Tensor, hidden_size: int, dtype: torch.dtype, *, interleaved: bool = True) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i/E)), PE(pos, 2i+1) = cos(...): (..., T) -> (..., T, E).

    Computed in float64 and rounded once, whatever the model's dtype: in float32 the angle alone is off by 3e-5 at
    position 500. Not ``interleaved``, all sines come before all cosines, as in Marian, and are rounded to float32 in
    any dtype, because published checkpoints of this order were made with tables of float32.
    """
    exponents = torch.arange(0, hidden_size, 2, dtype=torch.float64, device=positions.device)
    frequencies = torch.exp(exponents * (-math.log(10000.0) / hidden_size))  # (E / 2,)
    angles = positions.double().unsqueeze(-1) * frequencies  # (..., T, E / 2)
    if interleaved:
        return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2).to(dtype)
    return torch.cat((angles.sin(), angles.cos()), dim=-1).float().to(dtype)


class SinusoidalPositions(nn.Module):
    """:func:`sinusoids` in the place of a learned ``nn.Embedding``; it owns no weights."""

    def __init__(self, hidden_size: int, *, interleaved: bool = True) -> None:
        super().__init__()
        if hidden_size % 2:
            raise ValueError(f"sinusoidal positions need an even hidden_size, got {hidden_size}")
        self.hidden_size = hidden_size
        self.interleaved = interleaved

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """(B, T) -> (B, T, E) in ``dtype``."""
        return sinusoids(positions, self.hidden_size, dtype, interleaved=self.interleaved)


class RotaryPositions(nn.Module):
    """Rotary position embedding (Su et al. 2021, equation 15): pair i of a head turns by position x theta^(-2i/D).

    A pair is made of the elements i and i + D/2, as in Llama. Angles, cosines and sines are computed in float32 and
    rounded to the model's dtype, because that is what published weights were trained with.

    Args:
        head_dim: D, even.
        theta: base of the frequencies.
        scale: changes the frequencies, (D / 2,), for texts longer than those of the training: one of
            :func:`interpolate_frequencies` and :func:`interpolate_low_frequencies`.

    Raises:
        ValueError: when D is odd.

    >>> rotation = RotaryPositions(16)(torch.tensor([[0, 1, 2]]), torch.float32)
    >>> query = torch.randn(2, 4, 3, 16)  # (B, H, T, D)
    >>> torch.equal(rotate(query, rotation)[:, :, 0], query[:, :, 0])  # position 0 turns nothing
    True
    """

    def __init__(
        self, head_dim: int, theta: float = 10000.0, *, scale: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, got {head_dim}")
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
        frequencies = 1.0 / theta**exponents
        if scale is not None:
            frequencies = scale(frequencies)
        # As numbers, since no two implementations of powers agree to the last bit, and a position multiplies the
        # difference: this way an exported graph has the very same ones.
        self.frequencies: tuple[float, ...] = tuple(frequencies.tolist())
        """Radians a position, float32, (D / 2)."""

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """(B or 1, T) -> cosines and sines in ``dtype``."""
        frequencies = torch.tensor(self.frequencies, dtype=torch.float32, device=positions.device)
        angles = positions.float().unsqueeze(-1) * frequencies  # (B, T, D / 2)
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)  # (B, 1, T, D)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def interpolate_frequencies(frequencies: Tensor, *, factor: float) -> Tensor:
    """Slow every pair down by ``factor``, as if positions were divided by it (Chen et al. 2023, equation 4)."""
    return frequencies / factor


def interpolate_low_frequencies(
    frequencies: Tensor, *, factor: float, low: float, high: float, original_length: float
) -> Tensor:
    """Slow pairs down by ``factor`` that turn seldom, as Llama 3.1 does (Grattafiori et al. 2024, section 3.4.1).

    Args:
        frequencies: radians a position, (D / 2,).
        factor: what low frequencies are divided by.
        low: turns within ``original_length`` below which a frequency is low.
        high: turns above which it stays as it is; in between, the two are mixed.
        original_length: the longest text of the training before.
    """
    turns = original_length / (2 * math.pi / frequencies)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / factor + kept * frequencies


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn queries or keys (B, H, T, D) by their positions."""
    cosine, sine = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


def resize_grid(grid: Tensor, side: int) -> Tensor:
    """The learned positions of a square of patches, for a square of other size (Dosovitskiy et al. 2021, section 3.2).

    They are interpolated as an image is: bicubic with a = -0.75, corners not aligned, the border repeated and nothing
    smoothed, as DeiT was fine-tuned with (Touvron et al. 2021) and transformers computes.

    Args:
        grid: (B, N, E), row by row; N is a square number.
        side: of the new square.

    Returns:
        (B, side^2, E), the same numbers where the size is the same.
    """
    before = math.isqrt(grid.shape[1])
    image = grid.unflatten(1, (before, before)).movedim(-1, 1)  # (B, N, E) -> (B, E, before, before)
    return F.interpolate(image, (side, side), mode="bicubic", align_corners=False).flatten(2).transpose(1, 2)


def shorten(table: Tensor, rows: int) -> Tensor:
    """The first ``rows`` of a table (N, E) of learned positions: a model of shorter texts computes the same with them.

    Raises :class:`zoo.UsageError` for more rows than there are: nothing was learned of those.
    """
    if rows > len(table):
        raise UsageError(f"of {rows} positions {rows - len(table)} were never learned")
    return table[:rows]
