"""Profiles: graphs rewritten to update caches in place and to compute only the requested logits.

A traced decoder concatenates the past and the new tokens in new memory at every step, and computes logits for every
token of a prompt although only the last are used. The rewritten graph writes new keys and values into the caller's
buffers, and takes the number of logits to compute as an input. For the CPU, it also scales queries before attention.
The rewrites use only the declared past and the graph's nodes, work for any architecture, and produce standard
operators. If a graph does not match the pattern of one of the first two, it is left as traced, and its metadata says
why.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from zoo.artifact import OPENVINO
from zoo.contract import Graph
from zoo_export.graph.flatten import flatten
from zoo_export.graph.inference import infer_types
from zoo_export.graph.metadata import contract
from zoo_export.graph.rewriting import MisfitError, Tape, replace
from zoo_runtime.onnx_runtime.buffers import PAST_LENGTH
from zoo_runtime.onnx_runtime.executor import LOGITS_TO_KEEP

__all__ = ["specialise"]

CAPACITY, KEPT = "capacity", "kept"
"""Dynamic dimensions: the length of the buffers, and the number of positions with logits."""
_POINTWISE = {"Add", "Mul", "Div", "Sub", "Tanh", "Cast"}
"""Operators allowed between the last product of a head and the logits."""


def specialise(model: ir.Model, declared: Graph, profile: str) -> ir.Model:
    """Rewrite a graph without functions for the profile ``cpu``, ``cuda`` or ``openvino``.

    The result has up to two inputs in addition to the declared ones, both int64 scalars. OpenVINO extends caches in
    place by itself, so its graphs have the second alone.

    - ``past_length``: the number of filled positions in the caches ``past_key_values.N.*``, which are buffers (batch,
      heads, capacity, size). ``present.N.*`` are the same buffers, with new tokens written after the filled positions.
    - ``logits_to_keep``: the number of last positions to compute logits for; 0 means all.
    """
    notes = {}
    if declared.pasts:
        rewrites = {"zoo.cache": _write_in_place, "zoo.logits": _keep_logits}
        if profile == OPENVINO:
            del rewrites["zoo.cache"]
        for key, rewrite in rewrites.items():
            changed = model.clone()  # a misfit is found in the middle of a rewrite
            try:
                rewrite(changed, declared)
            except MisfitError as misfit:
                notes[key] = f"as traced: {misfit}"
            else:
                model = changed
    flatten(model)
    if declared.pasts and profile == "cpu":
        _scale_queries(model)
    ir.passes.Sequential(passes.CommonSubexpressionEliminationPass(), passes.RemoveUnusedNodesPass())(model)
    model.metadata_props.update({"zoo.profile": profile, "zoo.contract": contract(model), **notes})
    return model


def _write_in_place(model: ir.Model, declared: Graph) -> None:
    """Write new keys and values into the buffers of the past, after ``past_length`` positions."""
    pairs = declared.growing_pairs()
    if not pairs:
        raise MisfitError("the past has no keys and values")
    specs = [spec for spec, _ in pairs]
    named = {value.name: value for value in (*model.graph.inputs, *model.graph.outputs)}
    buffers = [named[spec.name] for spec in specs]
    readers = [tuple(buffer.uses()) for buffer in buffers]
    axis = specs[0].dims.index(str(declared.past_length))
    caches = _Caches(model, buffers[0], axis, len(specs[0].dims))
    for buffer, nodes in zip(buffers, readers, strict=True):
        for node, _ in nodes:
            if node.op_type == "Shape":
                caches.use_length(node, caches.length)
            elif node.op_type == "Concat":
                caches.write(node, buffer)
            else:
                raise MisfitError(f"{buffer.name} is read by {node.op_type}")
    outputs = {value.name: value for value in model.graph.outputs}
    for (spec, present), buffer in zip(pairs, buffers, strict=True):
        written = outputs[present.name]
        maker = written.producer()
        if maker is None or maker.op_type != "TensorScatter" or maker.inputs[0] is not buffer:
            raise MisfitError(f"{present.name} does not extend {spec.name}")
        buffer.shape = ir.Shape(CAPACITY if place == axis else dim for place, dim in enumerate(spec.dims))
        written.shape = buffer.shape


class _Caches:
    """Shared values of a graph's cache buffers, and the rewriting of the nodes that read the buffers."""

    def __init__(self, model: ir.Model, first: ir.Value, axis: int, rank: int) -> None:
        self.axis = axis
        self.rank = rank
        self.types = infer_types(model)
        self.graph = model.graph
        number = _number(PAST_LENGTH)
        self.graph.inputs.append(number)
        tape = Tape(self.graph[0], after=False)
        self.length = tape.op("Reshape", number, tape.integers(-1))
        self.places = tape.op("Expand", self.length, tape.op("Shape", first, start=0, end=1))
        self.capacity = tape.op("Shape", first, start=axis, end=axis + 1)
        self.masks: dict[ir.Value, ir.Value] = {}

    def use_length(self, node: ir.Node, length: ir.Value) -> None:
        """Replace a node that reads the length from a buffer's shape by the filled length."""
        start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", self.rank)
        start, end = (place + self.rank if place < 0 else place for place in (start, end))
        if (start, end) == (self.axis, self.axis + 1):
            replace(node, length)
        elif start <= self.axis < end:
            raise MisfitError("the length of the past is read together with other sizes")

    def write(self, node: ir.Node, buffer: ir.Value) -> None:
        """Replace the concatenation of past and present by a node that writes the present after the past."""
        axis = node.attributes.get_int("axis", 0)
        if axis % self.rank != self.axis or len(node.inputs) != 2 or node.inputs[0] is not buffer:
            raise MisfitError(f"{buffer.name} is not concatenated with one new tensor")
        new, joined = node.inputs[1], node.outputs[0]
        assert new is not None
        for reader, place in tuple(joined.uses()):
            if reader.op_type == "Shape":
                tape = Tape(reader, after=False)
                added = tape.op("Shape", new, start=self.axis, end=self.axis + 1)
                self.use_length(reader, tape.op("Add", self.length, added))
            elif reader.op_type == "Attention" and place in (1, 2):
                self._mask_unused(reader)
            else:
                raise MisfitError(f"keys or values are read by {reader.op_type}")
        tape = Tape(node, after=False)
        replace(node, tape.op("TensorScatter", buffer, new, self.places, axis=self.axis, mode="linear"))

    def _mask_unused(self, node: ir.Node) -> None:
        """Pad the mask of an attention to hide the unused end of the buffers."""
        mask = node.inputs[3] if len(node.inputs) > 3 else None
        if mask is None or node.attributes.get_int("is_causal", 0) == 1:
            raise MisfitError("attention over the past has no mask")
        if mask in self.masks.values():
            return
        if mask not in self.masks:
            kind, _ = self.types[str(mask.name)]
            tape = Tape(mask.producer() or self.capacity.producer(), after=True)
            room = tape.op("Sub", self.capacity, tape.op("Shape", mask, start=-1))
            pads = tape.op("Concat", tape.integers(0), room, axis=0)
            hidden = np.zeros((), bool) if kind == np.bool_ else np.array(-np.inf, kind)
            self.masks[mask] = tape.op("Pad", mask, pads, tape.constant(hidden), tape.integers(-1))
        node.replace_input_with(3, self.masks[mask])


def _keep_logits(model: ir.Model, declared: Graph) -> None:
    """Slice the input of the language-model head to the last ``logits_to_keep`` positions."""
    logits = next((value for value in model.graph.outputs if value.name == "logits"), None)
    spec = next((tensor for tensor in declared.output_tensors() if tensor.name == "logits"), None)
    if logits is None or spec is None or spec.dims[:2] != ("batch", "sequence"):
        raise MisfitError("there are no logits per token")
    head = _head_input(logits)
    maker = head.producer()
    if maker is None:
        raise MisfitError("the head reads an input of the graph")
    number = _number(LOGITS_TO_KEEP)
    model.graph.inputs.append(number)
    readers = tuple(head.uses())
    tape = Tape(maker, after=True)
    start = tape.op("Neg", tape.op("Reshape", number, tape.integers(-1)))
    last = tape.op("Slice", head, start, tape.integers(np.iinfo(np.int64).max), tape.integers(1))
    for node, place in readers:
        if _reached(node) <= {logits}:
            node.replace_input_with(place, last)
    logits.shape = ir.Shape(("batch", KEPT, *spec.dims[2:]))


def _scale_queries(model: ir.Model) -> None:
    """Let attention multiply queries by keys without a factor, by scaling the queries before it.

    A step of one token takes ONNX Runtime's CPU kernel about 0.7 of the time without a factor: see docs/benchmarks.md.
    """
    types = infer_types(model)
    for node in [node for node in model.graph if node.op_type == "Attention"]:
        query = node.inputs[0]
        assert query is not None
        kind, shape = types.get(str(query.name), (None, ()))
        if kind != np.float32 or len(shape) != 4 or not isinstance(shape[3], int):
            continue
        scale = node.attributes.get_float("scale", shape[3] ** -0.5)
        if scale != 1:
            tape = Tape(node, after=False)
            node.replace_input_with(0, tape.op("Mul", query, tape.constant(np.array(scale, kind))))
            node.attributes["scale"] = ir.AttrFloat32("scale", 1.0)


def _head_input(logits: ir.Value) -> ir.Value:
    """Return the input of the last product before the logits, before it is reshaped to a matrix."""
    value = logits
    while True:
        node = value.producer()
        data = [] if node is None else [item for item in node.inputs if item is not None and _is_computed(item)]
        if node is None or not data:
            raise MisfitError("the logits are not a matrix product")
        if node.op_type in ("Gemm", "MatMul"):
            flat = data[0].producer()
            assert flat is not None
            return flat.inputs[0] or data[0] if flat.op_type == "Reshape" else data[0]
        if node.op_type != "Reshape" and (node.op_type not in _POINTWISE or len(data) > 1):
            raise MisfitError(f"{node.op_type} comes before the logits")
        value = data[0]


def _is_computed(value: ir.Value) -> bool:
    maker = value.producer()
    return maker is not None and maker.op_type != "Constant"


def _reached(node: ir.Node) -> set[ir.Value]:
    """Return the graph outputs that depend on a node."""
    outputs: set[ir.Value] = set()
    queue, seen = [node], {node}
    while queue:
        current = queue.pop()
        for value in current.outputs:
            if value.is_graph_output():
                outputs.add(value)
            for reader, _ in value.uses():
                if reader not in seen:
                    seen.add(reader)
                    queue.append(reader)
    return outputs


def _number(name: str) -> ir.Value:
    """Create an input for an integer scalar."""
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
