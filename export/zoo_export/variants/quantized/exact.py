"""Graphs with float32 products of the dequantised weights, in place of quantised ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from zoo.arrays import Array
from zoo_export.variants.quantized.packing import SCALES, ZERO_POINTS, Packing
from zoo_export.variants.quantized.rewrite import BLOCKS, CONTRIB, DYNAMIC
from zoo_export.variants.reduced.model import Place, ReducedModel, pointer, read_pointer

__all__ = ["with_exact_products"]


def with_exact_products(reduced: ReducedModel) -> tuple[ReducedModel, dict[Place, Array]]:
    """Replace quantised products by float32 products of the dequantised weights.

    Returns:
        The model, and the values of its weights for :func:`open_reduced`.
    """
    values: dict[Place, Array] = {}
    graphs = {name: _exact(model, values) for name, model in reduced.graphs.items()}
    return replace(reduced, graphs=graphs), values


def _exact(model: ir.Model, values: dict[Place, Array]) -> ir.Model:
    """Return a copy with MatMul in place of each quantised product, and add its weights to ``values``."""
    copy = model.clone()
    expanded: dict[ir.Value, ir.Value] = {}
    for node in tuple(copy.graph):
        if node.domain != CONTRIB or node.op_type not in (BLOCKS, DYNAMIC):
            continue
        inputs = [*node.inputs, *[None] * (7 - len(node.inputs))]
        if node.op_type == BLOCKS:
            source, numbers, scales, points, _, bias, _ = inputs
        else:
            rounded, numbers, _, scales, _, points, bias = inputs
            quantizer = rounded.producer() if rounded is not None else None
            assert quantizer is not None
            source = quantizer.inputs[0]
        assert numbers is not None
        if numbers not in expanded:
            parts = {"": numbers, SCALES: scales, ZERO_POINTS: points}
            weight = _expand(node, {suffix: _numbers(value) for suffix, value in parts.items() if value is not None})
            place = f"exact.{copy.graph.name}", len(values)
            values[place] = weight
            tensor = ir.ExternalTensor(
                *place, weight.nbytes, ir.DataType.FLOAT, shape=ir.Shape(weight.shape), name=f"exact.{len(values)}"
            )
            expanded[numbers] = ir.Value(
                name=tensor.name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor
            )
            copy.graph.initializers.add(expanded[numbers])
        nodes = [ir.node("MatMul", [source, expanded[numbers]])]
        if bias is not None:
            nodes.append(ir.node("Add", [nodes[0].outputs[0], bias]))
        old, new = node.outputs[0], nodes[-1].outputs[0]
        new.shape, new.type = old.shape, old.type
        for one in nodes:
            one.metadata_props.update(node.metadata_props)
        copy.graph.insert_before(node, nodes)
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        copy.graph.remove(node, safe=True)
        new.name = old.name
    passes.RemoveUnusedNodesPass()(copy)
    return copy


def _expand(node: ir.Node, parts: Mapping[str, Array]) -> Array:
    """Dequantise the matrix (K, N) of a quantised product."""
    if node.op_type == DYNAMIC:
        columns, rows = parts[""].shape
        packing = Packing(rows, columns, 8, None)
    else:
        rows, columns, bits, block = (node.attributes[key].as_int() for key in ("N", "K", "bits", "block_size"))
        packing = Packing(rows, columns, bits, block, ZERO_POINTS in parts)
    return np.ascontiguousarray(packing.unpack(parts).T)


def _numbers(value: ir.Value) -> Array:
    assert value.const_value is not None
    tensor = pointer(value)
    return value.const_value.numpy() if tensor is None else read_pointer(tensor)
