"""Batches of inputs of like length, so that little of what is computed is padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

__all__ = ["batches"]


def batches(sizes: Sequence[tuple[int, int]], limit: int, fits: Callable[[int, int], bool]) -> Iterator[list[int]]:
    """Group places by size, the longest first.

    Args:
        sizes: pairs of a place and the size of what is there.
        limit: places in a batch.
        fits: whether something of the second size may be in one batch with the first, which is larger.
    """
    batch: list[int] = []
    first = 0
    for place, size in sorted(sizes, key=lambda pair: (-pair[1], pair[0])):
        if batch and (len(batch) == limit or not fits(first, size)):
            yield batch
            batch = []
        if not batch:
            first = size
        batch.append(place)
    if batch:
        yield batch
