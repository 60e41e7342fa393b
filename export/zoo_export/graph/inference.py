"""Element types and shapes of a graph's values, inferred by the onnx library.

onnx-ir's own pass leaves a graph as it is where inference fails. Here, the error is raised.
"""

from __future__ import annotations

from typing import Any

import onnx
import onnx_ir as ir

__all__ = ["Type", "infer_shapes", "infer_types", "inferred"]

Type = tuple[Any, tuple[int | str | None, ...]]
"""The element type and the shape of a value."""


def inferred(model: ir.Model) -> onnx.ModelProto:
    """Return a copy of a model in the form of the onnx library, with all types and shapes that it infers."""
    return onnx.shape_inference.infer_shapes(ir.to_proto(model), data_prop=True)


def infer_shapes(model: ir.Model) -> ir.Model:
    """Return a copy of a model with all types and shapes that can be inferred."""
    return ir.from_proto(inferred(model))


def infer_types(model: ir.Model) -> dict[str, Type]:
    """Return the element type and the shape of each value, by name."""
    graph = inferred(model).graph
    return {
        value.name: (
            onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type),
            tuple(
                dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
                for dim in value.type.tensor_type.shape.dim
            ),
        )
        for value in (*graph.value_info, *graph.input, *graph.output)
    }
