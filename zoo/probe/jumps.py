"""The error rule of discontinuous models.

Such a model chooses by comparing numbers that it computes, as routing to experts does. Where two of them nearly tie,
rounding decides, and the output jumps. :class:`JumpErrors` leaves such rows out, if PyTorch jumps there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.probe.errors import FACTOR, Errors
from zoo.probe.inputs import Point

__all__ = ["JUMP", "MOST_JUMPS", "JumpErrors"]

JUMP = 8.0
"""PyTorch's error at a row, relative to its median over all rows, beyond which the row counts as a jump. Without jumps,
the largest is 2 to 4 times the median in models with random weights, in float32 and in half precision."""
MOST_JUMPS = 0.2
"""Largest share of rows at which PyTorch may jump, and at which the graph may be beyond the limits."""


@dataclass
class _Rows:
    """Errors of some rows of one point: maxima of each row, in both units."""

    point: Point
    plain: Array
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
    _items: list[_Rows] = field(default_factory=list, repr=False)
    _latest: int = 0
    """Number of items of the last point."""
    _judged: list[Array] = field(default_factory=list, repr=False)
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
        for part, rows in zip(parts, self._items[len(self._items) - self._latest :], strict=True):
            exact = reference[part].astype(np.float64, copy=False)
            error = np.abs(yardstick[part].astype(np.float64, copy=False) - exact)
            highest = np.max(error, axis=1)
            local = np.max(error / self.local_scale(exact), axis=1)
            rows.reach = np.fmax(rows.reach, highest)
            rows.reach_local = np.fmax(rows.reach_local, local)
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
        torch = np.max(allowed, axis=1)
        plain = np.max(allowed / local_scale, axis=1)
        none = np.zeros(len(torch))
        self._items.append(_Rows(point, plain, torch, plain, none, none, torch, plain))
        self._latest += 1

    def _judge(self, part: int, error: Array, local_scale: Array | None, point: Point) -> None:
        assert local_scale is not None
        rows = self._items[len(self._items) - self._latest + part]
        rows.runtime = np.max(error, axis=1)
        rows.runtime_local = np.max(error / local_scale, axis=1)

    def _settle(self) -> None:
        """Recompute the limits and the largest errors from the rows that are judged."""
        if not self._items:
            return
        plain = np.concatenate([rows.plain for rows in self._items])
        self._threshold = JUMP * max(float(np.median(plain)), self.epsilon)
        self.torch_jumps = float(np.mean(plain > self._threshold))
        steady = [rows.plain <= self._threshold for rows in self._items]
        pairs = list(zip(self._items, steady, strict=True))
        largest = [float(np.max(rows.torch, where=there, initial=0.0)) for rows, there in pairs]
        self.torch = max(largest)
        self.worst_torch = self._items[int(np.argmax(largest))].point
        self.local_torch = max(float(np.max(rows.torch_local, where=there, initial=0.0)) for rows, there in pairs)
        self.runtime = self.local_runtime = 0.0
        self._judged = []
        beyond = 0
        for rows, there in pairs:
            off = ~((rows.runtime <= self.limit) & (rows.runtime_local <= self.local_limit))  # true for NaN, too
            near = (rows.runtime <= FACTOR * rows.reach) & (rows.runtime_local <= FACTOR * rows.reach_local)
            judged = there & ~(off & near)
            beyond += int(np.sum(off))
            self._judged.append(judged)
            if not (highest := float(np.max(rows.runtime, where=judged, initial=0.0))) <= self.runtime:
                self.runtime = highest
                self.worst = rows.point
            if not (highest := float(np.max(rows.runtime_local, where=judged, initial=0.0))) <= self.local_runtime:
                self.local_runtime = highest
                self.worst_local = rows.point
        self.runtime_jumps = beyond / len(plain)

    def judged_rows(self, valid: Array) -> Array:
        judged = valid.copy()
        if now := self._judged[len(self._judged) - self._latest :]:
            judged[valid] = np.concatenate(now)
        return judged

    @property
    def passed(self) -> bool:
        return super().passed and max(self.torch_jumps, self.runtime_jumps) <= MOST_JUMPS

    def failure(self) -> str | None:
        failure = super().failure()
        if failure is None and not self.passed:
            shares = f"{self.torch_jumps:.1%} of the rows in PyTorch and {self.runtime_jumps:.1%} in the graph"
            return f"jumps at {shares}, allowed {MOST_JUMPS:.0%}"
        return failure

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"torch_jumps": self.torch_jumps, "graph_jumps": self.runtime_jumps}
