"""Valid positions of outputs given padding, and checks of output shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from zoo.contract import Dim, Graph, TensorSpec, dim_size
from zoo.errors import ParityError
from zoo.probe.inputs import Feeds, Point

__all__ = ["check_shape", "valid_positions"]


def check_shape(graph: Graph, tensor: TensorSpec, shape: tuple[int, ...], feeds: Feeds, point: Point) -> None:
    """Raise :class:`ParityError` unless an output has its declared dimensions, which those of the inputs determine."""
    sizes: dict[Dim, int] = {
        dim: feeds[item.name].shape[axis]
        for item in graph.input_tensors()
        if item.name in feeds
        for axis, dim in enumerate(item.dims)
    }
    sizes |= {"batch": point.batch, "sequence": point.length if graph.past else point.length + point.past}
    if graph.past:
        sizes |= {graph.past.length: point.past, f"{graph.past.length} + sequence": point.length + point.past}
    declared = tuple(_size(dim, sizes) for dim in tensor.dims)
    if None in declared:
        dim = tensor.dims[declared.index(None)]
        raise ParityError(f"{tensor.name} of graph {graph.name!r} declares the dimension {dim!r}, which no input has")
    if declared != shape:
        dims = ", ".join(map(str, tensor.dims))
        raise ParityError(f"{tensor.name} of graph {graph.name!r} has shape {shape} at {point}, but declares ({dims})")


def _size(dim: Dim, sizes: Mapping[Dim, int]) -> int | None:
    """Return the size of a dimension, or None if it does not follow from the inputs."""
    if dim in sizes:
        return sizes[dim]
    try:
        return dim_size(dim, {name: size for name, size in sizes.items() if isinstance(name, str)})
    except KeyError:
        return None


def valid_positions(graph: Graph, tensor: TensorSpec, feeds: Feeds, point: Point) -> np.ndarray[Any, Any]:
    """Return a boolean array, True where an output is defined: in rows with tokens in every mask, outside padding."""
    masks: dict[Any, Any] = {item.dims[1]: feeds[item.name] != 0 for item in graph.input_tensors() if item.is_mask}
    if graph.past and f"{graph.past.length} + sequence" in masks:
        masks["sequence"] = masks[f"{graph.past.length} + sequence"][:, -point.length :]
    rank = len(tensor.dims)
    valid = np.ones([1] * rank, dtype=bool)
    if "batch" not in tensor.dims:
        return valid
    for mask in masks.values():
        valid = valid & mask.any(1).reshape([-1] + [1] * (rank - 1))
    for axis, dim in enumerate(tensor.dims):
        if dim in masks:
            rows, length = masks[dim].shape
            valid = valid & masks[dim].reshape([rows, *[length if n == axis else 1 for n in range(1, rank)]])
    return valid
