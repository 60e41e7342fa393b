"""The order of examples, as a pure function of a seed and the step number.

No state needs saving to continue a run, and the number of processes that share a step does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

__all__ = ["Order", "generator", "permute"]

Ints = np.ndarray[Any, np.dtype[np.int64]]
_ROUNDS = 6
_WINDOW = 64
"""Batches among which examples of like length are put together."""


def generator(*key: int) -> np.random.Generator:
    """Return a random generator that is determined by non-negative integers."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


def permute(places: Ints, size: int, *key: int) -> Ints:
    """Return the images of ``places`` in a permutation of ``range(size)`` that is determined by ``key``.

    The permutation is a Feistel network on the smallest square power of two that holds ``size`` numbers (Luby and
    Rackoff 1988), repeated until the result lies in the range (Black and Rogaway 2002). It takes no memory.

    >>> sorted(permute(np.arange(5), 5, 1).tolist())
    [0, 1, 2, 3, 4]
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64)
    result = places.astype(np.uint64)
    outside = np.ones(len(result), bool)
    while outside.any():
        left, right = result[outside] >> half, result[outside] & mask
        for number in keys:
            left, right = right, left ^ (_mix(right ^ number) & mask)
        result[outside] = (left << half) | right
        outside = result >= size
    return result.astype(np.int64)


def _mix(x: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return well-mixed bits: the finaliser of SplitMix64 (Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, eq=False)
class Order:
    """The examples of each step: each epoch is a permutation of all examples, and steps follow each other without gaps.

    Position p of a run is example ``permute(p % size, size, seed, p // size)``. With ``lengths``, the positions of
    64 successive steps (fewer if an epoch has fewer) are sorted by the length of their examples before they are
    divided into batches, and these batches are permuted. The examples of the 64 steps are the same.
    """

    size: int
    """Number of examples."""
    batch_size: int
    seed: int
    lengths: Ints | None = None
    """The length of each example, (size,); None for batches without regard to length."""
    _windows: dict[int, Ints] = field(default_factory=dict, repr=False)

    @cached_property
    def window(self) -> int:
        """Number of steps in which examples are sorted by length."""
        return 1 if self.lengths is None else max(1, min(_WINDOW, self.size // self.batch_size))

    def examples(self, positions: Ints) -> Ints:
        """Return the example at each position of the run."""
        result = np.empty_like(positions)
        for epoch in np.unique(positions // self.size):
            here = positions // self.size == epoch
            result[here] = permute(positions[here] % self.size, self.size, self.seed, int(epoch))
        return result

    def positions(self, step: int) -> Ints:
        """Return the positions, (batch_size,), that step ``step``, counted from 0, reads; longest examples last."""
        number, row = divmod(step, self.window)
        if number not in self._windows:
            self._windows.clear()
            self._windows[number] = self._batches(number)
        return self._windows[number][row]

    def _batches(self, number: int) -> Ints:
        """Return the positions of a window, (window, batch_size)."""
        count = self.window * self.batch_size
        positions = np.arange(number * count, (number + 1) * count)
        if self.lengths is not None:
            positions = positions[np.argsort(self.lengths[self.examples(positions)], kind="stable")]
        rows = positions.reshape(self.window, self.batch_size)
        return rows[permute(np.arange(self.window), self.window, self.seed, number, 1)]
