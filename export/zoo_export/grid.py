"""The grid of inputs on which an export is compared, made from the declared graphs alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from zoo.contract import Graph, TensorSpec, dim_size

__all__ = ["Feeds", "Point", "make_feeds", "make_grid"]

Feeds = Mapping[str, "np.ndarray[Any, Any]"]
Padding = Literal["none", "left", "right", "empty row"]

BATCHES = (1, 2, 5)
ODD = 7
PAST = 3
DEFAULT_MAX = 64
CHEAP, WORK = 1e9, 1.6e11
"""Parameters times tokens: points below the first are always compared; expensive ones may add up to the second."""


@dataclass(frozen=True, slots=True)
class Point:
    """One input: ``past`` tokens in a first call, ``length`` in a second, which is compared."""

    batch: int
    length: int
    past: int
    padding: Padding

    @property
    def tokens(self) -> int:
        """Tokens of the whole batch, past and padding included."""
        return self.batch * (self.length + self.past)

    def __str__(self) -> str:
        return f"batch {self.batch}, length {self.length}, past {self.past}, padding {self.padding}"

    def to_dict(self) -> dict[str, Any]:
        """For parity.json."""
        return asdict(self)


def make_grid(graphs: Sequence[Graph], max_length: int, parameters: int, *, whole: bool) -> tuple[list[Point], int]:
    """The points to compare, and how many of the whole grid are left out.

    The whole grid is batch {1, 2, 5} x length {1, 7, longest} x past {0, 3 or all but length} x padding {none, left,
    right, and one row that is padding alone}. Where the longest length costs a large model minutes, the standard grid
    keeps one point there, with a past and padding, and others that add something new as far as ``WORK`` allows.
    """
    has_mask = any(tensor.is_mask for graph in graphs for tensor in graph.input_tensors())
    has_past = any(graph.past for graph in graphs)
    paddings: tuple[Padding, ...] = ("none", "left", "right", "empty row") if has_mask else ("none",)
    free = {name for graph in graphs for name in graph.dim_names()} - {"batch"}
    lengths = sorted({1, min(ODD, max_length), max_length}) if free else [1]
    points = []
    for batch, length, past, padding in itertools.product(BATCHES, lengths, (0, 1) if has_past else (0,), paddings):
        past_length = min(PAST, max_length - 1) if past else 0
        point = Point(batch, min(length, max_length - past_length), past_length, padding)
        if not (padding == "empty row" and batch == 1) and point not in points:
            points.append(point)
    if whole:
        return points, 0
    kept = [point for point in points if point.tokens * parameters <= CHEAP or point.length <= ODD]
    rest = sorted(
        (p for p in points if p not in kept),
        key=lambda p: (p.tokens, -p.past, paddings.index(p.padding) != 1),
    )
    work, seen = 0.0, set[object]()
    for point in rest:
        news = {("past", point.past), ("padding", point.padding)} - seen
        if not seen or (news and work + point.tokens * parameters <= WORK):
            kept.append(point)
            work += point.tokens * parameters
            seen |= news
    return [point for point in points if point in kept], len(points) - len(kept)


def make_feeds(
    graphs: Sequence[Graph], point: Point, seed: int, max_length: int, *, other: int | None = None
) -> dict[str, np.ndarray[Any, Any]]:
    """Inputs for the whole sequence, ``past + length`` tokens, of every graph that no earlier graph computes.

    Lengths other than ``sequence``, such as the source's, are ``other``. By default they differ from it by one and stay
    within ``max_length``.
    """
    rng = np.random.default_rng([seed, point.batch, point.length, point.past, len(point.padding)])
    feeds: dict[str, np.ndarray[Any, Any]] = {}
    known = {tensor.name for graph in graphs for tensor in graph.output_tensors()}
    total = point.length + point.past
    if other is None:  # a second length must not be taken for the first
        other = total + 1 if total < max_length else max(1, total - 1)
    for graph in graphs:
        past = {tensor.name for tensor in graph.past.tensors()} if graph.past else set()
        sizes = dict.fromkeys(graph.dim_names(), other) | {"batch": point.batch, "sequence": total}
        if graph.past:
            sizes[graph.past.length] = 0
        for tensor in graph.input_tensors():
            if tensor.name not in feeds and tensor.name not in known and tensor.name not in past:
                feeds[tensor.name] = _make_tensor(tensor, tensor.shape(sizes), point, rng)
    return feeds


def _make_tensor(
    tensor: TensorSpec, shape: tuple[int, ...], point: Point, rng: np.random.Generator
) -> np.ndarray[Any, Any]:
    if tensor.is_mask:
        return _make_mask(shape, point)
    if tensor.dtype == "int64":
        return rng.integers(0, tensor.upper or 2, shape, dtype=np.int64)
    return rng.standard_normal(shape)


def _make_mask(shape: tuple[int, ...], point: Point) -> np.ndarray[Any, Any]:
    """Rows padded by ever more, from none in the first of several to all but one token."""
    batch, length = shape
    mask = np.ones(shape, dtype=np.int64)
    if point.padding == "empty row":
        mask[batch // 2] = 0
    elif point.padding != "none":
        for row in range(batch):
            padded = length // 2 if batch == 1 else (length - 1) * row // (batch - 1)
            if point.padding == "left":
                mask[row, :padded] = 0
            else:
                mask[row, length - padded :] = 0
    return mask


def slice_feeds(graph: Graph, feeds: Feeds, start: int, stop: int) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """The inputs of a call on tokens ``start`` to ``stop``, the ``start`` before them being past."""
    past_length = graph.past.length if graph.past else None
    for tensor in graph.input_tensors():
        if tensor.name not in feeds:
            continue
        value = feeds[tensor.name]
        for axis, dim in enumerate(tensor.dims):
            before = (slice(None),) * axis
            if dim == "sequence":
                value = value[(*before, slice(start, stop))]
            elif past_length and dim == f"{past_length} + sequence":
                value = value[(*before, slice(stop))]
        yield tensor.name, value


def empty_past(graph: Graph, batch: int, dtype: np.dtype[Any]) -> dict[str, np.ndarray[Any, Any]]:
    """A past of no tokens."""
    if graph.past is None:
        return {}
    sizes = {"batch": batch, graph.past.length: 0}
    return {
        tensor.name: np.zeros([dim_size(dim, sizes) for dim in tensor.dims], dtype) for tensor in graph.past.tensors()
    }


def next_past(graph: Graph, outputs: Mapping[str, Any]) -> dict[str, Any]:
    """The past of the next call, from this call's present."""
    if graph.past is None:
        return {}
    pairs = zip(graph.past.tensors(), graph.present_tensors(), strict=True)
    return {past.name: outputs[present.name] for past, present in pairs}
