"""Settings of the built-in objectives, torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zoo.config import Settings

__all__ = [
    "ImageClassificationOptions",
    "MaskingOptions",
    "SentenceEmbeddingOptions",
    "SequenceToSequenceOptions",
    "TokenClassificationOptions",
]


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


@dataclass(frozen=True, kw_only=True)
class MaskingOptions(Settings):
    """Settings of the objectives ``masked-lm``, ``pretraining`` and ``replaced-token-detection``."""

    rate: float = 0.15
    """Share of the tokens that are masked or replaced; at least one per example."""
    whole_word: bool = False
    """Whether all tokens of a word are chosen together. Words are the tokenizer's, so the data must be texts."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a rate out of its range."""
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate must be more than 0 and at most 1, got {self.rate}")


@dataclass(frozen=True, kw_only=True)
class TokenClassificationOptions(Settings):
    """Settings of the objective ``token-classification``."""

    all_tokens: bool = False
    """Whether every token of a word has the word's label, rather than the first one only."""


@dataclass(frozen=True, kw_only=True)
class SentenceEmbeddingOptions(Settings):
    """Settings of the objective ``sentence-embedding``."""

    loss: Literal["in-batch-negatives", "cosine-similarity", "triplet"] = "in-batch-negatives"
    """The loss. The data needs the column ``label`` for cosine similarity and ``negative`` for triplets."""
    scale: float = 20.0
    """Factor of the cosine similarities in ``in-batch-negatives``: the inverse of the temperature."""
    margin: float = 0.2
    """Least difference between the squared distances to the negative and to the positive in ``triplet``."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a number out of its range."""
        self.require_positive("scale", "margin")


@dataclass(frozen=True, kw_only=True)
class ImageClassificationOptions(Settings):
    """Settings of the objective ``image-classification``. Evaluations read images as they are."""

    random_flip: bool = False
    """Whether each image is mirrored horizontally with probability 1/2."""
    min_crop: float = 1.0
    """Smallest area of a random crop, as a fraction of the image's; 1 for no crops."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a fraction out of its range."""
        if not 0 < self.min_crop <= 1:
            raise ValueError(f"min_crop must be more than 0 and at most 1, got {self.min_crop}")
