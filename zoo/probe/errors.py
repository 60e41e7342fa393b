"""The error rule: the allowed deviation of an output from float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from zoo.probe.inputs import Point

__all__ = ["FACTOR", "FLOOR_ULPS", "Errors"]

FACTOR = 2.0
FLOOR_ULPS = 4.0
HOPELESS = 100.0
"""A graph whose error exceeds this multiple of the limit fails at once, although later inputs may raise the limit."""
_CHUNK = 1_000_000
"""Numbers compared at a time, and approximate number of evenly spaced samples for a percentile."""


@dataclass
class Errors:
    """Errors of one output with respect to float64, over all points."""

    runtime: float = 0.0
    torch: float = 0.0
    scale: float = 0.0
    p999: float = 0.0
    worst: Point | None = None
    """Point of the largest error or, if an output is not finite, the first such point."""
    finite: bool = True

    def add(self, reference: np.ndarray[Any, Any], yardstick: np.ndarray[Any, Any], result: np.ndarray[Any, Any],
            valid: np.ndarray[Any, Any], point: Point) -> None:  # fmt: skip
        """Add one point. The output must be finite everywhere, and close to the reference except at padding.

        After a non-finite output, further points are ignored: they cannot change the verdict.
        """
        if result.shape != reference.shape:
            raise ValueError(f"an output has shape {result.shape}, but the model's has {reference.shape}")
        if not self.finite:
            return
        self.finite = bool(np.isfinite(result).all())
        width = reference.shape[-1] if valid.shape[-1] == 1 else 1  # validity is per row or per element
        rows = np.flatnonzero(np.broadcast_to(valid, (*reference.shape[:-1], reference.shape[-1] // width)))
        wanted, allowed, found = (values.reshape(-1, width) for values in (reference, yardstick, result))
        samples = []
        for part in np.array_split(rows, -(-rows.size * width // _CHUNK) or 1) if rows.size else ():
            exact = wanted[part].astype(np.float64)
            self.finite = self.finite and bool(np.isfinite(exact).all())
            error = np.abs(found[part] - exact)
            highest = float(np.max(error))
            if not highest <= self.runtime:  # true for NaN, too
                self.runtime, self.worst = highest, point
            self.torch = max(self.torch, float(np.max(np.abs(allowed[part] - exact))))
            self.scale = max(self.scale, float(np.max(np.abs(exact))))
            samples.append(error.ravel()[:: max(1, rows.size * width // _CHUNK)])
        if samples:
            self.p999 = max(self.p999, float(np.quantile(np.concatenate(samples), 0.999)))
        if not self.finite:
            self.worst = point

    def allow(
        self, reference: np.ndarray[Any, Any], yardstick: np.ndarray[Any, Any], valid: np.ndarray[Any, Any]
    ) -> None:
        """Raise the limit by another result of torch, computed with different rounding."""
        error = np.abs(yardstick.astype(np.float64) - reference)
        self.torch = max(self.torch, float(np.max(error, where=np.broadcast_to(valid, error.shape), initial=0.0)))

    def limit(self, epsilon: float) -> float:
        """Return the largest allowed error."""
        return FACTOR * self.torch + FLOOR_ULPS * epsilon * self.scale

    def passed(self, epsilon: float) -> bool:
        """Whether this output of the graph matches the model."""
        return self.finite and self.runtime <= self.limit(epsilon)

    def hopeless(self, epsilon: float) -> bool:
        """Whether the output fails whatever points follow: not finite, or far beyond a limit that may still grow."""
        return not self.finite or self.runtime > HOPELESS * self.limit(epsilon) > 0

    def to_dict(self, epsilon: float) -> dict[str, Any]:
        """Return the entry for parity.json."""
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
