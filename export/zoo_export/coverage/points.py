"""Points that are tried, because the conditions of graphs may have other outcomes there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from zoo.contract import Graph, Size, sizes_of
from zoo.probe.grid import ODD, PAST, WORK
from zoo.probe.inputs import Padding, Point

__all__ = ["LARGEST_BATCH", "candidates", "many_lengths", "turning_points"]

LARGEST_BATCH = 9
"""Batches are tried up to this size: one more than a batch that special code for a few rows may expect."""
_ALL_LENGTHS, _SPREAD = 64, 32
"""Length up to which all lengths are compared where sizes are rounded, and number of longer ones."""


def turning_points(graphs: Sequence[Graph], longest: int, constants: Iterable[int]) -> list[Point]:
    """Return points at which a length or a past is a constant of the graphs or next to one, small ones first.

    All batches up to ``LARGEST_BATCH`` are tried.
    """
    near = sorted({value + change for value in constants for change in (-1, 0, 1)})
    few, has_past = min(ODD, longest), any(graph.pasts for graph in graphs)
    points = [Point(batch, few, 0, "none") for batch in range(1, LARGEST_BATCH + 1)]
    points += [Point(2, length, 0, "none") for length in near if 1 <= length <= longest]
    if has_past:
        past = min(PAST, longest - 1)
        points += [Point(batch, min(2, longest - past), past, "none") for batch in range(1, LARGEST_BATCH + 1)]
        points += [
            Point(2, min(length, longest - past), past, "none")
            for past in near
            if 1 <= past < longest
            for length in (1, 2)
        ]
    allowed = sizes_of(graphs).get("sequence", Size())
    points = [replace(point, length=allowed.nearest(point.length)) for point in points]
    return sorted(dict.fromkeys(points), key=lambda point: point.tokens)


def candidates(graphs: Sequence[Graph], longest: int, constants: Iterable[int]) -> list[Point]:
    """Return points of many sizes, cheap ones first: around the constants of the graphs and up to the longest input."""
    near = {value + change for value in constants for change in (0, 1) if value < longest}
    lengths = sorted(size for size in {1, 2, 3, 17, longest // 2, longest - 1, longest, *near} if 1 <= size <= longest)
    allowed = sizes_of(graphs).get("sequence", Size())
    lengths = sorted({allowed.nearest(size) for size in lengths})
    has_mask = any(tensor.is_mask for graph in graphs for tensor in graph.input_tensors())
    pasts = sorted({0, 1, *(size for size in lengths if size < longest)}) if any(g.pasts for g in graphs) else [0]
    paddings: tuple[Padding, ...] = ("none", "left", "right") if has_mask else ("none",)
    points = [
        Point(batch, length, past, padding)
        for batch in (1, 2, 7)
        for length in lengths
        for past in pasts
        if length + past <= longest and (past == 0 or length <= 3)
        for padding in paddings
    ]
    return sorted(points, key=lambda point: point.tokens)


def many_lengths(graphs: Sequence[Graph], longest: int, parameters: int, *, batch: int = 1) -> list[Point]:
    """Return points of all lengths up to 64 and of others up to the longest, short ones first, as far as ``WORK``.

    Graphs with a past read the same number of tokens in two calls, too, of which the second has one token.
    """
    allowed = sizes_of(graphs).get("sequence", Size())
    spread = np.linspace(_ALL_LENGTHS, longest, _SPREAD + 1).astype(int).tolist()
    lengths = {allowed.nearest(min(size, longest)) for size in (*range(1, _ALL_LENGTHS + 1), *spread)}
    points = [Point(batch, length, 0, "none") for length in sorted(lengths)]
    if any(graph.pasts for graph in graphs):
        points += [Point(batch, 1, length - 1, "none") for length in sorted(lengths) if length > 1]
    points.sort(key=lambda point: point.tokens)
    work = np.cumsum([point.tokens * parameters for point in points])
    return [point for point, total in zip(points, work, strict=True) if total <= WORK]
