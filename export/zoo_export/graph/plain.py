"""Graphs in the plain form that the tools of ONNX Runtime, Olive and optimum process.

- They look at no node inside a function.
- Symbolic shape inference, with which ``quant_pre_process`` begins, reads constants only from tensors.
- ``quantize_dynamic`` transposes weights, whose types it then finds listed with their former shapes.
- They take ``Attention`` of opset 23 for the contrib operator of that name, and know few operators of later opsets.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes import common as passes

from zoo_export.graph.file import load
from zoo_export.graph.inference import infer_shapes
from zoo_export.graph.inline import inline
from zoo_export.graph.opset import lower
from zoo_export.graph.rewriting import Tape, replace

__all__ = ["OPSET", "forget_types", "plain"]

OPSET = 20
"""The latest opset whose operators all of these tools know."""


def plain(graph: bytes, *, lowered: bool = False) -> onnx.ModelProto:
    """Return a graph without functions, constant nodes and types of initialisers, which computes the same.

    Args:
        graph: the serialised graph.
        lowered: translate it to :data:`OPSET`, in forms of operators that the tools process. Results may then differ by
            rounding.

    Raises:
        ArtifactError: the graph cannot be parsed.
        PluginError: an operator has no equivalent in that opset.
    """
    model = inline(load(graph))
    if lowered:
        model = _lowered(model)
    passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    passes.RemoveUnusedOpsetsPass()(model)
    proto: onnx.ModelProto = ir.to_proto(model)
    forget_types(proto.graph)
    return proto


def forget_types(graph: onnx.GraphProto) -> None:
    """Remove the types of the initialisers of a graph and of its subgraphs: initialisers state them themselves."""
    names = {tensor.name for tensor in graph.initializer}
    kept = [value for value in graph.value_info if value.name not in names]
    del graph.value_info[:]
    graph.value_info.extend(kept)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                forget_types(attribute.g)


def _lowered(model: ir.Model) -> ir.Model:
    if model.opset_imports[""] > OPSET:
        model = lower(model, OPSET)
    typed = infer_shapes(model)
    for rewrite in (
        _drop_cast,
        _drop_repeat,
        _sum_visible,
        _square,
        _state_axes,
        _sum_squares,
        _bound,
        _add_bias,
        _share,
    ):
        for node in tuple(typed.graph):
            if node.graph is not None:
                rewrite(node)
    passes.RemoveUnusedNodesPass()(typed)
    for node in typed.graph.all_nodes():
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = value.type = None
    return typed


def _drop_cast(node: ir.Node) -> None:
    """Remove a cast to the type that a value already has, whose type the float16 converters would contradict."""
    if node.op_type != "Cast":
        return
    value, result = node.inputs[0], node.outputs[0]
    if value is None or result.is_graph_output():
        return
    if value.dtype is not None and value.dtype == result.dtype:
        replace(node, value)


def _drop_repeat(node: ir.Node) -> None:
    """Remove the repetition of keys or values by which ``Attention`` is defined, if each head has keys of its own."""
    if node.op_type != "Reshape":
        return
    expand = _maker(node, 0, "Expand")
    unsqueeze = expand and _maker(expand, 0, "Unsqueeze")
    wide, narrow = expand and _maker(expand, 1, "Concat"), _maker(node, 1, "Concat")
    if not unsqueeze or not wide or not narrow or len(wide.inputs) != 5:
        return
    batch, heads, repeats, *rest = wide.inputs
    if _integers(repeats) != [1] or _integers(unsqueeze.inputs[1]) != [2] or unsqueeze.inputs[0] is None:
        return
    if [*narrow.inputs] == [batch, heads, *rest]:
        replace(node, unsqueeze.inputs[0])


def _sum_visible(node: ir.Node) -> None:
    """Count the keys that a row sees, instead of taking the largest bias: ``ReduceMax`` has no symbolic shapes."""
    largest = _maker(node, 0, "ReduceMax") if node.op_type == "LessOrEqual" else None
    if largest is None or len(largest.inputs) != 2:
        return
    (bias, axes), bound = largest.inputs, node.inputs[1]
    assert bias is not None and axes is not None and bound is not None
    if bound.dtype is None:
        return
    tape = Tape(node, after=False)
    zero = tape.constant(np.zeros((), bound.dtype.numpy()))
    seen = tape.op("Where", tape.op("Greater", bias, bound), tape.constant(np.ones((), bound.dtype.numpy())), zero)
    count = tape.op("ReduceSum", seen, axes, keepdims=largest.attributes.get_int("keepdims", 1))
    replace(node, tape.op("LessOrEqual", count, zero))


def _square(node: ir.Node) -> None:
    """Write a square as a power, as the fusion of RMS norms of onnxruntime.transformers expects it."""
    value = node.inputs[0] if node.op_type == "Mul" else None
    if value is None or node.inputs[1] is not value or value.dtype is None:
        return
    if any(user.op_type == "ReduceMean" for user, _ in node.outputs[0].uses()):
        tape = Tape(node, after=False)
        replace(node, tape.op("Pow", value, tape.constant(np.array(2, value.dtype.numpy()))))


def _state_axes(node: ir.Node) -> None:
    """State the axes of the mean of an RMS norm, which its definition computes from the rank of the data."""
    numbers = _maker(node, 1, "Range") if node.op_type == "ReduceMean" else None
    start = numbers and _maker(numbers, 0, "Add")
    if not numbers or not start or not _maker(start, 0, "Size") or start.inputs[0] is not numbers.inputs[1]:
        return
    if len(first := _integers(start.inputs[1])) == 1 and first[0] < 0:
        node.replace_input_with(1, Tape(node, after=False).integers(*range(first[0], 0)))


def _sum_squares(node: ir.Node) -> None:
    """Write a norm as the root of a sum: ``ReduceL2`` has no symbolic shapes."""
    if node.op_type != "ReduceL2" or len(node.inputs) != 2 or node.inputs[1] is None:
        return
    value, axes = node.inputs
    assert value is not None and axes is not None
    tape = Tape(node, after=False)
    total = tape.op("ReduceSum", tape.op("Mul", value, value), axes, keepdims=node.attributes.get_int("keepdims", 1))
    replace(node, tape.op("Sqrt", total))


def _bound(node: ir.Node) -> None:
    """Write the maximum of a value and a constant as a bound: the float16 converters leave ``Max`` in float32."""
    if node.op_type != "Max" or len(node.inputs) != 2:
        return
    value, bound = node.inputs
    if value is not None and bound is not None and bound.is_initializer() and bound.shape == ir.Shape([]):
        replace(node, Tape(node, after=False).op("Clip", value, bound))


def _add_bias(node: ir.Node) -> None:
    """Add a bias of zeros to a layer norm, without which a fusion of onnxruntime.transformers fails."""
    weight = node.inputs[1] if node.op_type == "LayerNormalization" and len(node.inputs) == 2 else None
    if weight is None or weight.dtype is None or weight.shape is None or not weight.shape.is_static():
        return
    zeros = Tape(node, after=False).constant(np.zeros(weight.shape.numpy(), weight.dtype.numpy()))
    node.resize_inputs(3)
    node.replace_input_with(2, zeros)


def _share(node: ir.Node) -> None:
    """Transpose a weight that other nodes read too, such as tied embeddings, which quantisers transpose in place."""
    if node.op_type != "Gemm" or not node.attributes.get_int("transB", 0):
        return
    data, weight, *bias = node.inputs
    if data is None or weight is None or not weight.is_initializer() or len(weight.uses()) == 1:
        return
    scales = (node.attributes.get_float("alpha", 1.0), node.attributes.get_float("beta", 1.0))
    if scales != (1.0, 1.0) or bool(node.attributes.get_int("transA", 0)):
        return
    tape = Tape(node, after=False)
    result = tape.op("MatMul", data, tape.op("Transpose", weight, perm=[1, 0]))
    for value in bias:
        if value is not None:
            result = tape.op("Add", result, value)
    replace(node, result)


def _maker(node: ir.Node, place: int, operator: str) -> ir.Node | None:
    """Return the node that computes an input, if it has this operator."""
    value = node.inputs[place] if place < len(node.inputs) else None
    maker = value.producer() if value is not None else None
    return maker if maker is not None and maker.op_type == operator else None


def _integers(value: ir.Value | None) -> list[int]:
    """Return the elements of a constant vector; none of another value."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return [] if tensor is None else [int(item) for item in tensor.numpy().reshape(-1)]
