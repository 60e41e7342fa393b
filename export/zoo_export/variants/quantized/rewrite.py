"""Graphs whose quantised operators read packed weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common as passes

from zoo.artifact.weights import StoredTensor, read_header
from zoo_export.graph.metadata import MODULE_KEY
from zoo_export.variants.quantized.packing import SCALES, ZERO_POINTS, Packing
from zoo_export.variants.reduced.model import PRECISION_KEY, ReducedModel, external

__all__ = ["BLOCKS", "CONTRIB", "DYNAMIC", "read_packed"]

CONTRIB = "com.microsoft"
BLOCKS, DYNAMIC, TABLE = "MatMulNBits", "MatMulIntegerToFloat", "GatherBlockQuantized"
_INT8_COMPUTE = 4
"""``accuracy_level``: allow the runtime to quantise activations to int8 by block. Without it, there is no kernel for
8-bit weights, which are then expanded at every call (a hundred times slower for one token); 4-bit weights are half as
fast."""


def read_packed(reduced: ReducedModel, plan: Mapping[str, Packing]) -> ReducedModel:
    """Make the graphs of a model read packed weights, which are written already."""
    places = read_header(reduced.path)
    for model in reduced.graphs.values():
        _Rewriting(model, places, reduced.directory).run(plan)
        model.metadata_props[PRECISION_KEY] = reduced.precision
    return reduced


class _Rewriting:
    """The replacement of each reader of a planned weight by an operator that reads its packed form."""

    def __init__(self, model: ir.Model, places: Mapping[str, StoredTensor], directory: Path) -> None:
        self.model = model
        self.places = places
        self.directory = directory
        self.initializers: dict[str, ir.Value] = {}
        self.rounded: dict[ir.Value, ir.Node] = {}
        """The node that quantises each activation."""
        self.expanding: list[ir.Node] = []
        """Nodes that dequantise a stack of matrices for its readers."""

    def run(self, plan: Mapping[str, Packing]) -> None:
        """Replace the readers of all planned weights."""
        for name, packing in plan.items():
            weight = self.model.graph.initializers.pop(name, None)
            if weight is None:
                continue
            assert weight.shape is not None
            rows = weight.shape.numpy()[:-1]
            whole: ir.Node | None = None
            for node, position in tuple(weight.uses()):
                if node.op_type == "Gather":
                    self._look_up(node, name, packing, rows)
                elif node.op_type == "Gemm":
                    self._multiply(node, name, packing)
                else:
                    whole = whole or self._expanded(name, packing, rows)
                    node.replace_input_with(position, whole.outputs[0])
        for value in self.initializers.values():
            self.model.graph.initializers.add(value)
        if self.expanding:
            self.model.graph.insert_before(self.model.graph[0], self.expanding)
        self.model.opset_imports[CONTRIB] = 1
        passes.RemoveUnusedNodesPass()(self.model)

    def _part(self, name: str, suffix: str, rows: tuple[int, ...] | None = None) -> ir.Value:
        """Return an initialiser; with ``rows`` in that shape, and the blocks of each row merged."""
        place = self.places[name + suffix]
        key = name + suffix
        if rows is not None and (shape := (*rows, math.prod(place.shape[1:]))) != place.shape:
            key = f"{key}.table"
            place = replace(place, shape=shape)
        if key not in self.initializers:
            tensor = external(key, place, self.directory)
            self.initializers[key] = ir.Value(
                name=key, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor
            )
        return self.initializers[key]

    def _look_up(self, node: ir.Node, name: str, packing: Packing, rows: tuple[int, ...]) -> None:
        points = self._part(name, ZERO_POINTS, rows) if packing.zero_points else None
        inputs = [self._part(name, "", rows), node.inputs[1], self._part(name, SCALES, rows), points]
        sizes = {"bits": packing.bits, "block_size": packing.block}
        _replace(self.model, node, TABLE, inputs, {**sizes, "gather_axis": 0, "quantize_axis": len(rows)})

    def _multiply(self, node: ir.Node, name: str, packing: Packing) -> None:
        scales = self._part(name, SCALES)
        points = self._part(name, ZERO_POINTS) if packing.zero_points else None
        source = node.inputs[0]
        assert source is not None
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        if packing.block is None:
            numbers, scale, point = _quantized(self.model, source, self.rounded)
            inputs = [numbers, self._part(name, ""), scale, scales, point, None, bias]
            _replace(self.model, node, DYNAMIC, inputs, {})
            return
        sizes = {"K": packing.columns, "N": packing.rows, "bits": packing.bits, "block_size": packing.block}
        sizes["accuracy_level"] = _INT8_COMPUTE
        _replace(self.model, node, BLOCKS, [source, self._part(name, ""), scales, points, None, bias], sizes)

    def _expanded(self, name: str, packing: Packing, rows: tuple[int, ...]) -> ir.Node:
        """Return a node that dequantises a stack of matrices."""
        parts = [self._part(name, suffix, rows) for suffix in packing.parts()]
        sizes = {"axis": len(rows), "block_size": packing.block}
        node = ir.node("DequantizeLinear", parts, sizes, name=f"{name} in float32")
        self.expanding.append(node)
        return node


def _quantized(model: ir.Model, source: ir.Value, known: dict[ir.Value, ir.Node]) -> Sequence[ir.Value]:
    """Quantise activations once for all readers; return numbers, scale and zero point."""
    if source not in known:
        producer = source.producer()
        known[source] = ir.node("DynamicQuantizeLinear", [source], num_outputs=3)
        if producer is None:
            model.graph.insert_before(next(iter(model.graph)), known[source])
        else:
            model.graph.insert_after(producer, known[source])
    return known[source].outputs


def _replace(
    model: ir.Model, node: ir.Node, kind: str, inputs: list[ir.Value | None], attributes: Mapping[str, Any]
) -> None:
    """Replace a node by one of ONNX Runtime's own operators."""
    old = node.outputs[0]
    new = ir.Value(name=old.name, shape=old.shape, type=old.type)
    paths = {key: path for key, path in node.metadata_props.items() if key == MODULE_KEY}
    while inputs[-1] is None:
        inputs = inputs[:-1]
    replacement = ir.node(kind, inputs, dict(attributes), domain=CONTRIB, outputs=[new], metadata_props=paths)
    graph = node.graph
    assert graph is not None
    graph.insert_after(node, replacement)
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(node, safe=True)
