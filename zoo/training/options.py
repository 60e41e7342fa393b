"""Settings of the built-in objectives, torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zoo.config import Settings

__all__ = ["SequenceToSequenceOptions"]


@dataclass(frozen=True, kw_only=True)
class SequenceToSequenceOptions(Settings):
    """Settings of the objective ``sequence-to-sequence``."""

    label_smoothing: float = 0.0
    """The probability that is removed from each target token (Szegedy et al. 2016, section 7)."""
    smoothing_convention: Literal["uniform", "excluding"] = "uniform"
    """How it is distributed: over the whole vocabulary, or over all tokens but the target and padding."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a probability out of its range."""
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be from 0 to less than 1, got {self.label_smoothing}")
