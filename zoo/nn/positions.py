"""Sinusoidal and rotary positions, and resizing of learned ones.

Learned positions are an ``nn.Embedding``.

B batch, T tokens, E hidden size, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.errors import UsageError

__all__ = [
    "RotaryPositions",
    "Rotation",
    "SinusoidalPositions",
    "TensorToTensorPositions",
    "apply_rotary",
    "interpolate_frequencies",
    "llama3_rope_scaling",
    "resize_grid",
    "sinusoids",
    "stretched_frequencies",
    "truncate_positions",
    "yarn_frequencies",
]

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of each position's angles, (B or 1, 1, T, D) each; fewer than D turn only a part of a head."""


def sinusoids(positions: Tensor, hidden_size: int, dtype: torch.dtype, *, interleaved: bool = True) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i/E)), PE(pos, 2i+1) = cos(...): (..., T) -> (..., T, E).

    Computed in float64 and rounded once, whatever the model's dtype: in float32 the angle alone is off by 3e-5 at
    position 500. If not ``interleaved``, all sines come before all cosines, as in Marian, and are first rounded to
    float32, because published checkpoints with this layout used float32 tables.
    """
    exponents = torch.arange(0, hidden_size, 2, dtype=torch.float64, device=positions.device)
    frequencies = torch.exp(exponents * (-math.log(10000.0) / hidden_size))  # (E / 2,)
    angles = positions.double().unsqueeze(-1) * frequencies  # (..., T, E / 2)
    if interleaved:
        return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2).to(dtype)
    return torch.cat((angles.sin(), angles.cos()), dim=-1).float().to(dtype)


class SinusoidalPositions(nn.Module):
    """:func:`sinusoids` as a module without weights, in place of a learned ``nn.Embedding``."""

    def __init__(self, hidden_size: int, *, interleaved: bool = True) -> None:
        super().__init__()
        if hidden_size % 2:
            raise ValueError(f"sinusoidal positions need an even hidden_size, got {hidden_size}")
        self.hidden_size = hidden_size
        self.interleaved = interleaved

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """(B, T) -> (B, T, E) in ``dtype``."""
        return sinusoids(positions, self.hidden_size, dtype, interleaved=self.interleaved)


class TensorToTensorPositions(nn.Module):
    """The sinusoids of tensor2tensor and fairseq, as in M2M100 (Fan et al. 2021): all sin(pos w_i), then all
    cos(pos w_i), where w_i = 10000^(-i / (E/2 - 1)).

    Angles, sines and cosines are computed in float32, as in the tables of published models.

    Args:
        hidden_size: E, even and at least 4.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        if hidden_size % 2 or hidden_size < 4:
            raise ValueError(f"these positions need an even hidden_size of at least 4, got {hidden_size}")
        exponents = torch.arange(hidden_size // 2, dtype=torch.float32, device="cpu")
        frequencies = torch.exp(exponents * (-math.log(10000.0) / (hidden_size // 2 - 1)))
        self.frequencies: tuple[float, ...] = tuple(frequencies.tolist())  # constants, as in RotaryPositions
        """Radians per position, float32, (E / 2)."""

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """(B, T) -> (B, T, E) in ``dtype``."""
        frequencies = torch.tensor(self.frequencies, dtype=torch.float32, device=positions.device)
        angles = positions.float().unsqueeze(-1) * frequencies  # (B, T, E / 2)
        return torch.cat((angles.sin(), angles.cos()), dim=-1).to(dtype)


class RotaryPositions(nn.Module):
    """Rotary position embedding (Su et al. 2021, equation 15): pair i of a head rotates by position x theta^(-2i/D).

    Pair i consists of the elements i and i + D/2, as in Llama. Angles, cosines and sines are computed in float32 and
    rounded to the model's dtype, as in the training of published weights.

    Args:
        head_dim: D, even.
        theta: base of the frequencies.
        scale: maps the frequencies, (D / 2,), to those for texts longer than in training:
            :func:`interpolate_frequencies` or :func:`llama3_rope_scaling`.
        from_periods: computes the frequencies from their inverses theta^(2i/D), (D / 2,), before ``scale``:
            :func:`yarn_frequencies` or :func:`stretched_frequencies`.
        magnitude: factor of cosines and sines, and thereby of rotated queries and keys.

    Raises:
        ValueError: when D is odd.

    >>> rotation = RotaryPositions(16)(torch.tensor([[0, 1, 2]]), torch.float32)
    >>> query = torch.randn(2, 4, 3, 16)  # (B, H, T, D)
    >>> torch.equal(apply_rotary(query, rotation)[:, :, 0], query[:, :, 0])  # position 0: no rotation
    True
    """

    def __init__(
        self,
        head_dim: int,
        theta: float = 10000.0,
        *,
        scale: Callable[[Tensor], Tensor] | None = None,
        from_periods: Callable[[Tensor], Tensor] = torch.reciprocal,
        magnitude: float = 1.0,
    ) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, got {head_dim}")
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
        frequencies = from_periods(theta**exponents)
        if scale is not None:
            frequencies = scale(frequencies)
        # Stored as constants, so that an exported graph has exactly these: implementations of powers differ in the
        # last bit, and positions multiply the difference.
        self.frequencies: tuple[float, ...] = tuple(frequencies.tolist())
        """Radians per position, float32, (D / 2)."""
        self.magnitude = magnitude

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """(B or 1, T) -> cosines and sines in ``dtype``."""
        frequencies = torch.tensor(self.frequencies, dtype=torch.float32, device=positions.device)
        angles = positions.float().unsqueeze(-1) * frequencies  # (B, T, D / 2)
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)  # (B, 1, T, D)
        cosine, sine = angles.cos(), angles.sin()
        if self.magnitude != 1:
            cosine, sine = cosine * self.magnitude, sine * self.magnitude
        return cosine.to(dtype), sine.to(dtype)


def interpolate_frequencies(frequencies: Tensor, *, factor: float) -> Tensor:
    """Divide every frequency by ``factor``, as if positions were divided by it (Chen et al. 2023, equation 4)."""
    return frequencies / factor


def llama3_rope_scaling(
    frequencies: Tensor, *, factor: float, low: float, high: float, original_length: float
) -> Tensor:
    """Divide the low frequencies by ``factor``, as Llama 3.1 does (Grattafiori et al. 2024, section 3.4.1).

    Args:
        frequencies: radians per position, (D / 2,).
        factor: divisor of the low frequencies.
        low: a frequency is low if it makes fewer than this many turns within ``original_length``.
        high: a frequency with more turns than this is unchanged; between the two it is interpolated.
        original_length: maximum text length in the original training.
    """
    turns = original_length / (2 * math.pi / frequencies)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - share) * frequencies / factor + share * frequencies


def yarn_frequencies(
    periods: Tensor,
    *,
    theta: float,
    factor: float,
    original_length: float,
    fast: float = 32.0,
    slow: float = 1.0,
    truncate: bool = True,
) -> Tensor:
    """Divide the low frequencies by ``factor`` as YaRN does (Peng et al. 2023, section 3.2, "NTK-by-parts").

    The share of the division rises linearly with the number of the frequency, from that with ``fast`` turns within
    ``original_length`` to that with ``slow`` turns.

    Args:
        periods: positions per radian of each frequency, theta^(2i/D), (D / 2,).
        theta: base of the frequencies.
        factor: divisor of the low frequencies.
        original_length: maximum text length in the original training.
        fast: frequencies with more turns than this are unchanged.
        slow: frequencies with fewer turns than this are divided.
        truncate: round the two ends of the ramp to whole numbers of frequencies, outwards.

    Returns:
        Radians per position, (D / 2,).
    """
    size = 2 * len(periods)
    first, last = (
        size * math.log(original_length / (2 * math.pi * turns)) / (2 * math.log(theta)) for turns in (fast, slow)
    )
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    numbers = torch.arange(size // 2, dtype=torch.float32, device=periods.device)
    share = 1 - ((numbers - first) / (last - first or 0.001)).clamp(0, 1)
    return 1.0 / (factor * periods) * (1 - share) + 1.0 / periods * share


def stretched_frequencies(periods: Tensor, *, factors: Sequence[float]) -> Tensor:
    """Divide each frequency by a factor of its own, as LongRoPE does (Ding et al. 2024, equation 2).

    ``periods`` are as for :func:`yarn_frequencies`.
    """
    return 1.0 / (torch.tensor(factors, dtype=torch.float32, device=periods.device) * periods)


def apply_rotary(x: Tensor, rotation: Rotation, *, interleaved: bool = False) -> Tensor:
    """Rotate queries or keys (B, H, T, D) by their positions.

    A rotation of R < D elements turns the first R of each head, as in GPT-NeoX (Black et al. 2022, section 2.1.1).
    If ``interleaved``, the pairs of ``x`` are the elements 2i and 2i + 1, as in the paper; the result has them at i and
    i + R / 2, since the product of a query and a key does not depend on the order.
    """
    cosine, sine = rotation
    size = cosine.shape[-1]
    turned, rest = (x, None) if size == x.shape[-1] else (x[..., :size], x[..., size:])
    if interleaved:
        turned = torch.cat((turned[..., ::2], turned[..., 1::2]), dim=-1)
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cosine + torch.cat((-second, first), dim=-1) * sine
    return turned if rest is None else torch.cat((turned, rest), dim=-1)


def resize_grid(grid: Tensor, side: int) -> Tensor:
    """Resize the learned positions of a square grid of patches (Dosovitskiy et al. 2021, section 3.2).

    Bicubic interpolation with a = -0.75, corners not aligned, borders replicated and no antialiasing, as in the
    fine-tuning of DeiT (Touvron et al. 2021) and in transformers.

    Args:
        grid: (B, N, E), row by row; N is a square number.
        side: side of the new grid, in patches.

    Returns:
        (B, side^2, E); unchanged if the size is.
    """
    before = math.isqrt(grid.shape[1])
    image = grid.unflatten(1, (before, before)).movedim(-1, 1)  # (B, N, E) -> (B, E, before, before)
    return F.interpolate(image, (side, side), mode="bicubic", align_corners=False).flatten(2).transpose(1, 2)


def truncate_positions(table: Tensor, rows: int) -> Tensor:
    """Return the first ``rows`` of a table (N, E) of learned positions; outputs for shorter texts do not change.

    Raises :class:`zoo.UsageError` for more rows than the table has.
    """
    if rows > len(table):
        raise UsageError(f"cannot extend {len(table)} learned positions to {rows}")
    return table[:rows]
