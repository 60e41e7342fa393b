"""The error rule: the allowed deviation of an output from float64.

Errors are judged in two units. The first is the output's largest value: a graph may be at most ``FACTOR`` times as far
from float64 as PyTorch in the model's own dtype, plus ``FLOOR_ULPS`` units in the last place. The second is the largest
value in the same row or in the same channel, whichever is smaller, so that a few large numbers do not hide errors of
all others. PyTorch's own error has a ceiling: a model that amplifies rounding beyond it cannot be verified.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.contract import TensorSpec
from zoo.probe.inputs import Point

__all__ = [
    "FACTOR",
    "FLOOR_ULPS",
    "LOCAL_FACTOR",
    "LOCAL_FLOOR_ULPS",
    "Errors",
    "allowed_error",
    "as_rows",
]


FACTOR, LOCAL_FACTOR = 2.0, 4.0
FLOOR_ULPS, LOCAL_FLOOR_ULPS = 4.0, 16.0
HOPELESS = 100.0
"""A graph whose error exceeds this multiple of the limit fails at once, although later inputs may raise the limit."""
_CEILING = 0.1
"""Largest error of PyTorch, relative to the output's largest value, in a dtype with few digits."""
_CEILING_ULPS = 2.0**17
"""The same in units in the last place: 1.6 % in float32."""
_SMALLEST = 2.0**-20
"""Rows and channels smaller than this part of the largest value are judged as if they had this size."""
_ENOUGH = 8
"""Rows or channels from which a largest value is meaningful: that of fewer numbers may be close to 0 by chance."""
_CHUNK = 2**17
"""Numbers compared at a time: so few fit into a core's cache."""
_SAMPLES = 1_000_000
"""Approximate number of evenly spaced samples for a percentile."""


def allowed_error(torch: float, scale: float, epsilon: float) -> float:
    """Return the largest allowed error.

    Args:
        torch: the largest error of PyTorch in the model's own dtype.
        scale: the largest absolute value in float64.
        epsilon: the rounding unit of that dtype.
    """
    return FACTOR * torch + FLOOR_ULPS * epsilon * scale


def as_rows(tensor: TensorSpec, values: Array) -> Array:
    """Reshape an output to (rows, channels): its fixed dimensions are channels, and its free dimensions are rows.

    >>> as_rows(TensorSpec(name="present.0.key", dims=("batch", 4, "sequence", 16)), np.zeros((2, 4, 7, 16))).shape
    (14, 64)
    """
    fixed = [axis for axis, dim in enumerate(tensor.dims) if isinstance(dim, int)]
    moved = np.moveaxis(values, fixed, range(-len(fixed), 0))
    return moved.reshape(-1, int(np.prod([values.shape[axis] for axis in fixed])))


@dataclass
class Errors:
    """Errors of one output with respect to float64, over all points.

    Args:
        epsilon: the rounding unit of the dtype in which the graph computes.
        local: whether errors are judged in rows and channels, too, and PyTorch's error has a ceiling. Both assume that
            the graph and PyTorch differ by rounding alone.
    """

    epsilon: float
    local: bool = True
    runtime: float = 0.0
    torch: float = 0.0
    scale: float = 0.0
    local_runtime: float = 0.0
    """Largest error relative to the largest value in the same row or channel."""
    local_torch: float = 0.0
    p999: float = 0.0
    worst: Point | None = None
    """Point of the largest error or, if an output is not finite, the first such point."""
    worst_local: Point | None = None
    finite: bool = True
    overflow: Point | None = None
    """The first point at which PyTorch's own result is not finite."""
    worst_torch: Point | None = None
    """Point of PyTorch's largest error."""
    _channels: Array | None = field(default=None, repr=False)
    """Largest value of each channel so far."""
    _rows: int = 0

    def add(self, reference: Array, yardstick: Array, result: Array, valid: Array, point: Point) -> None:
        """Add one point: arrays of shape (rows, channels), and the valid rows.

        The output must be finite everywhere, and close to the reference except at padding. After a non-finite output,
        further points are ignored: they cannot change the verdict.
        """
        self.add_torch(reference, yardstick, valid, point)
        self.add_graph(reference, result, valid, point)

    def add_torch(self, reference: Array, yardstick: Array, valid: Array, point: Point) -> None:
        """Add the errors of PyTorch at one point, before :meth:`add_graph` adds those of the graph."""
        if not self.finite or self.overflow is not None:
            return
        parts = self._parts(np.flatnonzero(valid), reference.shape[1])
        for part in parts:
            self._measure(np.abs(reference[part].astype(np.float64, copy=False)))
        for part in parts:
            exact = reference[part].astype(np.float64, copy=False)
            allowed = np.abs(yardstick[part].astype(np.float64, copy=False) - exact)
            if not np.isfinite(exact).all():
                self.finite = False
                self.worst = point
                return
            if not np.isfinite(allowed).all():
                self.overflow = point
                return
            self._judge_torch(allowed, self.local_scale(exact) if self.local else None, point)

    def add_graph(self, reference: Array, result: Array, valid: Array, point: Point) -> None:
        """Add the errors of the graph at the point that :meth:`add_torch` was last given."""
        if result.shape != reference.shape:
            raise ValueError(f"an output has shape {result.shape}, but the model's has {reference.shape}")
        if not self.finite or self.overflow not in (None, point):
            return
        if not all(np.isfinite(part).all() for part in np.array_split(result, -(-result.size // _CHUNK) or 1)):
            self.finite = False
            self.overflow = None
            self.worst = point
        if self.overflow is not None:
            return
        rows, samples = np.flatnonzero(valid), []
        for number, part in enumerate(self._parts(rows, reference.shape[1])):
            exact = reference[part].astype(np.float64, copy=False)
            error = np.abs(result[part] - exact)
            self._judge(number, error, self.local_scale(exact) if self.local else None, point)
            samples.append(error.ravel()[:: max(1, rows.size * reference.shape[1] // _SAMPLES)].copy())
        if samples:
            self.p999 = max(self.p999, float(np.quantile(np.concatenate(samples), 0.999)))
        if not self.finite:
            self.worst = point

    def allow(self, reference: Array, yardstick: Array, valid: Array, *, bits: int = 1) -> None:
        """Raise the limits by another result of PyTorch, on weights of which this number of last bits is random."""
        for part in self._parts(np.flatnonzero(valid), reference.shape[1]):
            exact = reference[part].astype(np.float64, copy=False)
            error = np.abs(yardstick[part].astype(np.float64, copy=False) - exact)
            if np.isfinite(error).all():
                self._allow(error, self.local_scale(exact) if self.local else None)

    def _judge_torch(self, allowed: Array, local_scale: Array | None, point: Point) -> None:
        """Add finite errors of PyTorch at some rows."""
        if np.max(allowed) > self.torch:
            self.worst_torch = point
        self._allow(allowed, local_scale)

    def _judge(self, _part: int, error: Array, local_scale: Array | None, point: Point) -> None:
        """Add errors of the graph at a part of the rows, by its number."""
        if not (highest := float(np.max(error))) <= self.runtime:  # true for NaN, too
            self.runtime = highest
            self.worst = point
        if local_scale is not None and not (highest := float(np.max(error / local_scale))) <= self.local_runtime:
            self.local_runtime = highest
            self.worst_local = point

    def judged_rows(self, valid: Array) -> Array:
        """Return which rows of the last point are judged, of the valid ones."""
        return valid

    def _allow(self, error: Array, local_scale: Array | None) -> None:
        """Raise the limits by finite errors of PyTorch."""
        self.torch = max(self.torch, float(np.max(error)))
        if local_scale is not None:
            self.local_torch = max(self.local_torch, float(np.max(error / local_scale)))

    def _parts(self, rows: Array, width: int) -> list[Array]:
        """Divide rows into parts that fit in a chunk, or of one row, which may be wider."""
        return np.array_split(rows, min(rows.size, -(-rows.size * width // _CHUNK))) if rows.size and width else []

    def _measure(self, sizes: Array) -> None:
        """Add absolute values of the reference to the scales."""
        highest = np.max(sizes, axis=0)
        self._channels = highest if self._channels is None else np.maximum(self._channels, highest)
        self._rows += len(sizes)
        self.scale = max(self.scale, float(np.max(highest)))

    def local_scale(self, exact: Array) -> Array:
        """Return the largest value in the row or channel of each number, whichever is smaller."""
        scale = np.full(exact.shape, self.scale)
        if exact.shape[1] >= _ENOUGH:
            scale = np.minimum(scale, np.max(np.abs(exact), axis=1, keepdims=True))
        if self._channels is not None and self._rows >= _ENOUGH:
            scale = np.minimum(scale, self._channels)
        return np.maximum(scale, max(_SMALLEST, self.epsilon) * self.scale or 1.0)

    @property
    def limit(self) -> float:
        """The largest allowed error."""
        return allowed_error(self.torch, self.scale, self.epsilon)

    @property
    def local_limit(self) -> float:
        """The largest allowed error relative to the largest value in the same row or channel."""
        return LOCAL_FACTOR * self.local_torch + LOCAL_FLOOR_ULPS * self.epsilon

    @property
    def ceiling(self) -> float:
        """The largest error of PyTorch with which a graph can be verified."""
        return min(_CEILING, _CEILING_ULPS * self.epsilon) * self.scale if self.local else np.inf

    @property
    def stable(self) -> bool:
        """Whether PyTorch's own result is finite and close enough to float64 to judge others by it."""
        return self.overflow is None and self.torch <= self.ceiling

    @property
    def passed(self) -> bool:
        """Whether this output of the graph matches the model."""
        close = self.runtime <= self.limit and self.local_runtime <= self.local_limit
        return self.finite and self.stable and close

    @property
    def doubtful(self) -> bool:
        """Whether an error is beyond a limit that another result of PyTorch may raise."""
        return self.finite and not self.passed

    @property
    def hopeless(self) -> bool:
        """Whether the output fails whatever points follow: not finite, or far beyond a limit that may still grow."""
        return not self.finite or self.overflow is not None or self.runtime > HOPELESS * self.limit > 0

    def failure(self) -> str | None:
        """Describe the first violated rule, or return None."""
        if self.overflow is not None:
            return f"overflows in PyTorch at {self.overflow}, so there is nothing to compare with"
        if not self.finite:
            return f"is not finite at {self.worst}"
        if not self.stable:
            part = self.torch / self.scale
            return (
                f"is off by {part:.1%} in PyTorch itself at {self.worst_torch}: the model amplifies rounding errors "
                "too much to be verified (one that chooses by comparing computed numbers, as routing does, can be "
                "declared discontinuous)"
            )
        if not self.runtime <= self.limit:
            return f"is off by {self.runtime:.3g}, allowed {self.limit:.3g}, at {self.worst}"
        if not self.local_runtime <= self.local_limit:
            unit = "of the largest value of its row or channel"
            return f"is off by {self.local_runtime:.3g} {unit}, allowed {self.local_limit:.3g}, at {self.worst_local}"
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the entry for parity.json."""
        return {
            "passed": self.passed,
            "max_abs_error": self.runtime,
            "p99_9_abs_error": self.p999,
            "max_rel_error": self.runtime / self.scale if self.scale else self.runtime,
            "torch_max_abs_error": self.torch,
            "ratio": self.runtime / self.torch if self.torch else None,
            "limit": self.limit,
            **({"local_error": self.local_runtime, "local_limit": self.local_limit} if self.local else {}),
            "finite": self.finite,
            "worst_point": self.worst.to_dict() if self.worst else None,
        }
