"""Graphs without operators that compute with sizes: what depends on fixed sizes alone is folded."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from zoo.arrays import Array
from zoo_export.graph.inference import Type, infer_types
from zoo_export.graph.rewriting import Tape, replace, simplify

__all__ = ["dynamic_node", "fold_sizes"]

_DYNAMIC = frozenset(
    {
        "Compress", "ConstantOfShape", "If", "Loop", "NonMaxSuppression", "NonZero", "Pad", "Range", "Resize", "Scan",
        "Shape", "Size", "StringSplit", "Unique",
    }
)  # fmt: skip
"""Operators that compute with sizes, or whose outputs have sizes that depend on data."""
_SIZED = {"Expand": (1,), "Reshape": (1,), "Slice": (1, 2, 4), "Tile": (1,), "TopK": (1,), "OneHot": (1,)}
"""Inputs that determine sizes, by operator. They must be constants."""


def fold_sizes(model: ir.Model) -> ir.Model:
    """Fold constants, ranges of any length, and constant tensors and paddings of any size, in place."""
    _fold(model)
    types = infer_types(model)
    for node in tuple(model.graph):
        if node.op_type == "Pad":
            _concatenate(node, types)
    _fold(model)
    return model


def _fold(model: ir.Model) -> None:
    for name, value in tuple(model.graph.initializers.items()):
        tensor = value.const_value
        if tensor is not None and not isinstance(tensor, ir.ExternalTensor):  # folded earlier, and not to be read again
            del model.graph.initializers[name]
            value.replace_all_uses_with(Tape(model.graph[0], after=False).constant(tensor.numpy()))
    for node in tuple(model.graph):
        if node.op_type not in ("ConstantOfShape", "Range"):
            continue
        operands = [array for value in node.inputs if (array := _constant(value)) is not None]
        tape = Tape(node, after=False)
        if node.op_type == "ConstantOfShape" and operands:
            fill = node.attributes.get_tensor("value", ir.tensor(np.zeros(1, np.float32))).numpy()
            replace(node, tape.op("Expand", tape.constant(fill), tape.constant(operands[0])))
        elif node.op_type == "Range" and len(operands) == 3:
            first, last, step = (array.item() for array in operands)
            replace(node, tape.constant(np.arange(first, last, step).astype(operands[0].dtype)))
    simplify(model)


def _constant(value: ir.Value | None) -> Array | None:
    """Return the content of a constant, or None if it is none."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None or isinstance(tensor, ir.ExternalTensor) else tensor.numpy()


def _concatenate(node: ir.Node, types: Mapping[str, Type]) -> None:
    """Replace constant padding of a tensor of known shape by concatenation."""
    data, *rest = node.inputs
    assert data is not None
    kind, shape = types.get(str(data.name), (None, ()))
    pads, fill, axes = (*map(_constant, rest), None, None)[:3]
    sizes = [size for size in shape if isinstance(size, int)]
    constant = node.attributes.get_string("mode", "constant") == "constant"
    if pads is None or pads.min() < 0 or not constant or not sizes or len(sizes) < len(shape):
        return
    tape, value = Tape(node, after=False), data
    places = range(len(sizes)) if axes is None else axes.tolist()
    for axis, edges in zip(places, pads.reshape(2, -1).T.tolist(), strict=True):
        blocks: list[ir.Value] = []
        for size in edges:
            edge = [*sizes]
            edge[axis] = size
            blocks += [tape.constant(np.full(edge, 0 if fill is None else fill, kind))] if size else []
        if blocks:
            value = tape.op("Concat", *blocks[: edges[0] > 0], value, *blocks[edges[0] > 0 :], axis=axis)
            sizes[axis] += sum(edges)
    replace(node, value)


def dynamic_node(model: ir.Model) -> ir.Node | None:
    """Return a node that computes with sizes, or whose output has a size that is not known."""
    types = infer_types(model)
    for node in model.graph:
        sized = [node.inputs[place] for place in _SIZED.get(node.op_type, ()) if place < len(node.inputs)]
        if node.op_type in _DYNAMIC or any(value is not None and _constant(value) is None for value in sized):
            return node
        if any(not isinstance(size, int) for out in node.outputs for size in types.get(str(out.name), (0, (None,)))[1]):
            return node
    return None
