"""Translation of graphs to an older opset, and to operators with WebGPU kernels.

Operators that are missing there are replaced by the function bodies in the ONNX standard, which define them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes import common as passes

from zoo.errors import PluginError, UsageError, argument
from zoo_export.graph.inference import infer_shapes, inferred
from zoo_export.graph.rewriting import simplify
from zoo_export.graph.standard import check_standard

__all__ = ["expand_attention", "lower"]


def lower(model: ir.Model, opset: int) -> ir.Model:
    """Translate a graph without functions to an older opset.

    Raises:
        PluginError: an operator has no equivalent in that opset.
    """
    lowered = _expanded(model, opset, lambda node: not onnx.defs.has(node.op_type, opset, ""))
    lowered.opset_imports[""] = opset
    lowered.metadata_props["zoo.opset"] = str(opset)
    _check(lowered, opset)
    return lowered


def expand_attention(model: ir.Model, profile: str) -> ir.Model:
    """Replace ``Attention`` by its definition in a graph without functions.

    onnxruntime-web 1.30 has WebGPU kernels for the operators of the definition, but not for ``Attention`` of opset 23.

    Args:
        model: the graph.
        profile: the profile to name in its metadata.

    Raises:
        UsageError: the graph computes in float64, for which onnxruntime-web 1.30 with WebGPU has no kernels, neither on
            the graphics card nor on the CPU.
    """
    opset = model.opset_imports[""]
    expanded = _expanded(model, opset, lambda node: node.op_type == "Attention")
    expanded.metadata_props["zoo.profile"] = profile
    values = inferred(expanded).graph.value_info
    if any(value.type.tensor_type.elem_type == onnx.TensorProto.DOUBLE for value in values):
        problem = "the model computes in float64, which onnxruntime-web does not with WebGPU"
        raise UsageError(problem, argument("profile", profile), "export another profile")
    _check(expanded, opset)
    return expanded


def _expanded(model: ir.Model, opset: int, is_replaced: Callable[[ir.Node], bool]) -> ir.Model:
    """Replace operators by the standard's definitions of them, in operators of an opset."""
    typed = infer_shapes(model)  # a definition depends on the types of the call
    _decompose(typed, opset, is_replaced)
    return simplify(typed)


def _decompose(model: ir.Model, opset: int, is_replaced: Callable[[ir.Node], bool]) -> None:
    nodes = [node for node in model.graph.all_nodes() if node.domain == "" and is_replaced(node)]
    for number, node in enumerate(nodes):
        body = ir.serde.deserialize_function(_definition(node, model.opset_imports[""], opset))
        body.overload = node.overload = str(number)  # the definition depends on the types and attributes of the call
        body.opset_imports[""] = model.opset_imports[""]
        model.functions[body.identifier()] = body
    passes.InlinePass()(model)


def _definition(node: ir.Node, opset: int, older: int) -> onnx.FunctionProto:
    """Return the function that defines an operator for the types of its inputs."""
    schema: Any = onnx.defs.get_schema(node.op_type, opset, "")
    if not schema.has_context_dependent_function:
        raise PluginError(f"opset {older} has no {node.op_type}, and the ONNX standard does not define it by others")
    types = [_type(value).SerializeToString() for value in node.inputs]
    data = schema.get_context_dependent_function(ir.to_proto(node).SerializeToString(), types)
    function = onnx.FunctionProto.FromString(data)
    del function.output[len(node.outputs) :]
    if node.op_type == "Attention":
        _compare_finite(function)
    return function


def _compare_finite(function: onnx.FunctionProto) -> None:
    """Recognise a row whose keys are all hidden by a bias up to the lowest number, instead of one equal to -inf.

    The results are the same, but not every runtime compares infinities correctly: OpenVINO 2026.4 does not.
    """
    for node in function.node:
        if "RowAllMasked" in node.output:
            node.op_type = "LessOrEqual"
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR and attribute.t.data_type == onnx.TensorProto.FLOAT:
                value = onnx.numpy_helper.to_array(attribute.t)
                lowest = np.where(np.isneginf(value), np.finfo(np.float32).min, value)
                attribute.t.CopyFrom(onnx.numpy_helper.from_array(lowest))


def _type(value: ir.Value | None) -> onnx.TypeProto:
    if value is None or value.dtype is None:
        return onnx.TypeProto()
    shape = None if value.shape is None else [dim if isinstance(dim, int) else None for dim in value.shape]
    return onnx.helper.make_tensor_type_proto(value.dtype, shape)


def _check(model: ir.Model, opset: int) -> None:
    """Raise :class:`PluginError` if a node has no valid form in the opset."""
    try:
        check_standard(ir.to_proto(model), types=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise PluginError(f"the graph cannot be written in opset {opset} ({reason})") from error
