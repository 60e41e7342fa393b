"""Options of speech recognition."""

from __future__ import annotations

from dataclasses import dataclass

from zoo_runtime.generation.options import Generation

__all__ = ["STORED", "SpeechOptions"]

_THRESHOLDS = ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold")
STORED = (*_THRESHOLDS, "condition_on_prev_tokens")
"""Options that generation_config.json may state under the same name."""


@dataclass(frozen=True, kw_only=True)
class SpeechOptions(Generation):
    """Options of speech recognition. By default, a text may fill the model's positions.

    The thresholds are those of transformers, and off by default as there. They apply to the text of each window.
    """

    language: str | None = None
    """Code of the language that is spoken, such as ``en``; by default it is detected, if the model knows several."""
    translate: bool = False
    """Whether to translate to English instead of transcribing."""
    windows: bool = False
    """Whether to read a longer sound in windows of the model's length that are cut anywhere, one after another, so that
    a word at a border may be lost. For models without timestamps."""
    timestamps: bool | None = None
    """Whether to divide the text into segments with times. A longer sound is read in windows of which each begins where
    the last complete segment ends (Radford et al. 2022, section 3.8), so by default its text is divided."""
    condition_on_prev_tokens: bool = False
    """Whether the prompt of a window contains the text before it, if that was decoded at a temperature below 0.5."""
    fallback_temperatures: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 1.0)
    """Temperatures at which a text beyond a threshold is sampled again: those above ``temperature``, in this order. The
    text of the last one is kept."""
    compression_ratio_threshold: float | None = None
    """Sample again if zlib compresses the tokens of a text by a larger factor, because it repeats itself. 1.35 is usual
    for tokens, 2.4 for characters."""
    logprob_threshold: float | None = None
    """Sample again if the average log-probability of the tokens of a text is lower. -1 is usual."""
    no_speech_threshold: float | None = None
    """Leave out the text of a window if silence is more probable than this, and the average log-probability is below
    ``logprob_threshold``. 0.6 is usual."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("compression_ratio_threshold")
        if self.no_speech_threshold is not None:
            if not 0 <= self.no_speech_threshold <= 1:
                raise ValueError(f"no_speech_threshold must lie in [0, 1], got {self.no_speech_threshold}")
            if self.logprob_threshold is None:
                raise ValueError("no_speech_threshold requires logprob_threshold: set it, -1 is usual")
        if not all(value > 0 for value in self.fallback_temperatures):
            raise ValueError(f"fallback_temperatures must be positive, got {self.fallback_temperatures}")
        if self.is_judged and self.num_beams > 1:
            names = ", ".join(name for name in _THRESHOLDS if getattr(self, name) is not None)
            raise ValueError(f"beam search does not support {names}: num_beams is {self.num_beams}")
        if self.condition_on_prev_tokens and (self.timestamps is False or (self.windows and not self.timestamps)):
            raise ValueError("condition_on_prev_tokens is true, so timestamps must not be false, nor windows true")

    @property
    def is_judged(self) -> bool:
        """Whether there is a threshold."""
        return any(getattr(self, name) is not None for name in _THRESHOLDS)
