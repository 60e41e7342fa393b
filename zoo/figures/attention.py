"""Attention weights of one input, with the names of their positions: the contents of an attention page.

H heads, T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zoo.errors import ArtifactError

__all__ = ["AttentionAxis", "AttentionMap", "AttentionRecord", "AttentionStep"]

Array = np.ndarray[Any, Any]

_NEGATIVE = -1e-3
"""Least weight that counts as rounding."""


@dataclass(frozen=True, kw_only=True)
class AttentionStep:
    """The choice of one generated token."""

    query: int
    """Position whose output chose the token."""
    token: str
    candidates: Sequence[tuple[str, float]]
    """The likeliest tokens and their probabilities."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionAxis:
    """The positions along the queries or the keys. Maps that share an axis have the same object."""

    labels: Sequence[str]
    """The text of each token, or another name of each position."""
    parts: Sequence[int | None] = ()
    """The part of the input to which each position belongs, None for special tokens; empty if there is one part."""
    part_names: Sequence[str] = ()
    grid: tuple[int, int, int] | None = None
    """The first patch of an image, and the rows and columns of patches from there on."""
    image: Array | None = None
    """The image as the model reads it, uint8, (height, width) or (height, width, 3)."""
    steps: Sequence[AttentionStep] = ()
    """The steps of a generated text."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionMap:
    """The weights of one layer."""

    name: str
    """The declared output, preceded by the graph's name if there are several graphs: ``decoder.attentions.0``."""
    weights: Array
    """(H, T, S)"""
    heads: Sequence[int]
    """The index of each head."""
    queries: AttentionAxis
    keys: AttentionAxis

    @property
    def group(self) -> str:
        """The name without the layer."""
        return self.name.rpartition(".")[0]

    @property
    def layer(self) -> int:
        """The index of the layer."""
        return int(self.name.rpartition(".")[2])


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionRecord:
    """The attention weights of one input, as ONNX Runtime computed them."""

    maps: Sequence[AttentionMap]
    rollout: bool = True
    """Whether the maps are all attentions of the model, so that attention rollout is defined."""

    def __post_init__(self) -> None:
        """Raise :class:`ArtifactError` for maps without weights, or with weights that are not finite or negative."""
        if not self.maps:
            raise ArtifactError("no attention weights were recorded")
        for item in self.maps:
            wanted = (len(item.heads), len(item.queries.labels), len(item.keys.labels))
            if item.weights.shape != wanted:
                raise ArtifactError(f"weights have shape {item.weights.shape}, not {wanted}", item.name)
            if not (np.isfinite(item.weights).all() and item.weights.min(initial=0) > _NEGATIVE):
                raise ArtifactError("weights are negative or not finite", item.name, "the page shows weights from 0")
