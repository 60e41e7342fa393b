"""Products with sibling weights, such as those of query, key and value, as one product.

A step of a decoder is a sequence of products of one vector with matrices, and each product has a cost of its own. Where
the matrices of products with the same input follow one another in the weights' file, one initialiser spans them without
a copy, and so does one for their biases. Such an initialiser names its parts in its metadata, so that :func:`separate`
restores the products for a file in another order.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import onnx

from zoo.artifact.weights import StoredTensor, parse_json
from zoo.errors import ArtifactError

__all__ = ["PARTS_KEY", "join", "parts_of", "separate", "span"]

PARTS_KEY = "zoo.parts"
"""Metadata of an initialiser that spans several stored tensors: their names and numbers of rows, as JSON."""
Parts = Sequence[tuple[str, int]]
"""Names of stored tensors, and their first dimensions."""


def parts_of(tensor: onnx.TensorProto) -> list[tuple[str, int]]:
    """Return the stored tensors that an initialiser spans, or an empty list if it is one itself.

    Raises :class:`ArtifactError` if its metadata does not list tensors.
    """
    text = next((entry.value for entry in tensor.metadata_props if entry.key == PARTS_KEY), "[]")
    try:
        parts = [(name, rows) for name, rows in parse_json(text.encode())]
        if not all(isinstance(name, str) and type(rows) is int and 0 <= rows < 2**63 for name, rows in parts):
            raise ValueError(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ArtifactError(f"the tensor {tensor.name} of the ONNX graph has the {PARTS_KEY} {text!r:.40}") from error
    return parts


def span(parts: Parts, layout: Mapping[str, StoredTensor]) -> StoredTensor | None:
    """Return the place of stored tensors that follow one another, as one tensor; None if they do not."""
    places = [layout.get(name) for name, _ in parts]
    first = places[0]
    if first is None:
        return None
    end = first.offset
    for (_, rows), place in zip(parts, places, strict=True):
        if place is None or (place.file, place.dtype, place.offset) != (first.file, first.dtype, end):
            return None
        if place.shape != (rows, *first.shape[1:]):
            return None
        end += place.length
    shape = sum(rows for _, rows in parts), *first.shape[1:]
    return StoredTensor(first.file, first.dtype, shape, first.offset, end - first.offset)


def join(model: onnx.ModelProto, layout: Mapping[str, StoredTensor]) -> None:
    """Join products that have the same input and whose weights and biases follow one another in a layout.

    The initialisers are left unlinked. Functions and subgraphs stay as they are.
    """
    weights = {
        tensor.name: tensor
        for tensor in model.graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL and not parts_of(tensor)
    }
    uses = Counter(_names_read(model.graph))
    groups: dict[object, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        if _is_layer(node) and all(name in weights and uses[name] == 1 for name in node.input[1:]):
            groups.setdefault((node.input[0], len(node.input)), []).append(node)
    change = _Change()
    for group in groups.values():
        ordered = sorted(group, key=lambda node: _offset(layout, node))
        while ordered:
            count = len(ordered)
            while count > 1 and not all(span(parts, layout) for parts in _parts(ordered[:count], weights)):
                count -= 1
            if count > 1:
                _replace_by_one(change, ordered[:count], weights)
            ordered = ordered[count:]
    change.apply(model.graph)


def separate(model: onnx.ModelProto, layout: Mapping[str, StoredTensor]) -> None:
    """Undo :func:`join` for products whose weights or biases do not follow one another in this layout.

    Raises :class:`ArtifactError` if the parts of a tensor do not fit the nodes that read it.
    """
    graph = model.graph
    joined = {tensor.name: tensor for tensor in graph.initializer if parts_of(tensor)}
    uses = Counter(_names_read(graph))
    readers = {name: node for node in graph.node for name in node.input}
    change = _Change()
    for node in [node for node in graph.node if len(node.input) > 1 and node.input[1] in joined]:
        tensors = [joined[name] for name in node.input[1:] if name in joined]
        if all(span(parts_of(tensor), layout) for tensor in tensors):
            continue
        split = readers.get(node.output[0])
        once = all(uses[name] == 1 for name in (*node.input[1:], node.output[0]))
        counts = [len(parts_of(tensor)) for tensor in tensors]
        if split is None or not once or not _is_split(split) or counts != [len(split.output)] * (len(node.input) - 1):
            raise ArtifactError(f"the {PARTS_KEY} of the tensor {node.input[1]} do not fit the nodes that read it")
        layers = []
        for number, output in enumerate(split.output):
            layer = onnx.NodeProto()
            layer.CopyFrom(node)
            layer.name = output
            layer.input[1:] = [parts_of(tensor)[number][0] for tensor in tensors]
            layer.output[:] = [output]
            layers.append(layer)
        added = [_initializer(tensor, *part) for tensor in tensors for part in parts_of(tensor)]
        change.replace([node, split], layers, [*(tensor.name for tensor in tensors), split.input[1]], added)
    change.apply(graph)


class _Change:
    """Nodes and initialisers to put in place of others, all at once."""

    def __init__(self) -> None:
        self._nodes: dict[str, list[onnx.NodeProto]] = {}
        """The new nodes in place of each old one, by its first output."""
        self._removed: set[str] = set()
        self._added: list[onnx.TensorProto] = []

    def replace(
        self,
        old: Sequence[onnx.NodeProto],
        new: Sequence[onnx.NodeProto],
        removed: Sequence[str],
        added: Sequence[onnx.TensorProto],
    ) -> None:
        """Put nodes in the place of whichever of the old ones comes first, and exchange initialisers."""
        waiting = list(new)  # emptied at the first
        self._nodes |= {node.output[0]: waiting for node in old}
        self._removed.update(removed)
        self._added += added

    def apply(self, graph: onnx.GraphProto) -> None:
        """Change the graph."""
        nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            new = self._nodes.get(node.output[0])
            nodes += [node] if new is None else new
            if new is not None:
                new.clear()
        tensors = [tensor for tensor in graph.initializer if tensor.name not in self._removed]
        del graph.node[:], graph.initializer[:]
        graph.node.extend(nodes)
        graph.initializer.extend([*tensors, *self._added])


def _is_layer(node: onnx.NodeProto) -> bool:
    """Return whether a node multiplies its input by the transpose of a matrix, with or without a bias."""
    numbers = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    plain = numbers.get("alpha", 1.0) == 1.0 and numbers.get("beta", 1.0) == 1.0 and not numbers.get("transA", 0)
    return node.op_type == "Gemm" and not node.domain and plain and numbers.get("transB", 0) == 1


def _is_split(node: onnx.NodeProto) -> bool:
    """Return whether a node divides its input into parts of given sizes."""
    return node.op_type == "Split" and not node.domain and len(node.input) == 2


def _offset(layout: Mapping[str, StoredTensor], node: onnx.NodeProto) -> tuple[str, int]:
    place = layout.get(node.input[1])
    return ("", 0) if place is None else (place.file, place.offset)


def _parts(nodes: Sequence[onnx.NodeProto], weights: Mapping[str, onnx.TensorProto]) -> list[Parts]:
    """Return the parts of the joined weight, and of the joined bias if there is one."""
    places = range(1, len(nodes[0].input))
    return [[(node.input[place], weights[node.input[place]].dims[0]) for node in nodes] for place in places]


def _replace_by_one(change: _Change, nodes: Sequence[onnx.NodeProto], weights: Mapping[str, onnx.TensorProto]) -> None:
    added, inputs = [], []
    for parts in _parts(nodes, weights):
        names = [name for name, _ in parts]
        tensor = _initializer(weights[names[0]], "+".join(names), sum(rows for _, rows in parts))
        tensor.metadata_props.add(key=PARTS_KEY, value=json.dumps(parts))
        added.append(tensor)
        inputs.append(tensor.name)
    sizes = onnx.numpy_helper.from_array(
        np.array([weights[node.input[1]].dims[0] for node in nodes]), f"sizes of {inputs[0]}"
    )
    product = onnx.NodeProto()
    product.CopyFrom(nodes[0])
    product.name = product.output[0] = f"product with {inputs[0]}"
    product.input[1:] = inputs
    outputs = [node.output[0] for node in nodes]
    split = onnx.helper.make_node("Split", [product.output[0], sizes.name], outputs, f"parts of {product.name}", axis=1)
    old = [name for node in nodes for name in node.input[1:]]
    change.replace(nodes, [product, split], old, [*added, sizes])


def _initializer(like: onnx.TensorProto, name: str, rows: int) -> onnx.TensorProto:
    """Return an unlinked initialiser of another name and number of rows."""
    return onnx.TensorProto(
        name=name, dims=[rows, *like.dims[1:]], data_type=like.data_type, data_location=onnx.TensorProto.EXTERNAL
    )


def _names_read(graph: onnx.GraphProto) -> list[str]:
    """Return the names that nodes, their subgraphs and the graph's outputs read."""
    names = [value.name for value in graph.output]
    for node in graph.node:
        names += node.input
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                names += _names_read(inner)
    return names
