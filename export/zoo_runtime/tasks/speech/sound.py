"""The inputs of speech recognition."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from zoo.arrays import Array
from zoo_runtime.running.text_runner import Tokens

__all__ = ["Sound"]


@dataclass(frozen=True)
class Sound(Tokens):
    """A sound and the prompt of its text, ``ids``; or a window of a sound."""

    samples: Array = field(default_factory=lambda: np.zeros(0, np.float32), kw_only=True, repr=False, compare=False)
    features: Array | None = field(default=None, kw_only=True, repr=False, compare=False)
    """The spectrogram of a window, (mel bins, frames), for a model that reads it; None for that of the samples."""
    has_language: bool = field(default=False, kw_only=True)
    """Whether the prompt contains the detected language."""
    context: int = field(default=0, kw_only=True)
    """Number of tokens of the prompt that are earlier text."""
    start: int = field(default=0, kw_only=True)
    """Frame of the whole sound at which a window begins."""
    attempt: int = field(default=0, kw_only=True)
    """How many times the text has been discarded."""
    no_speech: float | None = field(default=None, kw_only=True)
    """Probability of silence, once it is known."""
