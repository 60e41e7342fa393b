"""Conversion of half-precision graphs to float32."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from zoo_export.graph.file import parse, serialize
from zoo_export.graph.metadata import EXACT_KEY

__all__ = ["widen"]

_finfo: Any = ml_dtypes.finfo  # untyped
_HALVES = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


def widen(graph: bytes, move: np.random.Generator | None = None) -> tuple[bytes, bool]:
    """Convert all float16 and bfloat16 values of a graph to float32.

    External weights only change their declared dtype and must be replaced by float32 ones.

    Args:
        graph: a serialised graph.
        move: moves constants that may have been rounded from an unknown number by half a unit in the last place, up or
            down at random: the farthest that the number may lie from them.

    Returns:
        The graph, and whether no constant may have been rounded from an unknown number.
    """
    model = parse(graph)
    for function in model.functions:
        _widen_types(function.value_info)
    exact = [_widen_graph(model.graph, move), *(_widen_nodes(function.node, move) for function in model.functions)]
    return serialize(model), all(exact)


def _widen_graph(graph: onnx.GraphProto, move: np.random.Generator | None) -> bool:
    """Widen a graph or subgraph; return whether its constants are exact."""
    _widen_types((*graph.input, *graph.output, *graph.value_info))
    exact = [_widen_tensor(tensor, move) for tensor in graph.initializer]
    return _widen_nodes(graph.node, move) and all(exact)


def _widen_types(values: Iterable[onnx.ValueInfoProto]) -> None:
    for value in values:
        if value.type.tensor_type.elem_type in _HALVES:
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT


def _widen_tensor(tensor: onnx.TensorProto, move: np.random.Generator | None) -> bool:
    """Widen a tensor; return whether its values are exact.

    Values with few binary digits are taken to be unrounded. The lowest number of the dtype, ``torch.finfo(dtype).min``,
    becomes the lowest of float32.
    """
    if tensor.data_type not in _HALVES:
        return True
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        tensor.data_type = onnx.TensorProto.FLOAT
        return True
    halves = onnx.numpy_helper.to_array(tensor)
    lowest = halves == _finfo(halves.dtype).min
    values = np.where(lowest, np.finfo(np.float32).min, halves.astype(np.float32))
    with np.errstate(invalid="ignore"):  # infinity has no digits
        exact = lowest | ~np.isfinite(values) | (16 * np.frexp(values)[0] % 1 == 0)
    if move is not None:
        half_unit = np.exp2(np.frexp(values)[1]) * float(_finfo(halves.dtype).eps) / 4
        values = np.where(exact, values, values + move.choice([-1.0, 1.0], values.shape) * half_unit).astype(np.float32)
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    return bool(exact.all())


def _widen_nodes(nodes: Iterable[onnx.NodeProto], move: np.random.Generator | None) -> bool:
    results = []
    for node in nodes:
        exact = [float(entry.value) for entry in node.metadata_props if entry.key == EXACT_KEY]
        for attribute in node.attribute:
            if exact and attribute.t.data_type in _HALVES:
                rounded = onnx.numpy_helper.to_array(attribute.t)
                if rounded == rounded.dtype.type(exact[0]):  # else the metadata is stale
                    attribute.t.CopyFrom(onnx.helper.make_tensor("", onnx.TensorProto.FLOAT, [], exact))
            if attribute.name in ("to", "dtype") and attribute.i in _HALVES:
                attribute.i = onnx.TensorProto.FLOAT
            elif attribute.type == onnx.AttributeProto.TENSOR:
                results.append(_widen_tensor(attribute.t, move))
            for inner in (attribute.g, *attribute.graphs):
                results.append(_widen_graph(inner, move))
    return all(results)
