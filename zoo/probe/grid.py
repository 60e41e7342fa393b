"""The grid of points at which an export is compared with its model: batch sizes, lengths, pasts and padding."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from zoo.config import Settings
from zoo.contract import Graph, Size, rows_of, sizes_of, standard_fields
from zoo.probe.inputs import SMALL_VOCABULARY, Padding, Point, given_inputs, powers

__all__ = [
    "CHEAP",
    "DEFAULT_MAX",
    "MAGNITUDES",
    "ODD",
    "PAST",
    "WORK",
    "at_magnitudes",
    "at_non_finite",
    "at_powers",
    "is_affordable",
    "is_long",
    "longest_length",
    "make_grid",
]

BATCHES = (1, 2, 5)
ODD = 7
"""A length that is no power of two, of which kernels process the last tokens apart."""
PAST = 3
"""Number of tokens of a short past."""
DEFAULT_MAX = 64
"""The largest length of a model without a limit."""
CHEAP, LONG, WORK = 1e9, 2e10, 1.6e11
"""Costs as parameters times tokens. Points up to ``CHEAP`` are always compared; the others may add up to ``WORK``.
Those beyond ``LONG`` are compared at one level of optimisation."""
_READ = 16
"""Number of tokens up to which a call takes as long as reading the weights does."""
MAGNITUDES = ((0.0, 100.0), (100.0, 1.0), (-1000.0, 100.0))
"""Means and deviations of floating-point inputs, beside 0 and 1. Exponentials of the first overflow in float32; in a
variance of the second, computed as a difference of squares, few digits are left; the third are large and negative, as
in computed tomography, and their squares overflow in float16."""


def longest_length(config: Settings, graphs: Iterable[Graph]) -> int:
    """Return the number of tokens of the longest inputs at which a model is run.

    This is ``max_seq_len`` of the configuration, or else enough for the declared sizes and at least ``DEFAULT_MAX``.
    """
    limit = standard_fields(config).max_seq_len
    if limit is not None:
        return limit
    sizes = sizes_of(graphs).values()
    return max([DEFAULT_MAX, *(size.nearest(size.max or 4 * max(size.min, size.multiple_of)) for size in sizes)])


def make_grid(
    graphs: Sequence[Graph],
    max_length: int,
    parameters: int,
    *,
    whole: bool,
    fixed: Mapping[str, int] = MappingProxyType({}),
) -> tuple[list[Point], int]:
    """Return the points to compare, and the number of points of the whole grid that are left out.

    The whole grid is batch {1, 2, 5} x length {1, 7, longest} x past {0, 3 or all but length} x padding {none, left,
    right, and one row of padding only}, and a few larger batches, longer pasts and other lengths, and pasts about as
    long as a window. For large models, where points of the longest length take minutes, the standard grid keeps one of
    them, with a past and padding, and others that add a new kind of past or padding, up to ``WORK``; and short points
    have one batch size each. A single token has no padding but that of the whole row.

    Args:
        graphs: the declared graphs.
        max_length: the largest length of a row, past included.
        parameters: the number of parameters, to which the cost of a token is proportional.
        whole: keep all points, whatever they cost.
        fixed: the sizes of dimensions that have only one. The batch is that of the first dimension of rows; see
            :func:`zoo.contract.row_sizes` for others.
    """
    axes = _axes(graphs, max_length, fixed)
    points = _product(axes)
    unusual = [] if fixed else [*_unusual_points(axes), *_points_at_windows(graphs, axes)]
    if not axes.has_other_lengths:  # one token has no padding beside it
        points = [point for point in points if not _is_one_padded_token(point)]
        unusual = [point for point in unusual if not _is_one_padded_token(point)]
    points = list(dict.fromkeys(points))
    unusual = [point for point in dict.fromkeys(unusual) if point not in points]
    points += unusual
    if whole:
        return points, 0
    selected = _selected(points, unusual, parameters, axes.paddings)
    return selected, len(points) - len(selected)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Axes:
    """What the points of a grid may have."""

    batches: Sequence[int]
    lengths: Sequence[int]
    longest: int
    """The largest length, past included."""
    allowed: Size
    """The sizes that a length may have."""
    has_past: bool
    paddings: tuple[Padding, ...]
    has_free_lengths: bool
    has_other_lengths: bool
    """Whether there are lengths that differ from that of a point, such as that of a source."""

    @property
    def sides(self) -> tuple[Padding, Padding]:
        """Padding on the left and on the right, or none of both."""
        return ("left", "right") if len(self.paddings) > 1 else ("none", "none")


def _axes(graphs: Sequence[Graph], max_length: int, fixed: Mapping[str, int]) -> _Axes:
    has_mask = any(tensor.is_mask for graph in graphs for tensor in graph.input_tensors())
    free = {name for graph in graphs for name in graph.dim_names()} - {*rows_of(graphs)}
    of_points = {name for graph in graphs if graph.pasts for name in (graph.past_length, graph.total_length)}
    allowed = sizes_of(graphs).get("sequence", Size())
    lengths = sorted({allowed.min, min(allowed.min - 1 + ODD, max_length), max_length}) if free else [1]
    rows = rows_of(graphs)[0]
    return _Axes(
        batches=(fixed[rows],) if rows in fixed else BATCHES,
        lengths=[fixed["sequence"]] if "sequence" in fixed else lengths,
        longest=max_length,
        allowed=allowed,
        has_past=any(graph.pasts for graph in graphs),
        paddings=("none", "left", "right", "empty row") if has_mask else ("none",),
        has_free_lengths=bool(free),
        has_other_lengths=bool(free - {"sequence", *of_points}),
    )


def _product(axes: _Axes) -> list[Point]:
    """Return the points of every batch size with every length, past and padding."""
    points = []
    pasts = (0, min(PAST, axes.longest - 1)) if axes.has_past else (0,)
    for batch, length, past, padding in itertools.product(axes.batches, axes.lengths, pasts, axes.paddings):
        if not (padding == "empty row" and batch == 1):
            points.append(Point(batch, axes.allowed.nearest(min(length, axes.longest - past)), past, padding))
    return points


def _is_one_padded_token(point: Point) -> bool:
    return point.length + point.past == 1 and point.padding in ("left", "right")


def _selected(
    points: Sequence[Point], unusual: Collection[Point], parameters: int, paddings: Sequence[Padding]
) -> list[Point]:
    """Return the points to compare of a model of this size, in the same order."""
    short = [point for point in points if is_affordable(point, parameters)]
    one_batch = _one_batch_each(short)
    selected = {
        point
        for point in short
        if max(point.tokens, _READ) * parameters <= CHEAP or point in one_batch or point in unusual
    }
    # Of the expensive points, the cheapest of all, and each that adds a kind of past or padding while work is left.
    expensive = sorted(
        (point for point in points if point not in short and point not in unusual),
        key=lambda point: (point.tokens, -point.past, paddings.index(point.padding) != 1),
    )
    work, seen = 0.0, set[object]()
    for point in expensive:
        kinds = {("past", point.past), ("padding", point.padding)}
        if not seen or (kinds - seen and work + point.tokens * parameters <= WORK):
            selected.add(point)
            work += point.tokens * parameters
            seen |= kinds
    return [point for point in points if point in selected]


def is_affordable(point: Point, parameters: int) -> bool:
    """Return whether a point costs little, or is as small as points can be for a large model."""
    return point.tokens * parameters <= CHEAP or point.length + point.past <= ODD + PAST


def is_long(point: Point, parameters: int) -> bool:
    """Return whether a point takes so long that it is compared with optimisations alone."""
    return not is_affordable(point, parameters) and point.tokens * parameters > LONG


def _one_batch_each(points: Sequence[Point]) -> list[Point]:
    """Return, of the points that differ in their batch size alone, one each: a small batch if it has all else."""
    groups: dict[object, list[Point]] = {}
    for point in points:
        groups.setdefault((point.length, point.past, point.padding), []).append(point)
    if len(groups) < len(BATCHES):  # images
        return [*points]
    return [
        min(group, key=lambda point: abs(point.batch - 2))
        if group[0].past and group[0].length > 1
        else group[(number + number // len(BATCHES)) % len(group)]
        for number, group in enumerate(groups.values())
    ]


def _unusual_points(axes: _Axes) -> Iterator[Point]:
    """Yield points with a larger batch, other lengths, and other pasts: what a special case in a model may miss."""
    if not axes.has_free_lengths:
        return
    left, right = axes.sides
    half = axes.longest // 2
    shapes: list[tuple[int, int, int, Padding]] = [
        (7, 2, 0, right),
        (1, half + 1, 0, "none"),
        (2, axes.longest - 1, 0, left),
    ]
    if axes.has_past:
        shapes += [(1, 1, axes.longest - 1, "none"), (2, 2, half, left), (1, 1, half - 1, "none"), (6, 1, 1, left)]
    for batch, length, past, padding in shapes:
        past = max(0, min(past, axes.longest - 1))
        yield Point(batch, axes.allowed.nearest(max(1, min(length, axes.longest - past))), past, padding)


def _points_at_windows(graphs: Sequence[Graph], axes: _Axes) -> list[Point]:
    """Return points with a past that is just too short to fill a window, that fills it, and that is longer."""
    left, right = axes.sides
    shapes: list[tuple[int, int, int, Padding]] = []
    for count in sorted({count for graph in graphs for count in graph.kept_lengths().values()}):
        shapes += [(1, 2, count - 1, "none"), (2, 1, count, left), (2, 2, count + 1, right), (2, ODD, count + 2, left)]
    return [Point(*shape) for shape in shapes if shape[2] > 0 and shape[1] + shape[2] <= axes.longest]


def at_magnitudes(graphs: Sequence[Graph], point: Point) -> list[Point]:
    """Return a point with floating-point inputs of each of ``MAGNITUDES``, or nothing if no graph is given any."""
    if not any(tensor.is_float for tensor in given_inputs(graphs).values()):
        return []
    return [replace(point, mean=mean, deviation=deviation) for mean, deviation in MAGNITUDES]


def at_non_finite(graphs: Sequence[Graph], point: Point, fixed: Mapping[str, int]) -> list[Point]:
    """Return a point with NaN and one with infinity, or nothing if no graph is given floating-point inputs.

    They have no padding and, if the size is not fixed, at least one row of finite numbers.
    """
    if not any(tensor.is_float for tensor in given_inputs(graphs).values()):
        return []
    rows = point.batch if rows_of(graphs)[0] in fixed else max(3, point.batch)
    plain = replace(point, batch=rows, padding="none")
    return [replace(plain, values="NaN"), replace(plain, values="infinity")]


def at_powers(graphs: Sequence[Graph], names: Collection[str], longest: int) -> list[Point]:
    """Return a point at which the inputs ``names`` have all powers of 2 and 10 and their neighbours."""
    inputs = given_inputs(graphs)
    tensors = [inputs[name] for name in inputs.keys() & {*names} if (inputs[name].upper or 0) > SMALL_VOCABULARY]
    if not tensors:
        return []
    rows = {*rows_of(graphs)}
    have_length = all(any(isinstance(dim, str) and dim not in rows for dim in tensor.dims) for tensor in tensors)
    allowed = sizes_of(graphs).get("sequence", Size())
    length = allowed.nearest(min(DEFAULT_MAX, longest) if have_length else allowed.min)
    number = max(len(powers(tensor.upper or 0)) for tensor in tensors)
    return [Point(-(-number // (length if have_length else 1)), length, 0, "none", values="powers")]
