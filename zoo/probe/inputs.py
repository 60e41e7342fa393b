"""The grid of inputs for comparing an export with its model, generated from the declared graphs."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from zoo.arrays import Array
from zoo.config import Settings
from zoo.contract import Graph, Size, TensorSpec, fit_sizes, row_sizes, rows_of, sizes_of, standard_fields
from zoo.probe.dtypes import dtype_of

__all__ = [
    "CHEAP",
    "DEFAULT_MAX",
    "MAGNITUDES",
    "ODD",
    "PAST",
    "WORK",
    "Feeds",
    "Padding",
    "Point",
    "at_magnitudes",
    "at_non_finite",
    "at_powers",
    "empty_past",
    "given_inputs",
    "is_affordable",
    "is_long",
    "longest_length",
    "make_feeds",
    "make_grid",
    "next_past",
    "slice_feeds",
]

Feeds = Mapping[str, Array]
Padding = Literal["none", "left", "right", "empty row"]
Values = Literal["finite", "NaN", "infinity", "powers"]

BATCHES = (1, 2, 5)
ODD = 7
PAST = 3
DEFAULT_MAX = 64
_FEW = 16
"""Size of a vocabulary up to which random ids contain all of them."""
CHEAP, LONG, WORK = 1e9, 2e10, 1.6e11
"""Costs as parameters times tokens. Points up to ``CHEAP`` are always compared; the others may add up to ``WORK``.
Those beyond ``LONG`` are compared at one level of optimisation."""
_READ = 16
"""Number of tokens up to which a call takes as long as reading the weights does."""
MAGNITUDES = ((0.0, 100.0), (100.0, 1.0), (-1000.0, 100.0))
"""Means and deviations of floating-point inputs, beside 0 and 1. Exponentials of the first overflow in float32; in a
variance of the second, computed as a difference of squares, few digits are left; the third are large and negative, as
in computed tomography, and their squares overflow in float16."""

SPECIAL = (0.0, -0.0, 1.0, -1.0)
"""Floating-point inputs among the random ones: features and pixels are often exactly zero, and the sign of a zero
decides the result of functions such as ``atan2``."""


@dataclass(frozen=True, slots=True)
class Point:
    """One input of the grid: ``past`` tokens in a first call, then ``length`` tokens in a second, compared one."""

    batch: int
    length: int
    past: int
    padding: Padding
    mean: float = 0.0
    deviation: float = 1.0
    """Of floating-point inputs, which are normally distributed."""
    values: Values = "finite"
    """``NaN`` or ``infinity``: what floating-point inputs contain, at every eighth number of a row and all of the next.
    ``powers``: integers are the powers of 2 and 10 and their neighbours."""

    @property
    def tokens(self) -> int:
        """Number of tokens in the whole batch, past and padding included."""
        return self.batch * (self.length + self.past)

    def __str__(self) -> str:
        sizes = f"batch {self.batch}, length {self.length}, past {self.past}, padding {self.padding}"
        if self.values != "finite":
            what = "powers of 2 and 10" if self.values == "powers" else self.values
            return f"{sizes}, inputs with {what}"
        return sizes if self.is_standard else f"{sizes}, inputs of mean {self.mean:g} and deviation {self.deviation:g}"

    @property
    def is_standard(self) -> bool:
        """Whether floating-point inputs are finite, with mean 0 and deviation 1."""
        return (self.mean, self.deviation, self.values) == (0, 1, "finite")

    def to_dict(self) -> dict[str, Any]:
        """Return the entry for parity.json; mean and deviation are left out if they are 0 and 1."""
        facts = asdict(self)
        if self.values == "finite":
            del facts["values"]
        return {key: facts[key] for key in ("batch", "length", "past", "padding")} if self.is_standard else facts


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
    long as a window. For large models,
    where points of the longest length take minutes, the standard grid keeps one of them, with a past and padding, and
    others that add a new kind of past or padding, up to ``WORK``; and short points have one batch size each.
    ``fixed`` has the sizes of dimensions that have only one. The batch is that of the first dimension of rows; see
    :func:`zoo.contract.row_sizes` for others. A single token has no padding but that of the
    whole row.
    """
    has_mask = any(tensor.is_mask for graph in graphs for tensor in graph.input_tensors())
    has_past = any(graph.pasts for graph in graphs)
    paddings: tuple[Padding, ...] = ("none", "left", "right", "empty row") if has_mask else ("none",)
    free = {name for graph in graphs for name in graph.dim_names()} - {*rows_of(graphs)}
    own = {"sequence", *(name for graph in graphs if graph.pasts for name in (graph.past_length, graph.total_length))}
    others = free - own  # lengths that differ from that of a point
    allowed = sizes_of(graphs).get("sequence", Size())
    lengths = sorted({allowed.min, min(allowed.min - 1 + ODD, max_length), max_length}) if free else [1]
    lengths = [fixed["sequence"]] if "sequence" in fixed else lengths
    first = rows_of(graphs)[0]
    batches = (fixed[first],) if first in fixed else BATCHES
    points = []
    for batch, length, past, padding in itertools.product(batches, lengths, (0, 1) if has_past else (0,), paddings):
        past_length = min(PAST, max_length - 1) if past else 0
        point = Point(batch, allowed.nearest(min(length, max_length - past_length)), past_length, padding)
        if not (padding == "empty row" and batch == 1):
            points.append(point)
    unusual = list(_unusual_points(max_length, has_past, paddings, allowed)) if free and not fixed else []
    unusual += _points_at_windows(graphs, max_length, paddings) if not fixed else []
    if not others:  # one token has no padding beside it
        points, unusual = ([p for p in some if not _is_one_padded_token(p)] for some in (points, unusual))
    points = list(dict.fromkeys(points))
    unusual = [point for point in dict.fromkeys(unusual) if point not in points]
    points += unusual
    if whole:
        return points, 0
    short = [point for point in points if is_affordable(point, parameters)]
    one_batch = _one_batch_each(short)
    kept = [p for p in short if max(p.tokens, _READ) * parameters <= CHEAP or p in one_batch or p in unusual]
    rest = sorted(
        (p for p in points if p not in short and p not in unusual),
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


def _is_one_padded_token(point: Point) -> bool:
    return point.length + point.past == 1 and point.padding in ("left", "right")


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


def _unusual_points(longest: int, has_past: bool, paddings: Sequence[Padding], allowed: Size) -> Iterator[Point]:
    """Yield points with a larger batch, other lengths, and other pasts: what a special case in a model may miss."""
    left, right = paddings[1:3] if len(paddings) > 1 else ("none", "none")
    half = longest // 2
    shapes: list[tuple[int, int, int, Padding]] = [
        (7, 2, 0, right),
        (1, half + 1, 0, "none"),
        (2, longest - 1, 0, left),
    ]
    if has_past:
        shapes += [(1, 1, longest - 1, "none"), (2, 2, half, left), (1, 1, half - 1, "none"), (6, 1, 1, left)]
    for batch, length, past, padding in shapes:
        past = max(0, min(past, longest - 1))
        yield Point(batch, allowed.nearest(max(1, min(length, longest - past))), past, padding)


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
    given = given_inputs(graphs)
    tensors = [given[name] for name in given.keys() & {*names} if (given[name].upper or 0) > _FEW]
    if not tensors:
        return []
    rows = {*rows_of(graphs)}
    have_length = all(any(isinstance(dim, str) and dim not in rows for dim in tensor.dims) for tensor in tensors)
    allowed = sizes_of(graphs).get("sequence", Size())
    length = allowed.nearest(min(DEFAULT_MAX, longest) if have_length else allowed.min)
    number = max(len(_powers(tensor.upper or 0)) for tensor in tensors)
    return [Point(-(-number // (length if have_length else 1)), length, 0, "none", values="powers")]


def _powers(upper: int) -> list[int]:
    """Return the powers of 2 and 10 and their neighbours below an upper limit."""
    powers = {base**exponent for base in (2, 10) for exponent in range(upper.bit_length() + 1)}
    return sorted({near for power in powers for near in (power - 1, power, power + 1) if near < upper})


def _points_at_windows(graphs: Sequence[Graph], longest: int, paddings: Sequence[Padding]) -> list[Point]:
    """Return points with a past that is just too short to fill a window, that fills it, and that is longer."""
    left, right = paddings[1:3] if len(paddings) > 1 else ("none", "none")
    kept = sorted({count for graph in graphs for count in graph.kept_lengths().values()})
    shapes: list[tuple[int, int, int, Padding]] = []
    for count in kept:
        shapes += [(1, 2, count - 1, "none"), (2, 1, count, left), (2, 2, count + 1, right), (2, ODD, count + 2, left)]
    return [Point(*shape) for shape in shapes if shape[2] > 0 and shape[1] + shape[2] <= longest]


def given_inputs(graphs: Sequence[Graph]) -> dict[str, TensorSpec]:
    """Return the inputs by name that are neither outputs of a graph nor a past."""
    made = {tensor.name for graph in graphs for tensor in graph.output_tensors()}
    made |= {tensor.name for graph in graphs for tensor in graph.past_tensors()}
    return {tensor.name: tensor for graph in graphs for tensor in graph.input_tensors() if tensor.name not in made}


def make_feeds(
    graphs: Sequence[Graph],
    point: Point,
    seed: int,
    max_length: int,
    *,
    other: int | None = None,
    special: Sequence[int] = (),
    fixed: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Array]:
    """Generate the inputs of all graphs that are not outputs of earlier graphs, for all ``past + length`` tokens.

    Args:
        graphs: the declared graphs.
        point: batch size, lengths, padding and magnitude.
        seed: seed of the random values.
        max_length: the largest length of a row.
        other: size of the first length other than ``sequence``, such as the source's; by default it differs from it by
            one, or is the number of tokens if there is no ``sequence``. Further lengths differ from each other, as far
            as ``max_length`` allows. Lengths whose sizes are declared have the nearest allowed size, and their largest
            beside a longest row.
        special: token ids to place among the random ones, beside the first four and the last of a vocabulary.
        fixed: the sizes of dimensions that have only one.
    """
    rng = np.random.default_rng([seed, point.batch, point.length, point.past, len(point.padding)])
    feeds: dict[str, Array] = {}
    given = given_inputs(graphs)
    total = point.length + point.past
    if other is None and not any("sequence" in graph.dim_names() for graph in graphs):
        other = total
    elif other is None:  # different, so that confusing the two lengths shows
        other = total + 1 if total < max_length and total != 2 else max(1, total - 1)  # 1 beside 2
    others: dict[str, int] = {}
    declared, rows = sizes_of(graphs), row_sizes(graphs, point.batch)
    for graph in graphs:
        lengths = {graph.past_length} if graph.past_length else set()
        for name in graph.dim_names():
            if name not in {*rows, "sequence", *lengths}:
                allowed = declared.get(name, Size())
                largest = allowed.max if total == max_length else None
                steps = (other - 1 + len(others)) % max(max_length, other)
                others.setdefault(name, largest or allowed.min + allowed.multiple_of * steps)
        sizes = {**others, **rows, "sequence": total, **dict.fromkeys(lengths, 0)}
        sizes = {**fit_sizes(graphs, sizes), **fixed}
        for tensor in graph.input_tensors():
            if tensor.name in given and tensor.name not in feeds:
                feeds[tensor.name] = _make_tensor(tensor, tensor.shape(sizes), point, rng, special)
    return feeds


def _make_tensor(
    tensor: TensorSpec, shape: tuple[int, ...], point: Point, rng: np.random.Generator, special: Sequence[int]
) -> Array:
    if tensor.is_mask:
        return _make_mask(shape, point).astype(tensor.dtype, copy=False)
    if not tensor.is_float:
        values = rng.integers(0, tensor.upper or 2, shape, dtype=np.int64)
        if tensor.upper is not None and tensor.upper > _FEW:
            _place(values.reshape(-1), {*range(4), tensor.upper - 1, *special}, tensor.upper, rng)
            if point.values == "powers":
                values = np.resize(_powers(tensor.upper), shape)
        return values.astype(tensor.dtype, copy=False)
    numbers = point.mean + point.deviation * rng.standard_normal(shape)
    if (point.mean, point.deviation) == (0, 1):
        _replace(numbers.reshape(-1), SPECIAL, 8, rng)
    if point.values in ("NaN", "infinity"):
        missing = (np.nan,) if point.values == "NaN" else (np.inf, -np.inf)
        for row, share in ((0, 8), (1, 1)):
            if row < max(1, len(numbers) - 1) and numbers[row].size:
                _replace(numbers[row : row + 1].reshape(-1), missing, share, rng)  # a view
    return numbers


def _place(values: Array, special: Iterable[int], upper: int, rng: np.random.Generator) -> None:
    """Replace a third of token ids by special ones, each as often as the others."""
    _replace(values, sorted(number for number in special if 0 <= number < upper), 3, rng)


def _replace(values: Array, special: Sequence[float], share: int, rng: np.random.Generator) -> None:
    """Replace one in ``share`` values by special ones, each as often as the others."""
    chosen = rng.permutation(special)
    places = rng.permutation(values.size)[: -(-values.size // share)]
    values[places] = np.resize(chosen, places.size)


def _make_mask(shape: tuple[int, ...], point: Point) -> Array:
    """Build a mask whose padding grows from row to row, from none to all but one token; a single row is half padded."""
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


def slice_feeds(graph: Graph, feeds: Feeds, start: int, stop: int) -> Iterator[tuple[str, Array]]:
    """Yield the inputs of a call on tokens ``start`` to ``stop``, with the tokens before ``start`` as past."""
    for tensor in graph.input_tensors():
        if tensor.name not in feeds:
            continue
        value = feeds[tensor.name]
        for axis, dim in enumerate(tensor.dims):
            before = (slice(None),) * axis
            if dim == "sequence":
                value = value[(*before, slice(start, stop))]
            elif dim == graph.total_length:
                value = value[(*before, slice(stop))]
        yield tensor.name, value


def empty_past(graph: Graph, batch: int, dtype: np.dtype[Any]) -> dict[str, Array]:
    """Return a past without tokens: keys and values of no tokens, and states of zeros."""
    sizes = {"batch": batch, str(graph.past_length): 0}
    return {tensor.name: np.zeros(tensor.shape(sizes), dtype_of(tensor, dtype)) for tensor in graph.past_tensors()}


def next_past(graph: Graph, outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the past of the next call: this call's present under the past's names."""
    return {past.name: outputs[present.name] for past, present in graph.past_pairs()}
