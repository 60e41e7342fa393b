"""Generation in one graph: token ids in, token ids out, for any runtime with the standard operators.

:func:`make_loop` builds the graph from exported graphs. Earlier graphs (an encoder) run once. The decoder is the body
of a ``Loop``: its first step reads the prompt with an empty past, each later step the previous token. So the graph
contains the decoder once, and its initialisers refer to the stored weights.

Inputs in addition to the model's own, in this order; all but the first have defaults and may be omitted:

``max_new_tokens``
    int64 scalar, the maximum number of new tokens. Generation also ends when every row has ended, or when the model
    runs out of positions (``max_seq_len`` minus the length of the prompt, including padding).
``temperature``
    float32 scalar. 0, the default, takes the likeliest token, in a tie the one with the lowest id.
``top_k``
    int64 scalar. When sampling, exclude tokens less likely than the k-th; 0, the default, excludes none.
``noise``
    float32 (batch or 1, at least the number of new tokens), uniform in [0, 1). Each number determines one token, so
    the same noise gives the same text on every runtime. Sampling with too little noise fails with an index error.
``eos_token_id``
    int64 scalar, the end token; by default the configuration's, or -1 (no token) if it has none. If the configuration
    has several end tokens, a vector of them.

The output ``generated_ids`` is int64 (batch, new_tokens). Rows that have ended are filled with ``eos_token_id``, or the
first of several.

Sampling inverts the cumulative distribution in float64: with w = exp((logits - max) / temperature), 0 for excluded
tokens, the result is the first token for which w_0 + ... + w_token exceeds noise x the sum of all w.

Prompts may be padded anywhere: each row is packed to the right before the decoder reads it, so results do not depend on
padding. A row of only padding gives meaningless tokens and does not affect other rows. A prompt that uses all positions
gives no tokens. The caller must check that prompts are not too long and that their tokens exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from zoo.arrays import Array
from zoo.artifact import EVIDENCE_KEY, LOOP
from zoo.contract import Graph, TensorSpec
from zoo.registry import ModelSpec
from zoo_export.graph.nodes import Nodes
from zoo_export.variants.loop.parts import GraphParts
from zoo_export.variants.loop.sampling import choose_token, last_row
from zoo_runtime.generation.loop import LOOP_OUTPUT, LoopPlan, plan_loop

__all__ = ["make_loop"]


def make_loop(spec: ModelSpec, graphs: Mapping[str, ir.Model]) -> ir.Model:
    """Combine a model's exported graphs into one that generates.

    Args:
        spec: the model that the graphs were exported from.
        graphs: all declared graphs by name. They are not modified.

    Returns:
        A model to be written beside the weights. Its initialisers refer to the same stored tensors as those of
        ``graphs``, without duplicates.

    Raises:
        UsageError: the model cannot generate.
    """
    return _Loop(plan_loop(spec), graphs).build()


class _Loop:
    """Builder of the combined model."""

    def __init__(self, plan: LoopPlan, graphs: Mapping[str, ir.Model]) -> None:
        self.plan = plan
        self.parts = GraphParts({graph.name: graphs[graph.name] for graph in (*plan.earlier, plan.decoder)})
        self.inputs: dict[str, ir.Value] = {}
        self.values: dict[str, ir.Value] = {}
        """Values available in the main graph, by declared name."""
        self.op = Nodes("loop")
        decoder = self.parts.models[plan.decoder.name].graph
        self.dtypes = {value.name: value.dtype or ir.DataType.FLOAT for value in decoder.inputs}
        """The dtypes of the decoder's inputs."""

    def build(self) -> ir.Model:
        """Build the model."""
        plan, op = self.plan, self.op
        for graph in plan.earlier:
            self._run_once(graph)
        for tensor in plan.constants:
            self._input(tensor, plan.decoder)
        ids, mask, batch = self._prompt()
        self._settings()
        trips = self.inputs["max_new_tokens"]
        if plan.longest is not None:
            length = op("Squeeze", op("Shape", ids, start=1, end=2))
            trips = op("Min", trips, op("Sub", op.constant(plan.longest), length))
        nothing = op("Concat", batch, op.constant([0]), axis=0)
        state = [
            ids,
            *([mask] if mask else []),
            op("Expand", op.constant(False, ir.DataType.BOOL), batch),
            op("ConstantOfShape", nothing, value=ir.tensor(np.zeros(1, np.int64))),
            *self._empty_past(batch),
        ]
        body = self._body(bool(mask))
        going = op.constant(True, ir.DataType.BOOL)
        results = op.several("Loop", [trips, going, *state], len(state), body=body)
        generated = results[3 if mask else 2]
        generated.name = LOOP_OUTPUT
        generated.type, generated.shape = ir.TensorType(ir.DataType.INT64), ir.Shape(["batch", "new_tokens"])
        generated.doc_string = "New tokens of each row; rows that have ended are filled with eos_token_id."
        return self._model(generated)

    def _model(self, generated: ir.Value) -> ir.Model:
        like = self.parts.models[self.plan.decoder.name]
        graph = ir.Graph(
            list(self.inputs.values()), [generated], nodes=self.op.nodes,
            initializers=list(self.parts.initializers.values()), opset_imports=self.parts.opsets, name=LOOP,
        )  # fmt: skip
        model = ir.Model(
            graph, ir_version=like.ir_version, producer_name=like.producer_name,
            producer_version=like.producer_version, functions=list(self.parts.functions.values()),
        )  # fmt: skip
        model.metadata_props.update({k: v for k, v in like.metadata_props.items() if k != EVIDENCE_KEY})
        return ir.passes.Sequential(passes.RemoveUnusedNodesPass(), passes.RemoveUnusedFunctionsPass())(model).model

    def _input(self, tensor: TensorSpec, graph: Graph) -> None:
        """Create an input of the combined model for a declared input, unless an earlier graph computes it."""
        if tensor.name not in self.values:
            like = next(value for value in self.parts.models[graph.name].graph.inputs if value.name == tensor.name)
            value = ir.Value(name=tensor.name, type=like.type, shape=ir.Shape(tensor.dims))
            self.inputs[tensor.name] = self.values[tensor.name] = value

    def _run_once(self, graph: Graph) -> None:
        for tensor in graph.input_tensors():
            self._input(tensor, graph)
        nodes, outputs = self.parts.take(graph, self.values)
        self.op.nodes += nodes
        self.values |= outputs

    def _prompt(self) -> tuple[ir.Value, ir.Value | None, ir.Value]:
        """Create the tokens and the mask of the first step, and the number of rows, (1,)."""
        plan, op = self.plan, self.op
        tensors = {tensor.name: tensor for tensor in plan.decoder.input_tensors()}
        if plan.start is None:
            for name in filter(None, (plan.ids, plan.mask)):
                dims = ("batch", "sequence")
                self._input(TensorSpec(name=name, dims=dims, dtype=tensors[name].dtype), plan.decoder)
            ids = self.values[plan.ids]
            batch = op("Shape", ids, start=0, end=1)
            return (*self._pack(ids, self.values[plan.mask] if plan.mask else None), batch)
        rows, axis = next(
            (value, axis)
            for value in self.inputs.values()
            for axis, dim in enumerate(value.shape or ())
            if dim == "batch"
        )
        batch = op("Shape", rows, start=axis, end=axis + 1)
        one_each = op("Concat", batch, op.constant([1]), axis=0)
        mask = op("Expand", op.constant(1), one_each) if plan.mask else None
        return op("Expand", op.constant(plan.start), one_each), mask, batch

    def _pack(self, ids: ir.Value, mask: ir.Value | None) -> tuple[ir.Value, ir.Value | None]:
        """Move the tokens of each row to the right end, in order, so that every row's last token is at the end."""
        if mask is None:
            return ids, None
        op = self.op
        mask = op("Cast", op("Cast", mask, to=ir.DataType.BOOL), to=ir.DataType.INT64)
        length = op("Shape", ids, start=1, end=2)
        places = op("Range", op.constant(0), op("Squeeze", length), op.constant(1))
        keys = op("Add", op("Mul", mask, length), places)  # padding first; no two are equal
        _, order = op.several("TopK", [keys, length], 2, axis=1, largest=0, sorted=1)
        return op("GatherElements", ids, order, axis=1), op("GatherElements", mask, order, axis=1)

    def _settings(self) -> None:
        """Create the loop's own inputs. Those with defaults are also initialisers."""
        settings: tuple[tuple[str, Array | None, list[str | int], str], ...] = (
            ("max_new_tokens", None, [], "Maximum number of new tokens."),
            ("temperature", np.array(0, np.float32), [], "Sampling temperature; 0 takes the likeliest token."),
            ("top_k", np.array(0, np.int64), [], "Number of likeliest tokens to sample from; 0 for all."),
            ("noise", np.zeros((1, 0), np.float32), ["noise_batch", "noise_tokens"],
             "Uniform random numbers in [0, 1), one for each new token, for each row or for all rows."),
            ("eos_token_id", np.array(self.plan.end, np.int64), [] if isinstance(self.plan.end, int) else ["ends"],
             "End token or tokens; -1 for none."),
        )  # fmt: skip
        for name, default, dims, meaning in settings:
            dtype = ir.DataType.from_numpy(default.dtype) if default is not None else ir.DataType.INT64
            value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(dims), doc_string=meaning)
            self.inputs[name] = value
            if default is not None:
                value.const_value = ir.tensor(default, name=name)
                self.parts.initializers[name] = value

    def _empty_past(self, batch: ir.Value) -> list[ir.Value]:
        decoder = self.plan.decoder
        sizes = {"batch": batch, str(decoder.past_length): self.op.constant([0])}
        empty: dict[tuple[Any, ...], ir.Value] = {}
        for tensor in decoder.past_tensors():
            dtype = self.dtypes[tensor.name]
            if (tensor.dims, dtype) not in empty:
                shape = [self.op.constant([dim]) if isinstance(dim, int) else sizes[dim] for dim in tensor.dims]
                zero = ir.tensor(np.zeros(1, dtype.numpy()))
                empty[tensor.dims, dtype] = self.op("ConstantOfShape", self.op("Concat", *shape, axis=0), value=zero)
        return [empty[tensor.dims, self.dtypes[tensor.name]] for tensor in decoder.past_tensors()]

    def _body(self, masked: bool) -> ir.Graph:
        """Build the loop's body: run the decoder on the newest tokens, then choose the next."""
        plan, op = self.plan, self.op.inner()
        integer, boolean = ir.DataType.INT64, ir.DataType.BOOL

        def state(name: str, dtype: ir.DataType, *dims: str | int) -> ir.Value:
            return ir.Value(name=f"loop/{name}", type=ir.TensorType(dtype), shape=ir.Shape(dims))

        step, going = state("step", integer), state("going", boolean)
        ids = state("ids", integer, "batch", "step_tokens")
        mask = state("mask", integer, "batch", "seen") if masked else None
        done, generated = state("done", boolean, "batch"), state("generated", integer, "batch", "so_far")
        shapes = {value.name: value.shape or () for value in self.parts.models[plan.decoder.name].graph.inputs}
        pasts = {t.name: state(t.name, self.dtypes[t.name], *shapes[t.name]) for t in plan.decoder.past_tensors()}
        values = self.values | pasts | {plan.ids: ids} | ({plan.mask: mask} if plan.mask and mask else {})
        nodes, outputs = self.parts.take(plan.decoder, values)
        op.nodes += nodes
        token = choose_token(op, last_row(op, outputs["logits"]), step, done, self.inputs)
        ends = end = self.inputs["eos_token_id"]
        if isinstance(plan.end, tuple):
            end = op("Gather", ends, op.constant(0))
        token = op("Where", done, end, token)
        if isinstance(plan.end, tuple):
            alike = op("Equal", op("Unsqueeze", token, op.constant([1])), ends)
            ended = op("Cast", op("ReduceMax", op("Cast", alike, to=integer), op.constant([1]), keepdims=0), to=boolean)
        else:
            ended = op("Equal", token, end)
        now_done = op("Or", done, ended)
        all_done = op("ReduceMin", op("Cast", now_done, to=integer), keepdims=0)
        column = op("Unsqueeze", token, op.constant([1]))
        results = [
            op("Not", op("Cast", all_done, to=boolean)),
            column,
            *([self._next_mask(op, mask, column)] if mask else []),
            now_done,
            op("Concat", generated, column, axis=1),
            *(outputs[tensor.name] for tensor in plan.decoder.present_tensors()),
        ]
        inputs = [step, going, ids, *([mask] if mask else []), done, generated, *pasts.values()]
        for value, like in zip(results, inputs[1:], strict=True):
            value.type = like.type
            value.shape = ir.Shape(
                [dim if dim == "batch" or isinstance(dim, int) else None for dim in like.shape or ()]
            )
        return ir.Graph(inputs, results, nodes=op.nodes, name="step")

    def _next_mask(self, op: Nodes, mask: ir.Value, column: ir.Value) -> ir.Value:
        """Create the mask of the next step: that of all tokens, or of the new one if the past has no keys."""
        new = op("Expand", op.constant(1), op("Shape", column))
        return op("Concat", mask, new, axis=1) if self.plan.decoder.past_length else new
