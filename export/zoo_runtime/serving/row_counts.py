"""Numbers of rows at which a step has the bits of a step of all rows.

A step of few rows is faster, but kernels choose the order of additions by the sizes of a product, so that its last bits
may be others. The order depends on these sizes, on the processor and on the number of threads, but not on numbers. An
export is made elsewhere, so it cannot record which numbers of rows have the same bits: each is compared with all rows
where it is to be used, on every output, and is used from then on if all bits are the same. The export does record at
which numbers of rows it was compared with the model. Others are not used.

This holds if no operator chooses sizes by numbers, as a mixture of experts does, or scales by the largest value of the
batch, as int8 does. Graphs with such operators always run all rows. A single row often takes other kernels, for the
product of a vector and a matrix; two rows then serve for one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from zoo.arrays import Array
from zoo_runtime.serving.rows import Rows

__all__ = ["use_exact_counts"]

_PLACES = (0, 1, 0.5)
"""Positions of the compared rows, from the first possible one (0) to the last (1), each compared on other contents."""
_LENGTH = 32
"""Largest length of most rows of them."""
_MAGNITUDES = (-2.0, 1.5)
"""Smallest and largest magnitude of the numbers of a row, as powers of ten."""


def use_exact_counts(rows: Rows, compared: Collection[int] | None = None) -> None:
    """Let the steps of rows that hold no texts have fewer rows where this changes no bit.

    Numbers of rows are compared at three places, on contents of several lengths and magnitudes, which stay in the
    buffers. No-op on a device, and for an export of which all sizes are fixed.

    Args:
        rows: the rows.
        compared: the numbers of rows to choose from; by default all possible ones.
    """
    chosen = [count for count in rows.possible if compared is None or count in compared]
    rows.counts = (*_exact(rows, [count for count in chosen if count < rows.count]), rows.count)


def _exact(rows: Rows, counts: Sequence[int]) -> list[int]:
    """Return those of the numbers of rows whose results are the same, to the bit, as those of all rows."""
    exact = list(counts)
    for seed, place in enumerate(_PLACES if exact else ()):
        tokens = _fill(rows, np.random.default_rng(seed))
        wanted = _results(rows, rows.count, 0, tokens)
        for count in tuple(exact):
            first = int(place * (rows.count - count))
            found = _results(rows, count, first, tokens)
            same = zip(found, wanted, strict=True)
            if any(one.tobytes() != all_rows[first : first + count].tobytes() for one, all_rows in same):
                exact.remove(count)
    rows.lengths[:] = 0
    return exact


def _fill(rows: Rows, generator: np.random.Generator) -> dict[int, Array]:
    """Put random texts into all rows. Returns a token that follows each of them."""
    longest = (rows.limit or _LENGTH) - 1
    growing = {past.name for past, _ in rows.graph.growing_pairs()}
    rows.lengths[:] = generator.integers(0, min(longest, _LENGTH) + 1, rows.count)
    rows.lengths[generator.integers(rows.count)] = longest
    magnitudes = 10 ** generator.uniform(*_MAGNITUDES, rows.count)
    for name, array in rows.arrays():
        for row in range(rows.count):
            part = array[row, :, : rows.lengths[row]] if name in growing else array[row]
            if array.dtype.kind == "i":  # a mask, or numbers that each token has
                part[...] = np.arange(part.size).reshape(part.shape) < 1 + rows.lengths[row]
            else:
                part[...] = generator.standard_normal(part.shape, np.float32) * magnitudes[row]
    tokens = generator.integers(0, min(rows.upper or rows.vocabulary, rows.vocabulary), rows.count)
    return {row: tokens[row : row + 1] for row in range(rows.count)}


def _results(rows: Rows, count: int, first: int, tokens: dict[int, Array]) -> list[Array]:
    """Return the outputs of a step of some rows, each row's own along the first axis, and leave the rows as they were.

    New keys and values stay where they are: no row counts them to its text.
    """
    growing = {past.name for past, _ in rows.graph.growing_pairs()}
    states = [array for name, array in rows.pasts() if name not in growing]
    before = [array.copy() for array in states]
    places = range(first, first + count)
    results = [rows.step(count, first, {row: tokens[row] for row in places}).copy()]
    results += [array[first : first + count].copy() for array in states]
    results += [
        np.stack([array[row, :, rows.lengths[row]] for row in places])
        for name, array in rows.pasts()
        if name in growing
    ]
    for array, content in zip(states, before, strict=True):
        array[...] = content
    return results
