"""Checks of graphs by the ONNX standard."""

from __future__ import annotations

import onnx

from zoo_export.graph.links import external_tensors

__all__ = ["check_standard", "fault"]


def check_standard(model: onnx.ModelProto, *, types: bool = False) -> None:
    """Raise onnx's error if a graph violates the ONNX standard, such as by a name that nothing defines.

    Args:
        model: the graph; its external data are not read.
        types: whether to infer and check the types of all values, too.
    """
    checked = onnx.ModelProto()
    checked.CopyFrom(model)
    external = {tensor.name: tensor for tensor in external_tensors(checked)}
    constants = [tensor for tensor in checked.graph.initializer if tensor.name not in external]
    del checked.graph.initializer[:]
    checked.graph.initializer.extend(constants)
    inputs = {value.name for value in checked.graph.input}
    for name in sorted(external.keys() - inputs):  # as inputs, because the checker would look for their files
        tensor = external[name]
        checked.graph.input.append(onnx.helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))
    onnx.checker.check_model(checked, full_check=types)


def fault(model: onnx.ModelProto) -> str | None:
    """Return the first violation of the ONNX standard, or None."""
    try:
        check_standard(model)
    except onnx.checker.ValidationError as error:
        return " ".join(str(error).split())
    return None
