"""Attention weights of one input, with the names of their positions: the contents of an attention page.

H heads, K key-value heads, T queries, S keys, D head size.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zoo.arrays import Array
from zoo.errors import ArtifactError

__all__ = ["AttentionAxis", "AttentionMap", "AttentionRecord", "AttentionStep", "AttentionVectors"]


_NEGATIVE = -1e-3
"""Least weight that counts as rounding."""
_OFF = 0.1
"""Largest difference of weights from those that their vectors give which counts as rounding, in half precision too."""


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
    seconds: float | None = None
    """The duration of each position of a sound."""
    peaks: Array | None = None
    """The largest amplitude at each position of a sound, from 0 to 1."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionVectors:
    """What the weights of one layer are computed from.

    They are softmax(scores) over the keys that a query sees, with scores = cap(scale query key^T) + bias.
    """

    queries: Array
    """(H, T, D), after norms and rotation."""
    keys: Array
    """(K, S, D), after norms and rotation."""
    key_heads: Sequence[int]
    """For each of the H heads, the place of its keys."""
    scale: float
    softcap: float | None = None
    """Limit c of the scaled products x, which become c tanh(x / c); None for none."""
    bias: Array | None = None
    """(1 or H, T, S); None if nothing is added."""
    seen: Array | None = None
    """Boolean, (1 or H, T, S), False for a hidden key; None if every query sees all keys."""

    def weights(self) -> Array:
        """Return the weights in float64, (H, T, S). A query that sees no key has weights 0."""
        keys = self.keys[list(self.key_heads)].astype(np.float64)
        scores = self.queries.astype(np.float64) @ keys.swapaxes(-1, -2) * self.scale
        if self.softcap is not None:
            scores = np.tanh(scores / self.softcap) * self.softcap
        if self.bias is not None:
            scores = scores + self.bias
        seen = np.broadcast_to(True if self.seen is None else self.seen, scores.shape)
        highest = np.max(scores, axis=-1, keepdims=True, initial=-np.inf, where=seen)
        exponents = np.subtract(scores, highest, out=np.full(scores.shape, -np.inf), where=seen)
        shares = np.exp(exponents)
        sums = shares.sum(-1, keepdims=True)
        return shares / np.where(sums > 0, sums, 1)

    def fault(self, weights: Array) -> str | None:
        """Return why these are not what ``weights``, (H, T, S), are computed from, or None."""
        heads, queries, keys = weights.shape
        size = self.queries.shape[-1]
        if self.queries.shape != (heads, queries, size):
            return f"queries have shape {self.queries.shape}, not {(heads, queries, size)}"
        if len(self.key_heads) != heads or not set(self.key_heads) <= set(range(len(self.keys))):
            return f"key_heads are {list(self.key_heads)}, for {heads} heads and keys of {len(self.keys)}"
        if self.keys.shape[1:] != (keys, size):
            return f"keys have shape {self.keys.shape}, not {(len(self.keys), keys, size)}"
        for name, array in (("bias", self.bias), ("seen", self.seen)):
            if array is not None and array.shape not in ((1, queries, keys), weights.shape):
                return f"{name} has shape {array.shape}, not {weights.shape}"
        if not all(np.isfinite(array).all() for array in (self.queries, self.keys, self.bias) if array is not None):
            return "queries, keys or biases are not finite"
        off = float(np.abs(self.weights() - weights).max(initial=0))
        return None if off <= _OFF else f"weights differ by {off:.2g} from those of the queries and keys"


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
    vectors: AttentionVectors | None = None
    """What the weights are computed from, if it was recorded and they are those of dot products."""

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
        """Raise :class:`ArtifactError` for maps without weights, with weights that are not finite or negative, or that
        their vectors do not give; for names that do not end in a layer, and for names or heads that are not unique.
        """
        if not self.maps:
            raise ArtifactError("no attention weights were recorded")
        names = [item.name for item in self.maps]
        for item in self.maps:
            if not re.fullmatch(r".*\.[0-9]{1,9}", item.name, re.DOTALL):
                raise ArtifactError("the name of an attention map must end in its layer", repr(item.name), "NAME.0")
            if names.count(item.name) > 1:
                raise ArtifactError("two attention maps have the same name", repr(item.name))
            if len(set(item.heads)) < len(item.heads) or min(item.heads, default=0) < 0:
                raise ArtifactError(f"heads must be different numbers from 0, got {list(item.heads)}", repr(item.name))
            expected = (len(item.heads), len(item.queries.labels), len(item.keys.labels))
            if item.weights.shape != expected:
                raise ArtifactError(f"weights have shape {item.weights.shape}, not {expected}", item.name)
            if not (np.isfinite(item.weights).all() and item.weights.min(initial=0) > _NEGATIVE):
                raise ArtifactError("weights are negative or not finite", item.name, "the page shows weights from 0")
            if item.vectors is not None and (fault := item.vectors.fault(item.weights)):
                raise ArtifactError(fault, item.name)
