"""The profile ``serving``: graphs of fixed sizes in which every row of a batch has a past of its own length.

A portable decoder is exact for rows with padding on the left, which is how rows of different lengths share a batch. The
rewrite starts from that. With P = C - T tokens before the T new ones, where C is the capacity of the caches, a row with
fewer past tokens is a row with padding before them. Masks, positions, windows and biases are computed by the model's
own nodes, for any architecture. Two things change:

- The padding mask is no input, but is computed from the lengths.
- Caches are buffers in which the tokens of a row occupy the slots from 0 on, so that nothing moves when a row grows.
  The order of the slots is a rotation of the order that the model sees. Attention does not depend on the order of its
  keys, so only masks and biases are rotated. For other readers of keys and values, these are rotated themselves.

Slots that hold no token of a row are hidden from every attention.

B batch, K key-value heads, T new tokens, C capacity, P = C - T, D head size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from zoo.artifact import SERVING
from zoo.contract import Graph, TensorSpec
from zoo.errors import UsageError, argument
from zoo.probe.pipeline import token_input
from zoo_export.graph.inference import infer_types
from zoo_export.graph.metadata import MODULE_KEY, contract, metadata
from zoo_export.graph.rewriting import MisfitError, Tape, replace
from zoo_export.graph.sizes import dynamic_node, fold_sizes
from zoo_export.graph.static import fix
from zoo_runtime.serving.names import CAPACITY, NEW_LENGTHS, PAST_LENGTHS, SIZES_KEY, read_sizes

__all__ = ["graph_sizes", "serve"]


def serve(model: ir.Model, declared: Graph, sizes: Mapping[str, int], own_sizes: Mapping[str, int]) -> ir.Model:
    """Rewrite a portable graph without functions, whose activations are matrices.

    A graph with a past has the inputs ``past_lengths`` and ``new_lengths``, int64 (B,), in place of its padding mask:
    the number of tokens of each row that the caches hold, and the number that the call adds, which stand at the start
    of the row's T places. A row with more than C - T tokens takes no part in a call: its logits are meaningless, and
    its caches and all other rows stay as they are.

    Args:
        model: the graph.
        declared: its declaration.
        sizes: the sizes of dimensions of the export, by name, ``capacity`` and ``sequence`` among them.
        own_sizes: those that this graph has otherwise.

    Raises:
        UsageError: the graph cannot be rewritten.
    """
    fixed = {**sizes, **own_sizes}
    try:
        if declared.pasts:
            built = _Serving(model, declared, fixed).build()
        else:
            built = fix(model, {name: fixed[name] for name in declared.dim_names() if name in fixed})
        _finish(built, sizes)
    except MisfitError as misfit:
        problem = f"graph {declared.name!r} cannot be exported for serving: {misfit}"
        raise UsageError(problem, argument("profile", SERVING), "export another profile") from misfit
    return built


def graph_sizes(graph: bytes) -> dict[str, int]:
    """Return the sizes of the export of a serialised serving graph, by name; empty for other graphs."""
    return read_sizes(metadata(graph).get(SIZES_KEY, "{}"))


class _Serving:
    """The rewriting of one decoder."""

    def __init__(self, model: ir.Model, declared: Graph, sizes: Mapping[str, int]) -> None:
        self.declared = declared
        self.capacity = sizes[CAPACITY]
        self.added = sizes["sequence"]
        self.before = self.capacity - self.added
        """P, the largest past of a row."""
        self.extended = declared.growing_pairs()
        self._replace_mask(model)
        fixed = {name: size for name, size in sizes.items() if name != CAPACITY}
        if declared.past_length is not None:
            fixed[declared.past_length] = self.before
        self.model = fix(model, fixed)
        self.types = infer_types(self.model)
        self.inputs = {str(value.name): value for value in self.model.graph.inputs}
        self.outputs = {str(value.name): value for value in self.model.graph.outputs}
        self.start = Tape(self.model.graph[0], after=False)
        """Nodes before all others."""
        self.past, self.new = self._lengths(self.start, self.inputs)
        """The lengths of the past and of the new tokens, (B,)."""

    def build(self) -> ir.Model:
        """Return the rewritten graph."""
        self._keep_states()
        if self.extended:
            self._rotate()
            self._write_in_place()
        return self.model

    # Lengths.

    def _lengths(self, tape: Tape, inputs: Mapping[str, ir.Value]) -> tuple[ir.Value, ir.Value]:
        """Cut the lengths to what fits."""
        zero, limits = tape.constant(np.array(0)), (self.before if self.extended else None, self.added)
        past, new = (
            tape.op("Max", inputs[name], zero)
            if limit is None
            else tape.op("Clip", inputs[name], zero, tape.constant(np.array(limit)))
            for name, limit in zip((PAST_LENGTHS, NEW_LENGTHS), limits, strict=True)
        )
        return past, new

    def _replace_mask(self, model: ir.Model) -> None:
        """Compute the padding mask, (B, C), or (B, T) without keys and values, from the lengths."""
        graph, declared = model.graph, self.declared
        spec = next((tensor for tensor in declared.input_tensors() if _covers_tokens(tensor, declared)), None)
        mask = next((value for value in graph.inputs if spec is not None and value.name == spec.name), None)
        if spec is not None and spec.padding == "right":
            raise MisfitError(f"{spec.name} allows padding on the right only")
        for tensor in declared.input_tensors():
            if "sequence" in tensor.dims and tensor not in (spec, _token_ids(declared)):
                raise MisfitError(f"{tensor.name} has entries for each token, beside the token ids")
        lengths = {
            name: ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["batch"]))
            for name in (PAST_LENGTHS, NEW_LENGTHS)
        }
        if mask is not None:
            tape = Tape(graph[0], after=False)
            past, new = self._lengths(tape, lengths)
            mask.replace_all_uses_with(tape.op("Cast", self._tokens(tape, past, new), to=ir.DataType.INT64))
            graph.inputs.remove(mask)
        elif self.extended:
            raise MisfitError("without a padding mask, all rows have pasts of one length")
        graph.inputs.extend(lengths.values())

    def _tokens(self, tape: Tape, past: ir.Value, new: ir.Value) -> ir.Value:
        """Return which places hold tokens, in the order that the model sees: (B, C), or (B, T)."""
        before = self.before if self.extended else 0
        places = tape.constant(np.arange(before + self.added)[None])
        last = tape.op("Add", tape.op("Unsqueeze", new, tape.integers(1)), tape.integers(before))
        before_end = tape.op("Less", places, last)
        if not self.extended:
            return before_end
        first = tape.op("Sub", tape.integers(before), tape.op("Unsqueeze", past, tape.integers(1)))
        return tape.op("And", before_end, tape.op("GreaterOrEqual", places, first))

    # States of fixed size.

    def _keep_states(self) -> None:
        """Reset the states of rows without a past, and keep those of rows without new tokens."""
        pairs = [pair for pair in self.declared.past_pairs() if pair not in self.extended]
        zero = self.start.constant(np.array(0))
        fresh, idle = (self.start.op("Equal", lengths, zero) for lengths in (self.past, self.new))
        for spec, present in pairs:
            state, after = self.inputs[spec.name], self.outputs[present.name]
            axes = self.start.integers(*range(1, len(spec.dims)))
            nothing = self.start.constant(np.zeros((), self.types[spec.name][0]))
            readers = tuple(state.uses())
            before = self.start.op("Where", self.start.op("Unsqueeze", fresh, axes), nothing, state)
            for node, place in readers:
                node.replace_input_with(place, before)
            tape = Tape(after.producer(), after=True)
            updated = tape.add(ir.node("Where", [tape.op("Unsqueeze", idle, axes), before, after]))
            _replace_output(self.model, after, updated)

    # Keys and values.

    def _rotate(self) -> None:
        """Relate slots to the order that the model sees."""
        tape = self.start
        places = np.arange(self.capacity)[None]
        size = tape.integers(self.capacity)
        padding = tape.op("Sub", tape.integers(self.before), tape.op("Unsqueeze", self.past, tape.integers(1)))
        after = tape.op("Add", tape.constant(places), padding)
        self.order = tape.op("Where", tape.op("Less", after, size), after, tape.op("Sub", after, size))
        """The place in the model's order of each slot, (B, C)."""
        before = tape.op("Sub", tape.constant(places), padding)
        self.slots = tape.op("Where", tape.op("Less", before, tape.integers(0)), tape.op("Add", before, size), before)
        """The slot of each place in the model's order, (B, C)."""
        self.tokens = tape.op("Unsqueeze", self._tokens(tape, self.past, self.new), tape.integers(1, 2))
        """Mask of the places that hold tokens, in the model's order, (B, 1, 1, C)."""
        over = tape.op("Greater", self.inputs[PAST_LENGTHS], tape.integers(self.before))
        self.full = tape.op("Unsqueeze", over, tape.integers(1, 2, 3))
        """Whether a row has no room for T tokens, (B, 1, 1, 1): its last slots are written as they are."""
        self.masks: dict[ir.Value, ir.Value] = {}
        """Masks and biases in the order of the slots, by those in the model's order."""

    def _write_in_place(self) -> None:
        """Write new keys and values into the buffers after the past of each row, and read them from there."""
        axis = self.extended[0][0].dims.index(str(self.declared.past_length))
        written: dict[ir.Value, ir.Value] = {}
        for spec, present in self.extended:
            buffer = self.inputs[spec.name]
            node = _extension(buffer, axis)
            new, joined = node.inputs[1], node.outputs[0]
            assert new is not None
            if self.outputs[present.name] is not joined:
                raise MisfitError(f"{present.name} does not extend {spec.name}")
            tape = Tape(node, after=False)
            last = tape.op(
                "Slice", buffer, tape.integers(self.before), tape.integers(self.capacity), tape.integers(axis)
            )
            tokens = tape.op("Where", self.full, last, new)
            written[joined] = tape.op("TensorScatter", buffer, tokens, self.past, axis=axis, mode="linear")
            buffer.shape = joined.shape = ir.Shape(
                self.capacity if place == axis else dim for place, dim in enumerate(buffer.shape or ())
            )
        attentions = [node for node in self.model.graph if node.op_type == "Attention" and self._sees(node, written)]
        for node in attentions:
            node.replace_input_with(3, self._mask(node))
        for (joined, buffer), (spec, _) in zip(written.items(), self.extended, strict=True):
            readers = [(node, place) for node, place in joined.uses() if node not in attentions]
            maker = joined.producer()
            assert maker is not None
            if readers:
                view = self._view(Tape(buffer.producer(), after=True), buffer, spec)
                for node, place in readers:
                    node.replace_input_with(place, view)
            replace(maker, buffer)

    def _sees(self, node: ir.Node, joined: Mapping[ir.Value, ir.Value]) -> bool:
        """Whether an attention reads its keys and values from a cache, and its mask covers all that it sees."""
        if any(node.inputs[place] not in joined for place in (1, 2)) or len(node.inputs) != 4:
            return False
        mask = node.inputs[3]
        shape = None if mask is None else self.types[str(mask.name)][1]
        causal = node.attributes.get_int("is_causal", 0) == 1
        if shape is None or len(shape) != 4 or not isinstance(shape[1], int) or causal:
            return False
        return shape[2:] == (self.added, self.capacity)

    def _mask(self, node: ir.Node) -> ir.Value:
        """Return the mask or bias of an attention in the order of the slots, (B, 1 or H, T, C)."""
        mask = node.inputs[3]
        assert mask is not None
        if mask not in self.masks:
            kind, (_, heads, *_) = self.types[str(mask.name)]
            assert isinstance(heads, int)  # see _sees
            maker = mask.producer()
            tape = self.start if maker is None else Tape(maker, after=True)
            if kind == np.bool_:
                hidden = tape.op("And", mask, self.tokens)
            else:
                hidden = tape.op("Where", self.tokens, mask, tape.constant(np.array(-np.inf, kind)))
            order = tape.op("Unsqueeze", self.order, tape.integers(1, 2))
            order = tape.op("Tile", order, tape.integers(1, heads, self.added, 1))
            self.masks[mask] = tape.op("GatherElements", hidden, order, axis=-1)
        return self.masks[mask]

    def _view(self, tape: Tape, buffer: ir.Value, spec: TensorSpec) -> ir.Value:
        """Return keys or values in the model's order, (B, K, C, D)."""
        slots = tape.op("Unsqueeze", self.slots, tape.integers(1, 3))
        slots = tape.op("Tile", slots, tape.integers(1, int(spec.dims[1]), 1, 1))
        return tape.op("GatherND", buffer, slots, batch_dims=2)


def _token_ids(declared: Graph) -> TensorSpec:
    name = token_input(declared)
    if name is None:
        raise MisfitError("it reads no token ids")
    return next(tensor for tensor in declared.input_tensors() if tensor.name == name)


def _covers_tokens(tensor: TensorSpec, declared: Graph) -> bool:
    return tensor.is_mask and tensor.dims[1] == declared.total_length


def _extension(buffer: ir.Value, axis: int) -> ir.Node:
    """Return the node that appends the new tokens to a buffer. No other may read it."""
    readers = [node for node, _ in buffer.uses()]
    if len(readers) != 1 or readers[0].op_type != "Concat":
        names = ", ".join(sorted({node.op_type for node in readers})) or "no node"
        raise MisfitError(f"{buffer.name} is read by {names}, which does not only append tokens to it")
    (node,) = readers
    place = node.attributes.get_int("axis", 0) % len(buffer.shape or ())
    if place != axis or len(node.inputs) != 2 or node.inputs[0] is not buffer:
        raise MisfitError(f"{buffer.name} is not followed by the new tokens alone")
    return node


def _replace_output(model: ir.Model, old: ir.Value, new: ir.Value) -> None:
    """Let a graph return another value under the same name. Its nodes still read the old one."""
    name, old.name = old.name, f"{old.name}/computed"
    new.name, new.type, new.shape = name, old.type, old.shape
    model.graph.outputs[:] = [new if item is old else item for item in model.graph.outputs]


def _finish(model: ir.Model, sizes: Mapping[str, int]) -> None:
    """Fold what depends on sizes alone, check that all are fixed, and describe the graph."""
    fold_sizes(model)
    node = dynamic_node(model)
    if node is not None:
        module = node.metadata_props.get(MODULE_KEY)
        raise MisfitError(f"{node.op_type} of {module or 'the model'} has a size that is not fixed")
    entries = {"zoo.profile": SERVING, "zoo.contract": contract(model), SIZES_KEY: json.dumps(dict(sizes))}
    model.metadata_props.pop("zoo.fixed", None)
    model.metadata_props.update(entries)
