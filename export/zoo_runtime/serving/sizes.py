"""Sizes of the dimensions of an export for serving, fixed except the number of rows of a step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from zoo.arrays import Array
from zoo.contract import Graph, TensorSpec, dim_names
from zoo.errors import ArtifactError, UsageError
from zoo_runtime.onnx_runtime.ort import ort
from zoo_runtime.serving.names import CAPACITY, SIZES_KEY, read_sizes

__all__ = ["check_shapes", "fit", "possible_counts", "sizes_of_session"]


def sizes_of_session(session: ort.InferenceSession) -> dict[str, int]:
    """Return the sizes of the dimensions of an export for serving, by name, from its graph ``prefill``."""
    text = session.get_modelmeta().custom_metadata_map.get(SIZES_KEY)
    if text is None:
        raise UsageError("the graph is not exported for serving", None, "zoo export --onnx --profile serving")
    sizes = read_sizes(text)
    for name in ("batch", "sequence", CAPACITY):
        _check_known(name, sizes)
    return sizes


def check_shapes(session: ort.InferenceSession, graph: Graph, sizes: Mapping[str, int]) -> None:
    """Raise :class:`ArtifactError` unless the inputs that a graph has are of these sizes, or for any number of rows."""
    shapes = {item.name: tuple(item.shape) for item in session.get_inputs()}
    for tensor in graph.input_tensors():
        if tensor.name in shapes:
            for name in [name for dim in tensor.dims if dim not in sizes for name in dim_names(dim)]:
                _check_known(name, sizes)
            first, *others = shapes[tensor.name] or (None,)
            free = first == "batch" and tensor.dims[:1] == ("batch",)
            wanted = tensor.shape(sizes)
            if (wanted[0] if free else first, *others) != wanted:
                problem = f"{tensor.name} has the shape {shapes[tensor.name]}, not {wanted}"
                raise ArtifactError(problem, f"graph {graph.name}", "export again")


def possible_counts(count: int) -> tuple[int, ...]:
    """Return the numbers of rows that a step may have: the powers of two below the number of all rows, and that."""
    return (*(1 << power for power in range((count - 1).bit_length())), count)


def _check_known(name: str, sizes: Mapping[str, int]) -> None:
    if name not in sizes:
        raise ArtifactError(f"the metadata of the ONNX graph has no size of {name}", None, "export again")


def fit(tensor: TensorSpec, array: Array, sizes: Mapping[str, int]) -> Array:
    """Pad an array at the end of each dimension, with zeros, to the shape of a graph's input.

    Raises:
        ArtifactError: it is longer than the input.
    """
    shape = tensor.shape(sizes)
    for dim, size, limit in zip(tensor.dims, array.shape, shape, strict=True):
        if size > limit:
            problem = f"{tensor.name} has {size} entries along {dim}, but the export has room for {limit}"
            raise ArtifactError(problem, None, f"export with --fix {dim}={size}")
    return np.pad(array, [(0, limit - size) for size, limit in zip(array.shape, shape, strict=True)])
