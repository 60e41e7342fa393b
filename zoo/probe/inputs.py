"""The inputs for comparing an export with its model, generated from the declared graphs for a point of a grid."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from zoo.arrays import Array
from zoo.contract import Graph, Size, TensorSpec, fit_sizes, row_sizes, sizes_of
from zoo.probe.dtypes import dtype_of

__all__ = [
    "SMALL_VOCABULARY",
    "Feeds",
    "Padding",
    "Point",
    "empty_past",
    "given_inputs",
    "make_feeds",
    "next_past",
    "powers",
    "slice_feeds",
    "whole_blocks",
]

Feeds = Mapping[str, Array]
Padding = Literal["none", "left", "right", "empty row"]
Values = Literal["finite", "NaN", "infinity", "powers"]

SMALL_VOCABULARY = 16
"""Size of a vocabulary up to which random ids contain all of them."""

_SIDES = 8
"""Number of sizes of an image's side beside a text: with one for each length, images would be far larger than texts."""
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


def powers(upper: int) -> list[int]:
    """Return the powers of 2 and 10 and their neighbours below an upper limit."""
    powers = {base**exponent for base in (2, 10) for exponent in range(upper.bit_length() + 1)}
    return sorted({near for power in powers for near in (power - 1, power, power + 1) if near < upper})


def given_inputs(graphs: Sequence[Graph]) -> dict[str, TensorSpec]:
    """Return the inputs by name that are neither outputs of a graph nor a past."""
    computed = {tensor.name for graph in graphs for tensor in graph.output_tensors()}
    computed |= {tensor.name for graph in graphs for tensor in graph.past_tensors()}
    return {tensor.name: tensor for graph in graphs for tensor in graph.input_tensors() if tensor.name not in computed}


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
            as ``max_length`` allows; the sides of images beside texts have 8 sizes. Lengths whose sizes are declared
            have the nearest allowed size, and their largest beside a longest row.
        special: token ids to place among the random ones, beside the first four and the last of a vocabulary.
        fixed: the sizes of dimensions that have only one.
    """
    rng = np.random.default_rng([seed, point.batch, point.length, point.past, len(point.padding)])
    feeds: dict[str, Array] = {}
    tensors = given_inputs(graphs)
    total = point.length + point.past
    if other is None and not any("sequence" in graph.dim_names() for graph in graphs):
        other = total
    elif other is None:  # different, so that confusing the two lengths shows
        other = total + 1 if total < max_length and total != 2 else max(1, total - 1)  # 1 beside 2
    others: dict[str, int] = {}
    declared, rows, sides = sizes_of(graphs), row_sizes(graphs, point.batch), _sides_beside_texts(graphs)
    for graph in graphs:
        lengths = {graph.past_length} if graph.past_length else set()
        for name in graph.dim_names():
            if name not in {*rows, "sequence", *lengths}:
                allowed = declared.get(name, Size())
                largest = allowed.max if total == max_length else None
                steps = (other - 1 + len(others)) % (_SIDES if name in sides else max(max_length, other))
                others.setdefault(name, largest or allowed.min + allowed.multiple_of * steps)
        sizes = {**others, **rows, "sequence": total, **dict.fromkeys(lengths, 0)}
        sizes = {**fit_sizes(graphs, sizes), **fixed}
        for tensor in graph.input_tensors():
            if tensor.name in tensors and tensor.name not in feeds:
                least = declared.get(str(tensor.dims[-1]), Size()).min if tensor.is_mask else 1
                feeds[tensor.name] = _make_tensor(tensor, tensor.shape(sizes), point, rng, special, least)
    return feeds


def _sides_beside_texts(graphs: Sequence[Graph]) -> set[str]:
    """Return the free dimensions of inputs that have several of declared sizes, as images have, if there are texts."""
    if not any("sequence" in graph.dim_names() for graph in graphs):
        return set()
    declared = sizes_of(graphs)
    free = [declared.keys() & {*tensor.dims} for graph in graphs for tensor in graph.input_tensors()]
    return {str(name) for names in free if len(names) > 1 for name in names}


def _make_tensor(
    tensor: TensorSpec,
    shape: tuple[int, ...],
    point: Point,
    rng: np.random.Generator,
    special: Sequence[int],
    least: int,
) -> Array:
    if tensor.is_mask:
        return _make_mask(shape, point, least).astype(tensor.dtype, copy=False)
    if not tensor.is_float:
        values = rng.integers(0, tensor.upper or 2, shape, dtype=np.int64)
        if tensor.is_blocks:
            return whole_blocks(values, [point.past] if point.past else [])
        if tensor.upper is not None and tensor.upper > SMALL_VOCABULARY:
            _place(values.reshape(-1), {*range(4), tensor.upper - 1, *special}, tensor.upper, rng)
            if point.values == "powers":
                values = np.resize(powers(tensor.upper), shape)
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
    order = rng.permutation(special)
    places = rng.permutation(values.size)[: -(-values.size // share)]
    values[places] = np.resize(order, places.size)


def _make_mask(shape: tuple[int, ...], point: Point, least: int) -> Array:
    """Build a mask whose padding grows from row to row, from none to all but the least; a single row is half padded."""
    batch, length = shape
    mask = np.ones(shape, dtype=np.int64)
    if point.padding == "empty row":
        mask[batch // 2] = 0
    elif point.padding != "none":
        for row in range(batch):
            padded = min(length // 2, length - least) if batch == 1 else (length - least) * row // (batch - 1)
            if point.padding == "left":
                mask[row, :padded] = 0
            else:
                mask[row, length - padded :] = 0
    return mask


def whole_blocks(numbers: Array, cuts: Sequence[int]) -> Array:
    """Return numbers of blocks, (B, T), of which no block is in two calls: in each row, those of one call are kept.

    ``cuts`` are the places at which calls begin, but for the first. The last call is kept in the first row, the first
    call in the next, and so on.
    """
    rows, length = numbers.shape
    calls = np.searchsorted(cuts, np.arange(length), side="right")
    kept = (np.arange(rows) + len(cuts)) % (len(cuts) + 1)
    return np.where(calls == kept[:, None], numbers, 0)


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
