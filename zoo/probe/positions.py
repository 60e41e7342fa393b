"""Positions of outputs that are compared, given padding and size, and checks of output shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.contract import Dim, Graph, TensorSpec, dim_names, dim_size, is_quotient
from zoo.errors import ParityError
from zoo.probe.inputs import Feeds, Point

__all__ = ["KEPT", "Kept", "check_shape", "kept_positions", "valid_positions"]

KEPT = 128
"""Number of positions at which a large output is compared."""
_LARGE = 2**24
"""Number of elements from which an output is large: 334 tokens with a vocabulary of 50,257."""


def check_shape(graph: Graph, tensor: TensorSpec, shape: tuple[int, ...], feeds: Feeds, point: Point) -> None:
    """Raise :class:`ParityError` unless an output has its declared dimensions, which those of the inputs determine."""
    sizes = _sizes(graph, feeds, point)
    declared = tuple(_size(dim, sizes) for dim in tensor.dims)
    if None in declared:
        dim = tensor.dims[declared.index(None)]
        raise ParityError(f"{tensor.name} of graph {graph.name!r} declares the dimension {dim!r}, which no input has")
    if declared != shape:
        dims = ", ".join(map(str, tensor.dims))
        stated = ", ".join(f"{name} {size}" for name, size in sizes.items() if name in graph.dim_names())
        raise ParityError(
            f"{tensor.name} of graph {graph.name!r} has shape {shape}, but declares ({dims}), which is {declared} for "
            f"{stated}"
        )


@dataclass(frozen=True)
class Kept:
    """The positions at which a large output is compared."""

    axis: int
    """The length along which they lie."""
    whole: tuple[int, ...]
    """The shape of the complete output."""
    places: Array
    """The positions, sorted."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is kept."""
        return (*self.whole[: self.axis], len(self.places), *self.whole[self.axis + 1 :])


def kept_positions(graph: Graph, tensor: TensorSpec, feeds: Feeds, point: Point) -> Kept | None:
    """Return the positions at which an output is compared at a point, or None if at all of them.

    The logits of a long text would take gigabytes in float64. They are compared at the first and last positions, at
    those around the half, powers of two and the ends of padding, and at random ones, valid ones if there are enough.
    A cache is compared at all positions.
    """
    sizes = _sizes(graph, feeds, point)
    whole = tuple(_size(dim, sizes) or 0 for dim in tensor.dims)
    lengths = [axis for axis, dim in enumerate(tensor.dims) if isinstance(dim, str) and dim not in graph.rows]
    if math.prod(whole) <= _LARGE or len(lengths) != 1 or tensor in graph.present_tensors():
        return None
    axis = lengths[0]
    length = whole[axis]
    if length <= KEPT:
        return None
    valid = np.moveaxis(valid_positions(graph, tensor, feeds, point), axis, 0)
    valid = np.broadcast_to(valid, (length, *valid.shape[1:])).reshape(length, -1)
    ends = np.flatnonzero(np.diff(valid, axis=0).any(1)).tolist()
    powers = [2**power for power in range(1, length.bit_length())]
    around = {place + near for place in (0, length // 2, length - 1, *powers, *ends) for near in (-1, 0, 1)}
    places = sorted(place for place in around if 0 <= place < length)
    order = np.random.default_rng(length).permutation(length)
    order = order[np.argsort(~np.any(valid, axis=1)[order], kind="stable")]
    others = order[~np.isin(order, places)][: max(0, KEPT - len(places))]
    return Kept(axis, whole, np.sort(np.array([*places, *others])))


def _sizes(graph: Graph, feeds: Feeds, point: Point) -> dict[str, int]:
    """Return the sizes of a graph's dimensions, as far as inputs determine them."""
    sizes = {
        dim: feeds[item.name].shape[axis]
        for item in graph.input_tensors()
        if item.name in feeds
        for axis, dim in enumerate(item.dims)
        if isinstance(dim, str)
    }
    if graph.pasts:
        total = point.length + point.past
        sizes["batch"] = point.batch
        sizes |= {str(graph.past_length): point.past, graph.total_length: total, "sequence": point.length}
    return sizes


def _size(dim: Dim, sizes: Mapping[str, int]) -> int | None:
    """Return the size of a dimension, or None if it does not follow from the inputs."""
    try:
        return dim_size(dim, sizes)
    except KeyError:
        return None


def valid_positions(graph: Graph, tensor: TensorSpec, feeds: Feeds, point: Point) -> Array:
    """Return a boolean array, True where an output is defined: in rows with tokens in every mask, outside padding."""
    valid = np.ones([1] * len(tensor.dims), dtype=bool)
    for place in (tensor.dims.index(name) for name in graph.rows if name in tensor.dims):
        masks_of_rows = (item for item in graph.input_tensors() if item.is_mask and item.dims[0] == tensor.dims[place])
        masks: dict[Any, Any] = {item.dims[1]: feeds[item.name] != 0 for item in masks_of_rows}
        if graph.pasts and graph.total_length in masks:
            masks["sequence"] = masks[graph.total_length][:, -point.length :]
        whole = masks.get(graph.total_length)
        in_windows = {} if whole is None else {dim: whole[:, -count:] for dim, count in graph.kept_lengths().items()}
        for mask in masks.values():
            valid = valid & _along(mask.any(1), tensor, place)
        for axis, dim in enumerate(tensor.dims):
            mask = (masks | in_windows).get(dim, _quotient_mask(dim, masks) if is_quotient(dim) else None)
            if mask is not None:
                valid = valid & _along(mask, tensor, place, axis)
    return valid


def _along(values: Array, tensor: TensorSpec, *axes: int) -> Array:
    """Return values with as many dimensions as a tensor, their own being those of the given axes, in order."""
    return values.reshape([values.shape[axes.index(axis)] if axis in axes else 1 for axis in range(len(tensor.dims))])


def _quotient_mask(dim: Dim, masks: Mapping[str, Any]) -> Any:
    """Return the mask of a length that is a quotient of a masked one: the positions that a row has without padding.

    Padding is on the right, as :class:`zoo.Graph` requires. None if the length does not follow from one mask.
    """
    for length, mask in masks.items():
        if dim_names(dim) == (length,):
            whole, *counts = (dim_size(dim, {length: int(count)}) for count in (mask.shape[1], *mask.sum(1)))
            return np.arange(whole) < np.array(counts)[:, None]
    return None
