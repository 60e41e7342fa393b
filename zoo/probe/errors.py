"""The error rule: the allowed deviation of an output from float64.

Errors are judged in two units. The first is the output's largest value: a graph may be at most ``FACTOR`` times as far
from float64 as PyTorch in the model's own dtype, plus ``FLOOR_ULPS`` units in the last place. The second is the largest
value in the same row or in the same channel, whichever is smaller, so that a few large numbers do not hide errors of
all others. PyTorch's own error has a ceiling: a model that amplifies rounding beyond it cannot be verified.

A discontinuous model chooses by comparing numbers that it computes, as routing to experts does. Where two of them
nearly tie, rounding decides, and the output jumps. :class:`JumpErrors` leaves such rows out, if PyTorch jumps there.
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
    "JUMP",
    "LOCAL_FACTOR",
    "LOCAL_FLOOR_ULPS",
    "MOST_JUMPS",
    "Errors",
    "JumpErrors",
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
JUMP = 8.0
"""PyTorch's error at a row, relative to its median over all rows, beyond which the row counts as a jump. Without jumps,
the largest is 2 to 4 times the median in models with random weights, in float32 and in half precision."""
MOST_JUMPS = 0.2
"""Largest share of rows at which PyTorch may jump, and at which the graph may be beyond the limits."""
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
                self.finite, self.worst = False, point
                return
            if not np.isfinite(allowed).all():
                self.overflow = point
                return
            self._judge_torch(allowed, self._local_scale(exact) if self.local else None, point)

    def add_graph(self, reference: Array, result: Array, valid: Array, point: Point) -> None:
        """Add the errors of the graph at the point that :meth:`add_torch` was last given."""
        if result.shape != reference.shape:
            raise ValueError(f"an output has shape {result.shape}, but the model's has {reference.shape}")
        if not self.finite or self.overflow not in (None, point):
            return
        if not all(np.isfinite(part).all() for part in np.array_split(result, -(-result.size // _CHUNK) or 1)):
            self.finite, self.overflow = False, None
            self.worst = point
        if self.overflow is not None:
            return
        rows, samples = np.flatnonzero(valid), []
        for number, part in enumerate(self._parts(rows, reference.shape[1])):
            exact = reference[part].astype(np.float64, copy=False)
            error = np.abs(result[part] - exact)
            self._judge(number, error, self._local_scale(exact) if self.local else None, point)
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
                self._allow(error, self._local_scale(exact) if self.local else None)

    def _judge_torch(self, allowed: Array, local_scale: Array | None, point: Point) -> None:
        """Add finite errors of PyTorch at some rows."""
        if np.max(allowed) > self.torch:
            self.worst_torch = point
        self._allow(allowed, local_scale)

    def _judge(self, _part: int, error: Array, local_scale: Array | None, point: Point) -> None:
        """Add errors of the graph at a part of the rows, by its number."""
        if not (highest := float(np.max(error))) <= self.runtime:  # true for NaN, too
            self.runtime, self.worst = highest, point
        if local_scale is not None and not (highest := float(np.max(error / local_scale))) <= self.local_runtime:
            self.local_runtime, self.worst_local = highest, point

    def judged_rows(self, valid: Array) -> Array:
        """Return which rows of the last point are judged, of the valid ones."""
        return valid

    def _allow(self, error: Array, local_scale: Array | None) -> None:
        """Raise the limits by finite errors of PyTorch."""
        self.torch = max(self.torch, float(np.max(error)))
        if local_scale is not None:
            self.local_torch = max(self.local_torch, float(np.max(error / local_scale)))

    def _parts(self, rows: Array, width: int) -> list[Array]:
        return np.array_split(rows, -(-rows.size * width // _CHUNK)) if rows.size and width else []

    def _measure(self, sizes: Array) -> None:
        """Add absolute values of the reference to the scales."""
        highest = np.max(sizes, axis=0)
        self._channels = highest if self._channels is None else np.maximum(self._channels, highest)
        self._rows += len(sizes)
        self.scale = max(self.scale, float(np.max(highest)))

    def _local_scale(self, exact: Array) -> Array:
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


@dataclass
class _Rows:
    """Errors of some rows of one point: maxima of each row, in both units."""

    point: Point
    own: Array
    """PyTorch's error relative to the row or channel, on the model's own weights."""
    torch: Array
    torch_local: Array
    runtime: Array
    runtime_local: Array
    reach: Array
    """PyTorch's largest error on nudged weights."""
    reach_local: Array


@dataclass
class JumpErrors(Errors):
    """Errors of an output of a model that is declared discontinuous.

    PyTorch jumps at a row where its error is more than ``JUMP`` times its median. Rows at which it jumps on the model's
    own weights neither raise the limits nor count as errors of the graph. Where the graph is beyond the limits at
    another row, PyTorch's error at the same row must be as large on nudged weights, up to a factor of ``FACTOR``. Both
    shares of rows, where PyTorch jumps and where the graph is beyond the limits, may be ``MOST_JUMPS``. All other rows
    are judged as in other models.
    """

    torch_jumps: float = 0.0
    """Share of rows at which PyTorch jumps on the model's own weights."""
    runtime_jumps: float = 0.0
    """Share of rows at which the graph is beyond the limits."""
    _threshold: float = 0.0
    _known: list[_Rows] = field(default_factory=list, repr=False)
    _latest: int = 0
    """Number of items of the last point."""
    _kept: list[Array] = field(default_factory=list, repr=False)
    """For each item, the rows that are judged."""
    _shifts: list[Array] = field(default_factory=list, repr=False)
    """How far other constants of the graph move each row, relative to the row or channel."""

    def add_torch(self, reference: Array, yardstick: Array, valid: Array, point: Point) -> None:
        self._latest = 0
        super().add_torch(reference, yardstick, valid, point)

    def add_graph(self, reference: Array, result: Array, valid: Array, point: Point) -> None:
        super().add_graph(reference, result, valid, point)
        self._settle()

    def allow(self, reference: Array, yardstick: Array, valid: Array, *, bits: int = 1) -> None:
        """Add a result of PyTorch at the last point, on weights whose last bits are random.

        It shows how far rounding may move each row. Where PyTorch does not jump, nudges of one bit raise the limits.
        With 0 bits, it is PyTorch's own result with the effect of other constants in the graph, which move every row:
        a row jumps if it moves by more than ``JUMP`` times the median of these effects.
        """
        parts = self._parts(np.flatnonzero(valid), reference.shape[1])
        for part, rows in zip(parts, self._known[len(self._known) - self._latest :], strict=True):
            exact = reference[part].astype(np.float64, copy=False)
            error = np.abs(yardstick[part].astype(np.float64, copy=False) - exact)
            highest, local = np.max(error, axis=1), np.max(error / self._local_scale(exact), axis=1)
            rows.reach, rows.reach_local = np.fmax(rows.reach, highest), np.fmax(rows.reach_local, local)
            if bits == 0:
                self._shifts.append(local)
            if bits <= 1:
                usual = JUMP * float(np.median(np.concatenate(self._shifts))) if bits == 0 else 0.0
                steady = local <= max(self._threshold, usual)
                rows.torch = np.maximum(rows.torch, np.where(steady, highest, 0.0))
                rows.torch_local = np.maximum(rows.torch_local, np.where(steady, local, 0.0))
        self._settle()

    def _judge_torch(self, allowed: Array, local_scale: Array | None, point: Point) -> None:
        assert local_scale is not None  # as ``local`` is true
        torch, own = np.max(allowed, axis=1), np.max(allowed / local_scale, axis=1)
        none = np.zeros(len(torch))
        self._known.append(_Rows(point, own, torch, own, none, none, torch, own))
        self._latest += 1

    def _judge(self, part: int, error: Array, local_scale: Array | None, point: Point) -> None:
        assert local_scale is not None
        rows = self._known[len(self._known) - self._latest + part]
        rows.runtime, rows.runtime_local = np.max(error, axis=1), np.max(error / local_scale, axis=1)

    def _settle(self) -> None:
        """Recompute the limits and the largest errors from the rows that are judged."""
        if not self._known:
            return
        own = np.concatenate([rows.own for rows in self._known])
        self._threshold = JUMP * max(float(np.median(own)), self.epsilon)
        self.torch_jumps = float(np.mean(own > self._threshold))
        steady = [rows.own <= self._threshold for rows in self._known]
        pairs = list(zip(self._known, steady, strict=True))
        largest = [float(np.max(rows.torch, where=there, initial=0.0)) for rows, there in pairs]
        self.torch, self.worst_torch = max(largest), self._known[int(np.argmax(largest))].point
        self.local_torch = max(float(np.max(rows.torch_local, where=there, initial=0.0)) for rows, there in pairs)
        self.runtime = self.local_runtime = 0.0
        self._kept, beyond = [], 0
        for rows, there in pairs:
            off = ~((rows.runtime <= self.limit) & (rows.runtime_local <= self.local_limit))  # true for NaN, too
            near = (rows.runtime <= FACTOR * rows.reach) & (rows.runtime_local <= FACTOR * rows.reach_local)
            kept = there & ~(off & near)
            beyond += int(np.sum(off))
            self._kept.append(kept)
            if not (highest := float(np.max(rows.runtime, where=kept, initial=0.0))) <= self.runtime:
                self.runtime, self.worst = highest, rows.point
            if not (highest := float(np.max(rows.runtime_local, where=kept, initial=0.0))) <= self.local_runtime:
                self.local_runtime, self.worst_local = highest, rows.point
        self.runtime_jumps = beyond / len(own)

    def judged_rows(self, valid: Array) -> Array:
        judged = valid.copy()
        if now := self._kept[len(self._kept) - self._latest :]:
            judged[valid] = np.concatenate(now)
        return judged

    @property
    def passed(self) -> bool:
        return super().passed and max(self.torch_jumps, self.runtime_jumps) <= MOST_JUMPS

    def failure(self) -> str | None:
        known = super().failure()
        if known is None and not self.passed:
            shares = f"{self.torch_jumps:.1%} of the rows in PyTorch and {self.runtime_jumps:.1%} in the graph"
            return f"jumps at {shares}, allowed {MOST_JUMPS:.0%}"
        return known

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"torch_jumps": self.torch_jumps, "graph_jumps": self.runtime_jumps}
