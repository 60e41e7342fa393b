"""Batching inputs by length, to minimise padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

__all__ = ["batches"]


def batches(sizes: Sequence[tuple[int, int]], limit: int, fits: Callable[[int, int], bool]) -> Iterator[list[int]]:
    """Yield batches of indices, grouped by size, largest first.

    Args:
        sizes: pairs (index, size).
        limit: maximum number of indices per batch.
        fits: called with the largest size in a batch and another size; whether the two can share the batch.
    """
    batch: list[int] = []
    largest = 0
    for index, size in sorted(sizes, key=lambda pair: (-pair[1], pair[0])):
        if batch and (len(batch) == limit or not fits(largest, size)):
            yield batch
            batch = []
        if not batch:
            largest = size
        batch.append(index)
    if batch:
        yield batch
