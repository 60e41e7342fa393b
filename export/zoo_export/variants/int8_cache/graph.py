"""Keys and values stored as int8: a rewrite of decoders that append the new tokens to their past.

Each vector of a head, the key or the value of one token, has one scale: the largest magnitude of its numbers divided by
127. It is rounded when it is appended and never again, so neither the place where a text is cut into calls nor other
tokens change what is stored. Attention reads the rounded numbers of all tokens, the new ones included.

The rewritten graph consists of standard operators, so it runs wherever the original one does. ``Cast`` and ``Mul``
expand the numbers: on the CPU, ``DequantizeLinear`` with a scale for each vector takes four times as long.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from zoo.arrays import Array
from zoo.contract import Graph, KeyValues
from zoo.errors import UsageError
from zoo_export.graph.metadata import contract
from zoo_export.graph.rewriting import Tape

__all__ = ["GIVEN", "MADE", "NEW", "PROBE", "dequantize", "probe", "probed", "quantize", "store_in_int8"]

LEVELS = 127
_SMALLEST = 1e-30
"""The largest magnitude that is assumed at least, so that the scale of a vector of zeros is not 0."""
_APPENDING = ("Concat", "TensorScatter")
"""Operators whose first two inputs are the past and what is appended to it."""
PROBE = ".probe"
"""Last part of the name of a graph of :func:`probe`."""
GIVEN, MADE, NEW = "given_", "made_", "new_"
"""First parts of the names of the inputs and outputs that :func:`probe` adds."""


def quantize(values: Array) -> tuple[Array, Array]:
    """Return numbers (..., D) as int8, and their scales (..., 1) in float32, as the rewritten graphs compute them."""
    largest = np.maximum(np.abs(values).max(-1, keepdims=True), np.array(_SMALLEST, values.dtype))
    scales = (largest / np.array(LEVELS, values.dtype)).astype(np.float32)
    with np.errstate(invalid="ignore"):  # numbers that are not finite have a scale that is not
        return np.rint(values / scales).astype(np.int8), scales


def dequantize(numbers: Array, scales: Array, dtype: np.dtype[Any]) -> Array:
    """Return the numbers that int8 and scales stand for."""
    return numbers.astype(dtype) * scales.astype(dtype)


def store_in_int8(model: ir.Model, declared: Graph, where: object) -> ir.Model:
    """Let a graph without functions and windows store the keys and values of its past as int8, in place.

    Its inputs and outputs are then those of ``declared.with_int8_cache()``. ``where`` names the model in errors.

    Raises :class:`UsageError` if the graph does not only append new keys and values to its past.
    """
    named = {str(value.name): value for value in (*model.graph.inputs, *model.graph.outputs)}
    for past, present in declared.growing_pairs():
        buffer, output = named[past.name], named[present.name]
        node = _appending(buffer)
        if node is None or node.outputs[0] is not output:
            readers = ", ".join(sorted({reader.op_type for reader, _ in buffer.uses()}))
            problem = f"{past.name} cannot be stored in int8: it is read by {readers}, not only extended by new tokens"
            raise UsageError(problem, where, "use --dtype int8, which quantises the weights")
        named |= _store(model, node, buffer, output)
    stored = declared.with_int8_cache()
    for listed, tensors in (
        (model.graph.inputs, stored.input_tensors()),
        (model.graph.outputs, stored.output_tensors()),
    ):
        others = [value for value in listed if value.name not in {tensor.name for tensor in tensors}]
        listed[:] = [*(named[tensor.name] for tensor in tensors if tensor.name in named), *others]
    model.metadata_props["zoo.contract"] = contract(model)
    return model


def _appending(buffer: ir.Value) -> ir.Node | None:
    """Return the node that appends new keys or values to a buffer, if all others read its shape alone."""
    nodes = [(node, place) for node, place in buffer.uses() if node.op_type != "Shape"]
    if len(nodes) != 1 or nodes[0][0].op_type not in _APPENDING or nodes[0][1] != 0:
        return None
    node = nodes[0][0]
    return node if node.op_type != "Concat" or len(node.inputs) == 2 else None


def _store(model: ir.Model, node: ir.Node, buffer: ir.Value, output: ir.Value) -> dict[str, ir.Value]:
    """Store what a node appends to a buffer as int8 and scales; return the new inputs and outputs by name."""
    new, rest = node.inputs[1], [value for value in node.inputs[2:] if value is not None]
    assert new is not None and buffer.shape is not None and output.shape is not None
    tape = Tape(node, after=False)
    largest = tape.op("ReduceMax", tape.op("Abs", new), tape.integers(-1), keepdims=1)
    largest = tape.op("Max", largest, tape.constant(np.array(_SMALLEST, np.float32)))
    scales = tape.op("Div", largest, tape.constant(np.array(LEVELS, np.float32)))
    numbers = tape.op("Cast", tape.op("Round", tape.op("Div", new, scales)), to=ir.DataType.INT8)
    past_scales = ir.Value(
        name=f"{buffer.name}_scale",
        type=ir.TensorType(ir.DataType.FLOAT),
        shape=ir.Shape([*buffer.shape[:-1], 1]),
    )
    whole = tape.like(node, [buffer, numbers, *rest])
    whole_scales = tape.like(node, [past_scales, scales, *rest])
    expanded = tape.op("Mul", tape.op("Cast", whole, to=ir.DataType.FLOAT), whole_scales)
    whole.type, whole.shape = ir.TensorType(ir.DataType.INT8), output.shape
    whole_scales.type, whole_scales.shape = past_scales.type, ir.Shape([*output.shape[:-1], 1])
    whole.name, whole_scales.name, output.name = output.name, f"{output.name}_scale", None
    buffer.type = whole.type
    model.graph.outputs[:] = [whole if item is output else item for item in model.graph.outputs]
    model.graph.outputs.append(whole_scales)
    model.graph.inputs.append(past_scales)
    output.replace_all_uses_with(expanded)
    model.graph.remove(node, safe=True)
    return {str(value.name): value for value in (past_scales, whole, whole_scales)}


def probe(model: ir.Model, declared: Graph) -> ir.Model:
    """Let a graph of :func:`store_in_int8` attend to given int8 instead of what it makes of its new keys and values.

    For each tensor of the past, this adds the input ``given_NAME``, and the outputs ``made_NAME``, which the graph
    would store, and ``new_NAME``, the keys or values before they are rounded. All but the former are continuous.
    """
    outputs = {str(value.name): value for value in model.graph.outputs}
    for past, present in declared.growing_pairs():
        for suffix in ("", "_scale"):
            node = outputs[present.name + suffix].producer()
            assert node is not None
            numbers = node.inputs[1]
            assert numbers is not None
            instead = ir.Value(name=f"{GIVEN}{past.name}{suffix}", type=outputs[present.name + suffix].type)
            node.replace_input_with(1, instead)
            model.graph.inputs.append(instead)
            if not suffix:
                divided: Any = numbers.producer()  # Cast, Round and Div of the number by its scale
                new = divided.inputs[0].producer().inputs[0].producer().inputs[0]
                new.name, new.type = f"{NEW}{past.name}", ir.TensorType(ir.DataType.FLOAT)
                model.graph.outputs.append(new)
            numbers.name, numbers.type = f"{MADE}{past.name}{suffix}", instead.type
            model.graph.outputs.append(numbers)
    return model


def probed(declared: Graph) -> Graph:
    """Return the declaration of the graph of :func:`probe`."""
    stored = declared.with_int8_cache()
    (past,) = (item for item in stored.pasts if isinstance(item, KeyValues))
    instead, numbers, new = (
        replace(past, name=f"{part}{past.name}", length="sequence", in_int8=part != NEW) for part in (GIVEN, MADE, NEW)
    )
    inputs, outputs = (*stored.inputs, instead), (*stored.outputs, numbers, new)
    return replace(stored, name=f"{stored.name}{PROBE}", inputs=inputs, outputs=outputs)
