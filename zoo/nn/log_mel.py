"""Log-mel spectrograms of sound, computed by a convolution and a matrix product, so that graphs can contain them.

B batch, S samples, F frames, N window, K frequencies, M mel bins.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.audio import DECADES, FLOOR, HOP, SAMPLING_RATE, WINDOW, mel_corners

__all__ = ["LogMel"]


class LogMel(nn.Module):
    """The features of Whisper (Radford et al. 2022, section 2.2), as its feature extractor computes them.

    Each frame is the power spectrum of a Hann window of 25 ms, one every 10 ms; the ends of the sound are reflected.
    Triangular filters, equally spaced and of equal area on Slaney's mel scale, add up the powers. Their logarithms to
    base 10 are limited to 8 below the largest one of the sound, and scaled: (x + 4) / 4.

    The window, the Fourier basis and the filters are computed in float64 and rounded once, so they need no storage and
    are as precise in a model of half precision, which computes the features in float32.

    Args:
        num_mel_bins: M.
    """

    def __init__(self, num_mel_bins: int) -> None:
        super().__init__()
        self.corners = mel_corners(num_mel_bins)  # constants, as in RotaryPositions

    def forward(self, waveform: Tensor) -> Tensor:
        """(B, S) -> (B, M, F) with F = S / 160, rounded down. S is at least 201."""
        real, device = torch.promote_types(waveform.dtype, torch.float32), waveform.device
        x = waveform.to(real)
        # A window at each end of the sound, without the last one, which is centred at its end.
        before, after = WINDOW // 2, WINDOW // 2 - HOP
        x = F.pad(x.unsqueeze(1), (before, after), mode="reflect")
        spectrum = F.conv1d(x, self.basis(device).to(real), stride=HOP)  # (B, 2 K, F)
        cosine, sine = spectrum.chunk(2, dim=1)
        powers = self.filters(device).to(real) @ (cosine.square() + sine.square())  # (B, M, F)
        log = powers.clamp(min=FLOOR).log10()
        log = torch.maximum(log, log.amax(dim=(1, 2), keepdim=True) - DECADES)
        return ((log + 4) / 4).to(waveform.dtype)

    def basis(self, device: torch.device) -> Tensor:
        """Return the cosines, then the sines, of all frequencies times the periodic Hann window: (2 K, 1, N)."""
        times = torch.arange(WINDOW, dtype=torch.float64, device=device)
        frequencies = torch.arange(WINDOW // 2 + 1, dtype=torch.float64, device=device)
        angles = times * (2 * math.pi / WINDOW)
        window = 0.5 - 0.5 * angles.cos()
        angles = frequencies.unsqueeze(1) * angles  # (K, N)
        return (torch.cat((angles.cos(), angles.sin())) * window).unsqueeze(1)

    def filters(self, device: torch.device) -> Tensor:
        """Return the filters, (M, K), of area 1 over the frequencies in Hz."""
        start, peak, end = (
            torch.tensor(corners, dtype=torch.float64, device=device).unsqueeze(1)  # (M, 1)
            for corners in (self.corners[:-2], self.corners[1:-1], self.corners[2:])
        )
        bins = torch.arange(WINDOW // 2 + 1, dtype=torch.float64, device=device)
        frequencies = bins * (SAMPLING_RATE / WINDOW)  # (K,)
        rise, fall = (frequencies - start) / (peak - start), (end - frequencies) / (end - peak)
        return torch.minimum(rise, fall).relu() * (2 / (end - start))
