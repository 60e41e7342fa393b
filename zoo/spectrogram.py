"""Constants and kinds of spectrograms, without numpy, so that a configuration can import them."""

from __future__ import annotations

from typing import Literal

__all__ = ["DECADES", "FLOOR", "HOP", "SAMPLING_RATE", "WINDOW", "SpectrogramKind"]

SpectrogramKind = Literal["whisper", "kaldi"]
"""Kinds of spectrograms: see ``zoo.audio.Spectrogram``."""

SAMPLING_RATE, WINDOW, HOP = 16_000, 400, 160
"""Samples per second, per window and between windows, of Whisper (Radford et al. 2022, section 2.2) and Kaldi."""
FLOOR, DECADES = 1e-10, 8.0
"""Smallest power, and the range of the spectrogram below its largest value, in decades."""
