"""Valid positions of outputs given padding, and checks of output shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from zoo.contract import Dim, Graph, TensorSpec, dim_names, dim_size, is_quotient
from zoo.errors import ParityError
from zoo.probe.inputs import Feeds, Point

__all__ = ["check_shape", "valid_positions"]


def check_shape(graph: Graph, tensor: TensorSpec, shape: tuple[int, ...], feeds: Feeds, point: Point) -> None:
    """Raise :class:`ParityError` unless an output has its declared dimensions, which those of the inputs determine."""
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
    declared = tuple(_size(dim, sizes) for dim in tensor.dims)
    if None in declared:
        dim = tensor.dims[declared.index(None)]
        raise ParityError(f"{tensor.name} of graph {graph.name!r} declares the dimension {dim!r}, which no input has")
    if declared != shape:
        dims = ", ".join(map(str, tensor.dims))
        known = ", ".join(f"{name} {size}" for name, size in sizes.items() if name in graph.dim_names())
        raise ParityError(
            f"{tensor.name} of graph {graph.name!r} has shape {shape}, but declares ({dims}), which is {declared} for "
            f"{known}"
        )


def _size(dim: Dim, sizes: Mapping[str, int]) -> int | None:
    """Return the size of a dimension, or None if it does not follow from the inputs."""
    try:
        return dim_size(dim, sizes)
    except KeyError:
        return None


def valid_positions(graph: Graph, tensor: TensorSpec, feeds: Feeds, point: Point) -> np.ndarray[Any, Any]:
    """Return a boolean array, True where an output is defined: in rows with tokens in every mask, outside padding."""
    valid = np.ones([1] * len(tensor.dims), dtype=bool)
    for place in (tensor.dims.index(name) for name in graph.rows if name in tensor.dims):
        found = (item for item in graph.input_tensors() if item.is_mask and item.dims[0] == tensor.dims[place])
        masks: dict[Any, Any] = {item.dims[1]: feeds[item.name] != 0 for item in found}
        if graph.pasts and graph.total_length in masks:
            masks["sequence"] = masks[graph.total_length][:, -point.length :]
        for mask in masks.values():
            valid = valid & _along(mask.any(1), tensor, place)
        for axis, dim in enumerate(tensor.dims):
            mask = masks.get(dim, _quotient_mask(dim, masks) if is_quotient(dim) else None)
            if mask is not None:
                valid = valid & _along(mask, tensor, place, axis)
    return valid


def _along(values: np.ndarray[Any, Any], tensor: TensorSpec, *axes: int) -> np.ndarray[Any, Any]:
    """Return values with as many dimensions as a tensor, their own being those of the given axes, in order."""
    return values.reshape([values.shape[axes.index(axis)] if axis in axes else 1 for axis in range(len(tensor.dims))])


def _quotient_mask(dim: Dim, masks: Mapping[str, Any]) -> Any:
    """Return the mask of a length that is a quotient of a masked one: the positions that a row has without padding.

    Padding is on the right, as :class:`zoo.Graph` requires. None if the length does not follow from one mask.
    """
    for length, mask in masks.items():
        if dim_names(dim) == (length,):
            whole, *own = (dim_size(dim, {length: int(count)}) for count in (mask.shape[1], *mask.sum(1)))
            return np.arange(whole) < np.array(own)[:, None]
    return None
