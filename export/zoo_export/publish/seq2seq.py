"""The graphs of an encoder-decoder with the inputs and outputs of optimum and transformers.js.

zoo's encoder returns the keys and values of cross-attention, which its decoder reads. Here the decoder computes them
from the encoder's states in its first call, in a branch of ``If``, and returns them as part of its past. Its own tokens
are never masked. Each weight is in one of the two graphs, apart from embeddings that both read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from zoo.contract import Graph, KeyValues
from zoo.errors import UsageError
from zoo.probe.inputs import Feeds
from zoo.probe.pipeline import Arrays, typed_feeds
from zoo_export.graph.links import names_read
from zoo_runtime.onnx_runtime.ort import ort

__all__ = ["DECODER", "ENCODER", "Seq2SeqExecutor", "divide", "is_seq2seq", "sees_all_tokens"]

ENCODER, DECODER = "encoder_model", "decoder_model_merged"
"""Names of the files, without their suffix."""
_STATES, _CACHED = "encoder_hidden_states", "use_cache_branch"
_HIDDEN = "last_hidden_state"


def is_seq2seq(graphs: Sequence[Graph]) -> bool:
    """Whether graphs are an encoder of texts and a decoder, with keys and values of cross-attention between them."""
    if [graph.name for graph in graphs] != ["encoder", "decoder"]:
        return False
    encoder, decoder = graphs
    inputs = {tensor.name for tensor in decoder.input_tensors()} - {tensor.name for tensor in decoder.past_tensors()}
    cross = {item.name for item in encoder.outputs if isinstance(item, KeyValues)}
    plain = {name for name in inputs if name.split(".")[0] not in cross}
    return (
        [tensor.name for tensor in encoder.input_tensors()] == ["input_ids", "attention_mask"]
        and len(cross) == 1
        and len(decoder.pasts) == 1
        and not decoder.has_windows
        and _HIDDEN in {tensor.name for tensor in encoder.output_tensors()}
        and plain == {"decoder_input_ids", "decoder_attention_mask", "attention_mask"}
    )


def sees_all_tokens(feeds: Feeds) -> bool:
    """Whether no padding precedes the tokens of a decoder: the published one cannot mask it."""
    mask = feeds.get("decoder_attention_mask")
    return mask is None or bool((np.diff(mask, axis=1) <= 0).all())


def divide(
    encoder: onnx.ModelProto, decoder: onnx.ModelProto, graphs: Sequence[Graph]
) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Move the keys and values of cross-attention from an encoder to its decoder, in place.

    Args:
        encoder: the encoder, without functions.
        decoder: the decoder, without functions.
        graphs: the declared graphs, for which :func:`is_seq2seq` holds.

    Raises:
        UsageError: the keys and values are not computed from the encoder's last states alone.
    """
    cross = [tensor.name for item in graphs[0].outputs if isinstance(item, KeyValues) for tensor in item.tensors()]
    moved = _producers(encoder.graph, cross)
    _add_cross(decoder.graph, moved, _initialisers(encoder.graph, moved), cross)
    _rename_past(decoder.graph, cross)
    _keep(encoder.graph, _HIDDEN)
    return encoder, decoder


def _producers(graph: onnx.GraphProto, names: Sequence[str]) -> list[onnx.NodeProto]:
    """Return copies of the nodes that compute values from the last states, whose name becomes that of an input."""
    makers = {name: node for node in graph.node for name in node.output}
    inputs = {value.name for value in graph.input}
    needed: set[str] = set()
    queue = list(names)
    while queue:
        name = queue.pop()
        if name in needed or name == _HIDDEN or name not in makers:
            continue
        needed |= {*makers[name].output}
        queue += names_read([makers[name]])
    copies = []
    for node in graph.node:
        if not needed & {*node.output}:
            continue
        copy = onnx.NodeProto.FromString(node.SerializeToString())
        if inputs & {*names_read([node])} and not _reads_lengths(node):
            raise UsageError("the encoder does not compute the keys of cross-attention from its last states alone")
        copy.input[:] = [_STATES if name in inputs or name == _HIDDEN else name for name in node.input]
        copies.append(copy)
    return copies


def _reads_lengths(node: onnx.NodeProto) -> bool:
    """Whether a node returns only the batch or the length of an input."""
    ends = [attribute.i for attribute in node.attribute if attribute.name == "end"]
    return node.op_type == "Shape" and ends in ([1], [2])


def _initialisers(graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto]) -> list[onnx.TensorProto]:
    read = {*names_read(nodes)}
    return [tensor for tensor in graph.initializer if tensor.name in read]


def _add_cross(
    graph: onnx.GraphProto,
    nodes: Sequence[onnx.NodeProto],
    tensors: Sequence[onnx.TensorProto],
    cross: Sequence[str],
) -> None:
    """Compute the keys and values in the first call of a decoder; take them from the past in later ones."""
    present = {tensor.name for tensor in graph.initializer}
    names = {_STATES: _STATES}
    for tensor in tensors:
        stored = tensor.data_location == TensorProto.EXTERNAL
        names[tensor.name] = tensor.name if stored else f"cross.{tensor.name}"
        if names[tensor.name] not in present:
            copy = graph.initializer.add()
            copy.CopyFrom(tensor)
            copy.name = names[tensor.name]
    for node in nodes:
        node.name = f"cross.{node.name}"
        node.input[:] = [names.get(name, f"cross.{name}") if name else "" for name in node.input]
        node.output[:] = [f"cross.{name}" if name else "" for name in node.output]
    types = {value.name: value.type for value in graph.input}
    kind = types[cross[0]].tensor_type.elem_type
    first = [helper.make_tensor_value_info(f"cross.{name}", kind, None) for name in cross]
    later = [helper.make_tensor_value_info(f"{_past(name)}.kept", kind, None) for name in cross]
    kept = [helper.make_node("Identity", [_past(name)], [f"{_past(name)}.kept"]) for name in cross]
    choice = helper.make_node(
        "If",
        [_CACHED],
        [*cross],
        name="cross",
        then_branch=helper.make_graph(kept, "later", [], later),
        else_branch=helper.make_graph(nodes, "first", [], first),
    )
    outputs = [helper.make_node("Identity", [name], [_present(name)], name=_present(name)) for name in cross]
    rest = [*graph.node]
    del graph.node[:]
    graph.node.extend([*_full_mask(graph), choice, *rest, *outputs])
    hidden = graph.input.add()
    hidden.CopyFrom(helper.make_tensor_value_info(_STATES, kind, ["batch", "encoder_sequence", _width(nodes, tensors)]))
    graph.input.add().CopyFrom(helper.make_tensor_value_info(_CACHED, TensorProto.BOOL, [1]))
    for name in cross:
        graph.output.add().CopyFrom(onnx.ValueInfoProto(name=_present(name), type=types[name]))


def _width(nodes: Sequence[onnx.NodeProto], tensors: Sequence[onnx.TensorProto]) -> int | str:
    """Return the width of the states that a product reads, or a name if no product of a matrix shows it."""
    shapes = {f"{tensor.name}": tensor.dims for tensor in tensors}
    for node in nodes:
        weight = shapes.get(node.input[1].removeprefix("cross.")) if len(node.input) > 1 else None
        if node.op_type == "Gemm" and weight is not None and len(weight) == 2:
            transposed = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
            return int(weight[1 if transposed else 0])
    return "hidden_size"


def _full_mask(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return nodes that compute the mask of the decoder's tokens, all of which are seen."""
    past = next(value.name for value in graph.input if value.name.startswith("past_key_values."))
    graph.initializer.append(numpy_helper.from_array(np.ones(1, np.int64), "mask.one"))
    return [
        helper.make_node("Shape", ["decoder_input_ids"], ["mask.batch"], name="mask.batch", start=0, end=1),
        helper.make_node("Shape", ["decoder_input_ids"], ["mask.tokens"], name="mask.tokens", start=1, end=2),
        helper.make_node("Shape", [past], ["mask.past"], name="mask.past", start=2, end=3),
        helper.make_node("Add", ["mask.past", "mask.tokens"], ["mask.length"], name="mask.length"),
        helper.make_node("Concat", ["mask.batch", "mask.length"], ["mask.shape"], name="mask.shape", axis=0),
        helper.make_node("Expand", ["mask.one", "mask.shape"], ["decoder_attention_mask"], name="mask"),
    ]


def _past(cross: str) -> str:
    _, layer, part = cross.split(".")
    return f"past_key_values.{layer}.encoder.{part}"


def _present(cross: str) -> str:
    return _past(cross).replace("past_key_values", "present")


def _self(name: str) -> str:
    """Return the name of a decoder's own keys or values."""
    first, layer, part = name.split(".")
    return f"{first}.{layer}.decoder.{part}"


def _rename_past(graph: onnx.GraphProto, cross: Sequence[str]) -> None:
    """Give the inputs and outputs the names and the order of optimum."""
    names = {"decoder_input_ids": "input_ids", "attention_mask": "encoder_attention_mask"}
    for value in (*graph.input, *graph.output):
        if value.name.startswith(("past_key_values.", "present.")) and value.name.count(".") == 2:
            names[value.name] = _self(value.name)
    _rename(graph, names)
    values = {value.name: value for value in graph.input}
    for name in cross:
        values[_past(name)] = onnx.ValueInfoProto(name=_past(name), type=values[name].type)
        dims = values[_past(name)].type.tensor_type.shape.dim
        dims[2].dim_param = "cached_encoder_sequence"  # none in the first call
    layers = sorted({int(name.split(".")[1]) for name in cross})
    parts = [f"{side}.{part}" for side in ("decoder", "encoder") for part in ("key", "value")]
    past = [f"{{}}.{layer}.{part}" for layer in layers for part in parts]
    order = [
        "input_ids",
        "encoder_attention_mask",
        _STATES,
        *(name.format("past_key_values") for name in past),
        _CACHED,
    ]
    inputs = [values[name] for name in order]
    outputs = {value.name: value for value in graph.output}
    results = [outputs["logits"], *(outputs[name.format("present")] for name in past)]
    del graph.input[:], graph.output[:]
    graph.input.extend(inputs)
    graph.output.extend(results)


def _rename(graph: onnx.GraphProto, names: dict[str, str]) -> None:
    for value in (*graph.input, *graph.output, *graph.value_info):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _rename(attribute.g, names)


def _keep(graph: onnx.GraphProto, output: str) -> None:
    """Remove the other outputs of a graph, and what only they need."""
    kept = next(value for value in graph.output if value.name == output)
    result = onnx.ValueInfoProto.FromString(kept.SerializeToString())
    del graph.output[:]
    graph.output.append(result)
    needed, nodes = {output}, []
    for node in reversed(graph.node):
        if needed & {*node.output}:
            nodes.append(onnx.NodeProto.FromString(node.SerializeToString()))
            needed |= {*names_read([node])}
    del graph.node[:]
    graph.node.extend(reversed(nodes))
    tensors = [tensor for tensor in graph.initializer if tensor.name in needed]
    copies = [onnx.TensorProto.FromString(tensor.SerializeToString()) for tensor in tensors]
    del graph.initializer[:]
    graph.initializer.extend(copies)


class Seq2SeqExecutor:
    """Runs the declared graphs of an encoder-decoder in the published ones.

    Args:
        encoder: the published encoder.
        decoder: the published decoder.
        dtype: dtype of floating-point inputs.
    """

    def __init__(self, encoder: ort.InferenceSession, decoder: ort.InferenceSession, dtype: np.dtype[Any]) -> None:
        self.encoder = encoder
        self.decoder = decoder
        self.dtype = dtype
        self.states: np.ndarray[Any, Any] = np.empty(0)
        self.mask: np.ndarray[Any, Any] = np.empty(0)

    def __call__(self, graph: Graph, feeds: Feeds) -> Arrays:
        arrays = typed_feeds(graph, feeds, self.dtype)
        if not graph.pasts:
            (self.states,) = self.encoder.run([_HIDDEN], arrays)
            self.mask = arrays["attention_mask"]
            start = self._decode(np.zeros((len(self.states), 1), np.int64), {}, is_first=True)
            cross = [tensor.name for item in graph.outputs if isinstance(item, KeyValues) for tensor in item.tensors()]
            return {_HIDDEN: self.states, **{name: start[_present(name)] for name in cross}}
        self.mask = arrays["attention_mask"]
        own = {tensor.name for tensor in graph.past_tensors()}
        past = {_self(name): value for name, value in arrays.items() if name in own}
        past |= {_past(name): value for name, value in arrays.items() if name.startswith("cross_key_values.")}
        is_first = all(value.shape[2] == 0 for name, value in past.items() if ".decoder." in name)
        found = self._decode(arrays["decoder_input_ids"], past, is_first=is_first)
        names = {_self(tensor.name): tensor.name for tensor in graph.output_tensors() if "." in tensor.name}
        return {names.get(name, name): value for name, value in found.items() if ".encoder." not in name}

    def _decode(self, ids: np.ndarray[Any, Any], past: Arrays, *, is_first: bool) -> Arrays:
        """Run the decoder, in its first call without a past."""
        feeds: dict[str, Any] = {
            "input_ids": ids,
            "encoder_attention_mask": self.mask,
            _STATES: self.states,
            _CACHED: np.array([not is_first]),
        }
        for item in self.decoder.get_inputs():
            if item.name not in feeds:
                empty = np.zeros((len(ids), item.shape[1], 0, item.shape[3]), self.dtype)
                feeds[item.name] = empty if is_first else past[item.name]
        names = [item.name for item in self.decoder.get_outputs()]
        return dict(zip(names, self.decoder.run(names, feeds), strict=True))
