"""Metrics of next-token distributions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from zoo_runtime.generation.search import log_softmax

__all__ = ["Distribution"]

TOP = 10
_MAX_ROWS = 128
"""Largest number of rows of one point for which the metrics are computed, evenly spaced."""


@dataclass
class Distribution:
    """Distance of the next-token distributions of a graph from those of the model."""

    rows: int = 0
    kl: float = 0.0
    overlap: float = 1.0
    disagreements: int = 0
    near_ties: int = 0

    def add(self, reference: np.ndarray[Any, Any], result: np.ndarray[Any, Any], margin: float) -> None:
        """Add logits of shape (rows, vocabulary). Two best logits that differ by ``margin`` or less are a near-tie."""
        keep = slice(None, None, -(-len(reference) // _MAX_ROWS) or 1)
        wanted, found = reference[keep].astype(np.float64), result[keep].astype(np.float64)
        if not len(wanted):
            return
        log_p, log_q = log_softmax(wanted), log_softmax(found)
        self.kl = max(self.kl, float(np.max(np.sum(np.exp(log_p) * (log_p - log_q), axis=-1))))
        top = min(TOP, wanted.shape[-1])
        best, theirs = (np.argpartition(-values, top - 1, axis=-1)[:, :top] for values in (wanted, found))
        shared = [len(set(one) & set(other)) / top for one, other in zip(best.tolist(), theirs.tolist(), strict=True)]
        self.overlap = min(self.overlap, *shared)
        gaps = np.diff(np.partition(wanted, -2, axis=-1)[:, -2:], axis=-1)[:, 0] if wanted.shape[-1] > 1 else 1.0
        differs, ties = np.argmax(wanted, -1) != np.argmax(found, -1), gaps <= margin
        self.rows += len(wanted)
        self.near_ties += int(np.sum(differs & ties))
        self.disagreements += int(np.sum(differs & ~ties))

    def to_dict(self) -> dict[str, Any]:
        """Return the entry for parity.json."""
        return {
            "rows": self.rows,
            "max_kl_divergence": self.kl,
            "min_top_10_overlap": self.overlap,
            "argmax_disagreements": self.disagreements,
            "argmax_near_ties": self.near_ties,
        }
