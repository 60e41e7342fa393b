"""Constants and kinds of spectrograms, without numpy, so that a configuration can import them."""

from __future__ import annotations

from typing import Literal

__all__ = ["DECADES", "FLOOR", "HOP", "SAMPLING_RATE", "WINDOW", "SpectrogramKind"]

SpectrogramKind = Literal["whisper", "kaldi"]
"""Kinds of spectrograms: see ``zoo.audio.Spectrogram``."""

SAMPLING_RATE = 16_000
"""Samples per second of Whisper (Radford et al. 2022, section 2.2) and Kaldi."""
WINDOW = 400
"""Samples per window of both."""
HOP = 160
"""Samples between the starts of windows of both."""
FLOOR = 1e-10
"""Smallest power of Whisper's spectrogram."""
DECADES = 8.0
"""Range of Whisper's spectrogram below its largest value, in decades."""
