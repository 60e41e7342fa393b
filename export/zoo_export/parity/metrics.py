"""Metrics of next-token distributions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo_runtime.generation.choices import log_softmax

__all__ = ["TokenDivergence", "divergences", "sampled", "sampled_rows"]

TOP = 10
_MAX_ROWS = 128
"""Largest number of rows of one point for which the metrics are computed, evenly spaced."""
_CHUNK = 2**17
"""Number of logits compared at a time."""
_FACTOR = 8.0
"""The divergence is quadratic in the errors, which may be twice those of PyTorch."""
_FLOOR_ULPS = 16.0


@dataclass
class TokenDivergence:
    """Distance of the next-token distributions of a graph from those of the model.

    Args:
        epsilon: the rounding unit of the graph's dtype.
        judged: whether the KL divergence is judged; the graph and PyTorch must then differ by rounding alone.
    """

    epsilon: float
    judged: bool = True
    rows: int = 0
    kl: float = 0.0
    torch_kl: float = 0.0
    """Divergence of PyTorch in the model's own dtype."""
    scale: float = 0.0
    overlap: float = 1.0
    missing: int = 0
    """Tokens among the ten best that the graph ranks lower, near-ties excepted."""
    disagreements: int = 0
    near_ties: int = 0

    def add(self, reference: Array, yardstick: Array, graph: Array, margin: float, rows: Array | None = None) -> None:
        """Add logits of shape (rows, vocabulary), by the reference, PyTorch and the graph, a few rows at a time.

        Logits that differ by ``margin`` or less are a near-tie. ``rows`` are the numbers of the rows to add, by default
        all.
        """
        rows = np.arange(len(reference)) if rows is None else rows
        for some in np.array_split(rows, -(-rows.size * reference.shape[-1] // _CHUNK) or 1):
            if len(some):
                exact, torch, result = (values[some].astype(np.float64) for values in (reference, yardstick, graph))
                self._add(exact, torch, result, margin)

    def _add(self, reference: Array, yardstick: Array, graph: Array, margin: float) -> None:
        exact = log_softmax(reference)
        if not (highest := _largest(exact, graph)) <= self.kl:  # true for NaN, too
            self.kl = highest
        self.torch_kl = max(self.torch_kl, _largest(exact, yardstick))
        self.scale = max(self.scale, float(np.max(np.abs(reference))))
        top = min(TOP, reference.shape[-1])
        best, theirs = (np.argpartition(values, -top, axis=-1)[:, -top:] for values in (reference, graph))
        shared = [len(set(one) & set(other)) / top for one, other in zip(best.tolist(), theirs.tolist(), strict=True)]
        self.overlap = min(self.overlap, *shared)
        highest_ones = np.sort(np.take_along_axis(reference, best, -1), axis=-1)
        if top < reference.shape[-1]:
            last = highest_ones[:, :1]
            theirs_last = np.min(np.take_along_axis(graph, theirs, -1), axis=-1, keepdims=True)
            self.missing += int(np.sum((reference > last + margin) & (graph < theirs_last)))
        gaps = np.diff(highest_ones[:, -2:], axis=-1)[:, 0] if top > 1 else 1.0
        differs, ties = np.argmax(reference, -1) != np.argmax(graph, -1), gaps <= margin
        self.rows += len(reference)
        self.near_ties += int(np.sum(differs & ties))
        self.disagreements += int(np.sum(differs & ~ties))

    def allow(self, reference: Array, yardstick: Array, valid: Array) -> None:
        """Raise the limit by a result of PyTorch with these valid rows."""
        if valid.any():
            exact, own = (sampled(logits, valid) for logits in (reference, yardstick))
            self.torch_kl = max(self.torch_kl, _largest(log_softmax(exact), own))

    @property
    def close(self) -> bool:
        """Whether the divergence is within its limit, if it is judged."""
        return not self.judged or self.kl <= self.limit

    @property
    def doubtful(self) -> bool:
        """Whether the divergence is beyond a limit that another result of PyTorch may raise."""
        return bool(np.isfinite(self.kl)) and not self.close

    @property
    def limit(self) -> float:
        """The largest allowed divergence."""
        return _FACTOR * self.torch_kl + (_FLOOR_ULPS * self.epsilon * self.scale) ** 2 + 2.0**-48

    def failure(self) -> str | None:
        """Describe the first violated rule, or return None."""
        if self.disagreements:
            return f"chooses another token in {self.disagreements} of {self.rows} rows"
        if self.missing:
            return f"ranks {self.missing} of the ten best tokens of a row lower"
        if not self.close:
            return f"has a KL divergence of {self.kl:.3g}, allowed {self.limit:.3g}"
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the entry for parity.json."""
        return {
            "rows": self.rows,
            "max_kl_divergence": self.kl,
            "torch_max_kl_divergence": self.torch_kl,
            "min_top_10_overlap": self.overlap,
            "top_10_disagreements": self.missing,
            "argmax_disagreements": self.disagreements,
            "argmax_near_ties": self.near_ties,
        }


def divergences(log_p: Array, log_q: Array) -> Array:
    """Return the KL divergence of each row of log-probabilities ``log_q`` from ``log_p``, in nats."""
    result: Array = np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)
    return result


def sampled_rows(valid: Array) -> Array:
    """Return the numbers of evenly spaced valid rows, at most ``_MAX_ROWS``."""
    rows = np.flatnonzero(valid)
    return rows[:: -(-len(rows) // _MAX_ROWS) or 1]


def sampled(logits: Array, valid: Array) -> Array:
    """Return evenly spaced valid rows in float64."""
    return logits[sampled_rows(valid)].astype(np.float64)


def _largest(log_p: Array, logits: Array) -> float:
    """Return the largest divergence of rows of logits from log-probabilities."""
    return float(np.max(divergences(log_p, log_softmax(logits))))
