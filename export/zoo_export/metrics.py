"""How far a result is from its reference, and how far it may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from zoo_export.grid import Point

__all__ = ["FACTOR", "FLOOR_ULPS", "Distribution", "Errors"]

FACTOR = 2.0
FLOOR_ULPS = 4.0
TOP = 10
_CHUNK = 1_000_000
"""Numbers compared at a time; a percentile is taken over about as many, evenly spaced."""
_MAX_ROWS = 128
"""Logit rows of one point that the distribution metrics look at, evenly spaced."""


@dataclass
class Errors:
    """Errors of one output against float64, over all points."""

    runtime: float = 0.0
    torch: float = 0.0
    scale: float = 0.0
    p999: float = 0.0
    worst: Point | None = None
    finite: bool = True

    def add(self, reference: np.ndarray[Any, Any], yardstick: np.ndarray[Any, Any], result: np.ndarray[Any, Any],
            valid: np.ndarray[Any, Any], point: Point) -> None:  # fmt: skip
        """Take one point into account: finite everywhere, close wherever the input is not padding."""
        if result.shape != reference.shape:
            raise ValueError(f"an output has shape {result.shape}, the model's has {reference.shape}")
        self.finite = self.finite and bool(np.isfinite(result).all())
        width = reference.shape[-1] if valid.shape[-1] == 1 else 1  # what counts or not as one: a row, or a number
        rows = np.flatnonzero(np.broadcast_to(valid, (*reference.shape[:-1], reference.shape[-1] // width)))
        wanted, allowed, found = (values.reshape(-1, width) for values in (reference, yardstick, result))
        samples = []
        for part in np.array_split(rows, -(-rows.size * width // _CHUNK) or 1) if rows.size else ():
            exact = wanted[part].astype(np.float64)
            self.finite = self.finite and bool(np.isfinite(exact).all())
            error = np.abs(found[part] - exact)
            highest = float(np.max(error))
            if not highest <= self.runtime:  # also when it is not a number
                self.runtime, self.worst = highest, point
            self.torch = max(self.torch, float(np.max(np.abs(allowed[part] - exact))))
            self.scale = max(self.scale, float(np.max(np.abs(exact))))
            samples.append(error.ravel()[:: max(1, rows.size * width // _CHUNK)])
        if samples:
            self.p999 = max(self.p999, float(np.quantile(np.concatenate(samples), 0.999)))

    def allow(
        self, reference: np.ndarray[Any, Any], yardstick: np.ndarray[Any, Any], valid: np.ndarray[Any, Any]
    ) -> None:
        """Take another result of torch's into account, which shows what rounding alone can do."""
        error = np.abs(yardstick.astype(np.float64) - reference)
        self.torch = max(self.torch, float(np.max(error, where=np.broadcast_to(valid, error.shape), initial=0.0)))

    def limit(self, epsilon: float) -> float:
        """The largest error that passes."""
        return FACTOR * self.torch + FLOOR_ULPS * epsilon * self.scale

    def passed(self, epsilon: float) -> bool:
        """Whether the graph equals the model in this output."""
        return self.finite and self.runtime <= self.limit(epsilon)

    def to_dict(self, epsilon: float) -> dict[str, Any]:
        """For parity.json."""
        return {
            "passed": self.passed(epsilon),
            "max_abs_error": self.runtime,
            "p99_9_abs_error": self.p999,
            "max_rel_error": self.runtime / self.scale if self.scale else self.runtime,
            "torch_max_abs_error": self.torch,
            "ratio": self.runtime / self.torch if self.torch else None,
            "limit": self.limit(epsilon),
            "finite": self.finite,
            "worst_point": self.worst.to_dict() if self.worst else None,
        }


@dataclass
class Distribution:
    """How far the next-token distributions of the graph are from those of the model."""

    rows: int = 0
    kl: float = 0.0
    overlap: float = 1.0
    disagreements: int = 0
    near_ties: int = 0

    def add(self, reference: np.ndarray[Any, Any], result: np.ndarray[Any, Any], margin: float) -> None:
        """Compare logits of shape (rows, vocabulary). A gap below ``margin`` between the best two is a near-tie."""
        keep = slice(None, None, -(-len(reference) // _MAX_ROWS) or 1)
        wanted, found = reference[keep].astype(np.float64), result[keep].astype(np.float64)
        if not len(wanted):
            return
        log_p, log_q = _log_softmax(wanted), _log_softmax(found)
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
        """For parity.json."""
        return {
            "rows": self.rows,
            "max_kl_divergence": self.kl,
            "min_top_10_overlap": self.overlap,
            "argmax_disagreements": self.disagreements,
            "argmax_near_ties": self.near_ties,
        }


def _log_softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    shifted = logits - logits.max(-1, keepdims=True)
    result: np.ndarray[Any, Any] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result
