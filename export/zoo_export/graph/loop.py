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

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from zoo.arrays import Array
from zoo.artifact import LOOP
from zoo.contract import Graph, TensorSpec
from zoo.registry import ModelSpec
from zoo_export.graph.file import EVIDENCE_KEY
from zoo_runtime.generation.loop import LARGEST_NOISE, LOOP_OUTPUT, LoopPlan, plan_loop

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


class _Nodes:
    """Creates nodes in order, with names that are unique in the whole model."""

    def __init__(self, numbers: count[int]) -> None:
        self.made: list[ir.Node] = []
        self._numbers = numbers

    def __call__(self, operator: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """Create a node and return its first output."""
        return self.several(operator, inputs, 1, **attributes)[0]

    def several(
        self, operator: str, inputs: Sequence[ir.Value | None], outputs: int, **attributes: Any
    ) -> Sequence[ir.Value]:
        """Create a node and return all its outputs."""
        number = next(self._numbers)
        name = f"loop/{operator}_{number}"
        node = ir.node(operator, inputs, attributes, num_outputs=outputs, name=name)
        for index, value in enumerate(node.outputs):
            value.name = f"{name}.{index}" if outputs > 1 else name
        self.made.append(node)
        return node.outputs

    def constant(self, value: object, dtype: ir.DataType = ir.DataType.INT64) -> ir.Value:
        """Create a constant tensor."""
        return self("Constant", value=ir.tensor(np.array(value, dtype.numpy())))

    def inner(self) -> _Nodes:
        """Create nodes for a subgraph."""
        return _Nodes(self._numbers)


class _Loop:
    """Builder of the combined model."""

    def __init__(self, plan: LoopPlan, graphs: Mapping[str, ir.Model]) -> None:
        self.plan = plan
        self.parts = {graph.name: graphs[graph.name].clone() for graph in (*plan.earlier, plan.decoder)}
        self.inputs: dict[str, ir.Value] = {}
        self.known: dict[str, ir.Value] = {}
        """Values available in the main graph, by declared name."""
        self.initializers: dict[str, ir.Value] = {}
        self.functions: dict[ir.OperatorIdentifier, ir.Function] = {}
        self.opsets: dict[str, int] = {}
        self.op = _Nodes(count())
        decoder = self.parts[plan.decoder.name].graph
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
        like = self.parts[self.plan.decoder.name]
        graph = ir.Graph(
            list(self.inputs.values()), [generated], nodes=self.op.made,
            initializers=list(self.initializers.values()), opset_imports=self.opsets, name=LOOP,
        )  # fmt: skip
        model = ir.Model(
            graph, ir_version=like.ir_version, producer_name=like.producer_name,
            producer_version=like.producer_version, functions=list(self.functions.values()),
        )  # fmt: skip
        model.metadata_props.update({k: v for k, v in like.metadata_props.items() if k != EVIDENCE_KEY})
        for step in (passes.RemoveUnusedNodesPass(), passes.RemoveUnusedFunctionsPass()):
            step(model)
        return model

    def _input(self, tensor: TensorSpec, graph: Graph) -> None:
        """Create an input of the combined model for a declared input, unless an earlier graph computes it."""
        if tensor.name not in self.known:
            like = next(value for value in self.parts[graph.name].graph.inputs if value.name == tensor.name)
            value = ir.Value(name=tensor.name, type=like.type, shape=ir.Shape(tensor.dims))
            self.inputs[tensor.name] = self.known[tensor.name] = value

    def _run_once(self, graph: Graph) -> None:
        for tensor in graph.input_tensors():
            self._input(tensor, graph)
        nodes, outputs = self._take(graph, self.known)
        self.op.made += nodes
        self.known |= outputs

    def _take(self, graph: Graph, given: Mapping[str, ir.Value]) -> tuple[list[ir.Node], dict[str, ir.Value]]:
        """Extract a graph's nodes, with ``given`` in place of its inputs, and its outputs by declared name."""
        part = self.parts[graph.name]
        inputs = dict(zip(list(part.graph.inputs), (given[t.name] for t in graph.input_tensors()), strict=True))
        results = list(part.graph.outputs)
        part.graph.outputs.clear()
        for value in list(part.graph.initializers.values()):
            self._keep(value, graph.name)
        part.graph.initializers.clear()
        for value, replacement in inputs.items():
            value.replace_all_uses_with(replacement)
        self._keep_functions(part, graph.name)
        nodes = list(part.graph)
        part.graph.remove(nodes)
        for value in _values(nodes):  # avoid name clashes with other graphs and the loop
            _rename(value, f"{graph.name}/{value.name}")
        self.opsets |= part.graph.opset_imports
        names = (tensor.name for tensor in graph.output_tensors())
        return nodes, {name: inputs.get(value, value) for name, value in zip(names, results, strict=True)}

    def _keep(self, value: ir.Value, owner: str) -> None:
        """Add an initialiser, unless there already is one for the same stored tensor."""
        stored = value.const_value is None or isinstance(value.const_value, ir.ExternalTensor)
        other = self.initializers.get(str(value.name))
        if stored and other is not None and _place(other) == _place(value):
            value.replace_all_uses_with(other)
            return
        if not stored or other is not None:  # a constant, whose name may clash
            _rename(value, f"{owner}/{value.name}")
        self.initializers[str(value.name)] = value

    def _keep_functions(self, part: ir.Model, owner: str) -> None:
        for key, function in part.functions.items():
            other = self.functions.get(key)
            if other is not None and _function_bytes(other) != _function_bytes(function):
                name = f"{function.name}_{owner}"
                bodies: list[ir.Graph | ir.Function] = [part.graph, *part.functions.values()]
                for body in bodies:
                    for node in ir.traversal.RecursiveGraphIterator(body):
                        if node.op_identifier() == key:
                            node.op_type = name
                function.name = name
                key = function.identifier()
            self.functions[key] = function
            self.opsets[function.domain] = part.graph.opset_imports[function.domain]

    def _prompt(self) -> tuple[ir.Value, ir.Value | None, ir.Value]:
        """Create the tokens and the mask of the first step, and the number of rows, (1,)."""
        plan, op = self.plan, self.op
        tensors = {tensor.name: tensor for tensor in plan.decoder.input_tensors()}
        if plan.start is None:
            for name in filter(None, (plan.ids, plan.mask)):
                dims = ("batch", "sequence")
                self._input(TensorSpec(name=name, dims=dims, dtype=tensors[name].dtype), plan.decoder)
            ids = self.known[plan.ids]
            batch = op("Shape", ids, start=0, end=1)
            return (*self._pack(ids, self.known[plan.mask] if plan.mask else None), batch)
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
                self.initializers[name] = value

    def _empty_past(self, batch: ir.Value) -> list[ir.Value]:
        decoder = self.plan.decoder
        sizes = {"batch": batch, str(decoder.past_length): self.op.constant([0])}
        made: dict[tuple[Any, ...], ir.Value] = {}
        for tensor in decoder.past_tensors():
            dtype = self.dtypes[tensor.name]
            if (tensor.dims, dtype) not in made:
                shape = [self.op.constant([dim]) if isinstance(dim, int) else sizes[dim] for dim in tensor.dims]
                zero = ir.tensor(np.zeros(1, dtype.numpy()))
                made[tensor.dims, dtype] = self.op("ConstantOfShape", self.op("Concat", *shape, axis=0), value=zero)
        return [made[tensor.dims, self.dtypes[tensor.name]] for tensor in decoder.past_tensors()]

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
        shapes = {value.name: value.shape or () for value in self.parts[plan.decoder.name].graph.inputs}
        pasts = {t.name: state(t.name, self.dtypes[t.name], *shapes[t.name]) for t in plan.decoder.past_tensors()}
        given = self.known | pasts | {plan.ids: ids} | ({plan.mask: mask} if plan.mask and mask else {})
        nodes, outputs = self._take(plan.decoder, given)
        op.made += nodes
        token = self._choose(op, _last_row(op, outputs["logits"]), step, done)
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
        return ir.Graph(inputs, results, nodes=op.made, name="step")

    def _next_mask(self, op: _Nodes, mask: ir.Value, column: ir.Value) -> ir.Value:
        """Create the mask of the next step: that of all tokens, or of the new one if the past has no keys."""
        new = op("Expand", op.constant(1), op("Shape", column))
        return op("Concat", mask, new, axis=1) if self.plan.decoder.past_length else new

    def _choose(self, op: _Nodes, logits: ir.Value, step: ir.Value, done: ir.Value) -> ir.Value:
        """Choose the next token of each row, (batch,), from logits (batch, vocabulary)."""
        temperature, top_k = self.inputs["temperature"], self.inputs["top_k"]
        greedy, sampled = op.inner(), op.inner()
        likeliest = greedy("ArgMax", logits, axis=1, keepdims=0)
        double, integer = ir.DataType.DOUBLE, ir.DataType.INT64
        exact = sampled("Cast", logits, to=double)
        last, one, zero = (sampled.constant([value]) for value in (-1, 1, 0))
        unlimited = sampled("Less", top_k, one)
        size = sampled("Where", unlimited, one, sampled("Min", top_k, sampled("Shape", exact, start=1, end=2)))
        best, _ = sampled.several("TopK", [exact, size], 2, axis=1, largest=1, sorted=1)
        kept = sampled("Or", unlimited, sampled("GreaterOrEqual", exact, sampled("Gather", best, last, axis=1)))
        below = sampled("Sub", exact, sampled("Gather", best, zero, axis=1))
        weights = sampled("Exp", sampled("Div", below, sampled("Cast", temperature, to=double)))
        weights = sampled("Where", kept, weights, sampled.constant(0, double))
        sums = sampled("CumSum", weights, sampled.constant(1))
        column = sampled("Gather", self.inputs["noise"], sampled("Unsqueeze", step, zero), axis=1)
        bounds = sampled.constant(0, double), sampled.constant(LARGEST_NOISE, double)
        target = sampled("Clip", sampled("Cast", column, to=double), *bounds)
        target = sampled("Mul", target, sampled("Gather", sums, last, axis=1))
        passed = sampled("Cast", sampled("LessOrEqual", sums, target), to=integer)
        counted = sampled("ReduceSum", passed, one, keepdims=0)
        drawn = sampled("Reshape", counted, sampled("Shape", done))  # fails if noise has the wrong number of rows
        branches = {
            name: ir.Graph([], [value], nodes=nodes.made, name=name)
            for name, nodes, value in (("sampled", sampled, drawn), ("greedy", greedy, likeliest))
        }
        for value in (likeliest, drawn):
            value.type, value.shape = ir.TensorType(integer), ir.Shape(["batch"])
        sampling = op("Greater", temperature, op.constant(0, ir.DataType.FLOAT))
        return op("If", sampling, then_branch=branches["sampled"], else_branch=branches["greedy"])


def _last_row(op: _Nodes, logits: ir.Value) -> ir.Value:
    """Return the logits of the last position as float32, (batch, vocabulary).

    If the logits come from a dense layer as the exporter writes it, compute the layer at the last position only: the
    unused logits of a prompt can cost more than a whole block.
    """
    last = op.constant(-1)
    source, product = _dense(logits)
    if product is None:
        row = op("Gather", logits, last, axis=1)
    else:
        row = op("Gemm", op("Gather", source, last, axis=1), *product.inputs[1:], **product.attributes)
    return op("Cast", row, to=ir.DataType.FLOAT)


def _dense(value: ir.Value) -> tuple[ir.Value | None, ir.Node | None]:
    """Return x and the Gemm if a value is Reshape(Gemm(Reshape(x, [-1, n]), ...), [*Shape(x)[:-1], m])."""

    def made_by(value: ir.Value | None, operator: str) -> Sequence[ir.Value | None]:
        node = value.producer() if value is not None else None
        return node.inputs if node is not None and (node.domain, node.op_type) == ("", operator) else (None, None)

    flat, shape = made_by(value, "Reshape")[:2]
    rows, *_ = made_by(flat, "Gemm")
    x, width = made_by(rows, "Reshape")[:2]
    sizes, *_ = made_by(shape, "Concat")
    same, *_ = made_by(sizes, "Shape")
    if flat is None or sizes is None or x is None or width is None or same is not x:
        return None, None
    constant = ir.convenience.get_const_tensor(width)
    product, leading = flat.producer(), sizes.producer()
    assert product is not None and leading is not None
    if constant is None or constant.size != 2 or constant.numpy()[0] != -1 or product.attributes.get_int("transA", 0):
        return None, None
    if (leading.attributes.get_int("start", 0), leading.attributes.get_int("end", 0)) != (0, -1):
        return None, None
    return x, product


def _rename(value: ir.Value, name: str) -> None:
    """Rename a value without renaming its tensor, which is shared with the graph that it was cloned from."""
    tensor, value.const_value = value.const_value, None
    value.name = name
    if isinstance(tensor, ir.ExternalTensor):
        value.const_value = ir.ExternalTensor(
            tensor.location, tensor.offset, tensor.length, tensor.dtype,
            shape=tensor.shape, name=name, base_dir=tensor.base_dir,
        )  # fmt: skip
    elif value.is_initializer() and tensor is not None:
        value.const_value = ir.tensor(tensor.numpy(), dtype=tensor.dtype, name=name)


def _place(value: ir.Value) -> tuple[Any, ...]:
    """Return the location of an initialiser's data, or its name if the graph is not linked."""
    tensor = value.const_value
    if isinstance(tensor, ir.ExternalTensor):
        return str(tensor.location), tensor.offset, tensor.length
    return (value.name,)


def _function_bytes(function: ir.Function) -> bytes:
    data: bytes = ir.to_proto(function).SerializeToString(deterministic=True)
    return data


def _values(nodes: Sequence[ir.Node]) -> list[ir.Value]:
    """Return all values that nodes or their subgraphs define."""
    values: list[ir.Value] = []
    for node in nodes:
        values += node.outputs
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                inner = [attribute.as_graph()]
            else:
                inner = list(attribute.as_graphs()) if attribute.type == ir.AttributeType.GRAPHS else []
            for graph in inner:
                values += [*graph.inputs, *graph.initializers.values(), *_values(list(graph))]
    return values
