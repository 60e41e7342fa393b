"""Graphs for the way they are run: a cache that grows in place, and logits only where they are asked for.

A decoder as traced joins its past and the new tokens in new memory each time, and computes logits at every token of a
prompt though one is read. Rewritten, it writes the new keys and values into buffers that the caller owns, and takes how
many logits are wanted. Both are found from the declared past and the graph's nodes alone, for any architecture, with
standard operators only; where a graph does not fit it stays as it was, and its metadata says why.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes import common as passes

from zoo.contract import Graph
from zoo_export.flatten import flatten
from zoo_export.graph_file import contract, parse, serialize
from zoo_export.in_place import PAST_LENGTH
from zoo_export.pipeline import LOGITS_TO_KEEP
from zoo_export.rewriting import Tape, replace

__all__ = ["specialise"]

CAPACITY, KEPT = "capacity", "kept"
"""Free dimensions: the length of the buffers, and how many positions have logits."""
_POINTWISE = {"Add", "Mul", "Div", "Sub", "Tanh", "Cast"}
"""What may come between the last product of a head and its logits."""


class _MisfitError(Exception):
    """The graph is not built as a rewriting needs it."""


def specialise(graph: bytes, declared: Graph, profile: str) -> bytes:
    """Rewrite a serialised graph without functions for a profile other than the portable one.

    Inputs of the result, beside those of the declaration: ``past_length``, an int64 number, where the caches
    ``past_key_values.N.*`` are buffers (batch, heads, capacity, size) of which that many positions are filled, and
    ``present.N.*`` are the same buffers with the new tokens written behind them; and ``logits_to_keep``, an int64
    number, where only so many last positions have logits, all of them for 0.
    """
    model = ir.from_proto(parse(graph))
    notes = {}
    if declared.past is not None:
        for key, rewrite in (("zoo.cache", _write_in_place), ("zoo.logits", _keep_logits)):
            changed = model.clone()
            try:
                rewrite(changed, declared)
            except _MisfitError as misfit:
                notes[key] = f"as traced: {misfit}"
            else:
                model = changed
    flatten(model)
    passes.CommonSubexpressionEliminationPass()(model)
    passes.RemoveUnusedNodesPass()(model)
    model.metadata_props.update({"zoo.profile": profile, "zoo.contract": contract(model), **notes})
    return serialize(ir.to_proto(model))


def _write_in_place(model: ir.Model, declared: Graph) -> None:
    """Write new keys and values into the buffers of the past, behind ``past_length`` positions."""
    assert declared.past is not None
    specs = declared.past.tensors()
    named = {value.name: value for value in (*model.graph.inputs, *model.graph.outputs)}
    buffers = [named[spec.name] for spec in specs]
    readers = [tuple(buffer.uses()) for buffer in buffers]
    axis = specs[0].dims.index(declared.past.length)
    caches = _Caches(model, buffers[0], axis, len(specs[0].dims))
    for buffer, nodes in zip(buffers, readers, strict=True):
        for node, _ in nodes:
            if node.op_type == "Shape":
                caches.tell_length(node, caches.length)
            elif node.op_type == "Concat":
                caches.write(node, buffer)
            else:
                raise _MisfitError(f"{buffer.name} is read by {node.op_type}")
    outputs = {value.name: value for value in model.graph.outputs}
    for spec, buffer, present in zip(specs, buffers, declared.present_tensors(), strict=True):
        written = outputs[present.name]
        maker = written.producer()
        if maker is None or maker.op_type != "TensorScatter" or maker.inputs[0] is not buffer:
            raise _MisfitError(f"{present.name} is not {spec.name} and what follows")
        buffer.shape = ir.Shape(CAPACITY if place == axis else dim for place, dim in enumerate(spec.dims))
        written.shape = buffer.shape


class _Caches:
    """What the buffers of one graph have in common, and the rewriting of the nodes that read them."""

    def __init__(self, model: ir.Model, first: ir.Value, axis: int, rank: int) -> None:
        self.axis, self.rank = axis, rank
        self.kinds = _element_types(model)
        self.graph = model.graph
        number = _number(PAST_LENGTH)
        self.graph.inputs.append(number)
        tape = Tape(self.graph[0], after=False)
        self.length = tape.op("Reshape", number, tape.integers(-1))
        self.places = tape.op("Expand", self.length, tape.op("Shape", first, start=0, end=1))
        self.capacity = tape.op("Shape", first, start=axis, end=axis + 1)
        self.masks: dict[ir.Value, ir.Value] = {}

    def tell_length(self, node: ir.Node, length: ir.Value) -> None:
        """Let a node that reads the length off a buffer's shape have the filled length instead."""
        start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", self.rank)
        start, end = (place + self.rank if place < 0 else place for place in (start, end))
        if (start, end) == (self.axis, self.axis + 1):
            replace(node, length)
        elif start <= self.axis < end:
            raise _MisfitError("the length of the past is read with other sizes")

    def write(self, node: ir.Node, buffer: ir.Value) -> None:
        """Turn the node that joins past and present into one that writes the present behind the past."""
        axis = node.attributes.get_int("axis", 0)
        if axis % self.rank != self.axis or len(node.inputs) != 2 or node.inputs[0] is not buffer:
            raise _MisfitError(f"{buffer.name} is joined with something else")
        new, joined = node.inputs[1], node.outputs[0]
        assert new is not None
        for reader, place in tuple(joined.uses()):
            if reader.op_type == "Shape":
                tape = Tape(reader, after=False)
                added = tape.op("Shape", new, start=self.axis, end=self.axis + 1)
                self.tell_length(reader, tape.op("Add", self.length, added))
            elif reader.op_type == "Attention" and place in (1, 2):
                self._hide_the_rest(reader)
            else:
                raise _MisfitError(f"keys or values are read by {reader.op_type}")
        tape = Tape(node, after=False)
        replace(node, tape.op("TensorScatter", buffer, new, self.places, axis=self.axis, mode="linear"))

    def _hide_the_rest(self, node: ir.Node) -> None:
        """Lengthen the mask of an attention so that nobody sees the free end of the buffers."""
        mask = node.inputs[3] if len(node.inputs) > 3 else None
        if mask is None or node.attributes.get_int("is_causal", 0) == 1:
            raise _MisfitError("attention over the past has no mask")
        if mask in self.masks.values():
            return
        if mask not in self.masks:
            kind = self.kinds[str(mask.name)]
            tape = Tape(mask.producer() or self.capacity.producer(), after=True)
            room = tape.op("Sub", self.capacity, tape.op("Shape", mask, start=-1))
            pads = tape.op("Concat", tape.integers(0), room, axis=0)
            hidden = np.zeros((), bool) if kind == np.bool_ else np.array(-np.inf, kind)
            self.masks[mask] = tape.op("Pad", mask, pads, tape.constant(hidden), tape.integers(-1))
        node.replace_input_with(3, self.masks[mask])


def _keep_logits(model: ir.Model, declared: Graph) -> None:
    """Cut what the language-model head reads down to the last ``logits_to_keep`` positions."""
    found = next((value for value in model.graph.outputs if value.name == "logits"), None)
    spec = next((tensor for tensor in declared.output_tensors() if tensor.name == "logits"), None)
    if found is None or spec is None or spec.dims[:2] != ("batch", "sequence"):
        raise _MisfitError("no logits of a sequence")
    head = _head_input(found)
    maker = head.producer()
    if maker is None:
        raise _MisfitError("the head reads an input")
    number = _number(LOGITS_TO_KEEP)
    model.graph.inputs.append(number)
    readers = tuple(head.uses())
    tape = Tape(maker, after=True)
    start = tape.op("Neg", tape.op("Reshape", number, tape.integers(-1)))
    kept = tape.op("Slice", head, start, tape.integers(np.iinfo(np.int64).max), tape.integers(1))
    for node, place in readers:
        if _reached(node) <= {found}:
            node.replace_input_with(place, kept)
    found.shape = ir.Shape(("batch", KEPT, *spec.dims[2:]))


def _head_input(logits: ir.Value) -> ir.Value:
    """What the last product before the logits is a product of, before it is made a matrix."""
    value = logits
    while True:
        node = value.producer()
        data = [] if node is None else [item for item in node.inputs if item is not None and _is_computed(item)]
        if node is None or not data:
            raise _MisfitError("the logits are no product")
        if node.op_type in ("Gemm", "MatMul"):
            flat = data[0].producer()
            assert flat is not None
            return flat.inputs[0] or data[0] if flat.op_type == "Reshape" else data[0]
        if node.op_type != "Reshape" and (node.op_type not in _POINTWISE or len(data) > 1):
            raise _MisfitError(f"{node.op_type} comes before the logits")
        value = data[0]


def _is_computed(value: ir.Value) -> bool:
    maker = value.producer()
    return maker is not None and maker.op_type != "Constant"


def _reached(node: ir.Node) -> set[ir.Value]:
    """The outputs of the graph that depend on a node."""
    found: set[ir.Value] = set()
    queue, seen = [node], {node}
    while queue:
        current = queue.pop()
        for value in current.outputs:
            if value.is_graph_output():
                found.add(value)
            for reader, _ in value.uses():
                if reader not in seen:
                    seen.add(reader)
                    queue.append(reader)
    return found


def _element_types(model: ir.Model) -> dict[str, np.dtype[Any]]:
    """What each value of a graph consists of, as far as ONNX infers it."""
    proto = onnx.shape_inference.infer_shapes(ir.to_proto(model))
    return {
        value.name: onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        for value in (*proto.graph.value_info, *proto.graph.input, *proto.graph.output)
    }


def _number(name: str) -> ir.Value:
    """A new input that is one integer."""
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
