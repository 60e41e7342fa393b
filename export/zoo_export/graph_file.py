"""What zoo keeps in an ONNX file beside the graph, and where the graph points.

Only :func:`inline` needs onnx-ir, which takes long to import.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import onnx

from zoo.artifact import is_weights
from zoo.errors import ArtifactError
from zoo.weights import StoredTensor

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = [
    "BLOCK_KEY",
    "EVIDENCE_KEY",
    "EXACT_KEY",
    "HEADER_KEY",
    "MODULE_KEY",
    "TOKENIZER_KEY",
    "WEIGHTS_KEY",
    "annotate",
    "contract",
    "external_tensors",
    "graph_digest",
    "header_digest",
    "inline",
    "link",
    "metadata",
    "parse",
    "pointers",
    "referenced_tensors",
    "serialize",
    "widen",
]

EVIDENCE_KEY = "zoo.evidence_sha256"
"""In a graph's metadata: the digest of the evidence that vouches for it, or says that none does."""
WEIGHTS_KEY = "zoo.weights_sha256"
"""In a graph's metadata: the digest of the weights that it was compared with."""
TOKENIZER_KEY = "zoo.tokenizer_sha256"
"""In a graph's metadata: the digest of the tokenizer beside it."""
HEADER_KEY = "zoo.weights_header_sha256"
"""In a graph's metadata: the digest of the names, kinds and places of all stored tensors."""
MODULE_KEY = "zoo.module"
"""In a node's metadata: the path of the module it was traced from; inside a function, the path within the block."""
EXACT_KEY = "zoo.exact"
"""In the metadata of a constant in float16 or bfloat16: the number in the model's code that it was rounded from."""
BLOCK_KEY = "zoo.block"
"""In the metadata of a node that calls a function: the path of the module it stands for."""

_DTYPES = {
    "F32": onnx.TensorProto.FLOAT, "F16": onnx.TensorProto.FLOAT16, "BF16": onnx.TensorProto.BFLOAT16,
    "F64": onnx.TensorProto.DOUBLE, "I64": onnx.TensorProto.INT64, "I32": onnx.TensorProto.INT32,
    "I8": onnx.TensorProto.INT8, "U8": onnx.TensorProto.UINT8, "BOOL": onnx.TensorProto.BOOL,
}  # fmt: skip
_HALVES = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


def parse(graph: bytes) -> onnx.ModelProto:
    """A serialised graph; what is not one is an :class:`ArtifactError`."""
    try:
        return onnx.load_model_from_string(graph)
    except Exception as error:  # protobuf's errors have no common public base
        raise ArtifactError("not an ONNX graph") from error


def serialize(model: onnx.ModelProto) -> bytes:
    """The bytes of an ONNX file. Equal models give equal bytes."""
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def metadata(graph: bytes) -> Mapping[str, str]:
    """The metadata of a serialised graph; empty for what is not one."""
    try:
        return {entry.key: entry.value for entry in parse(graph).metadata_props}
    except ArtifactError:
        return {}


def annotate(graph: bytes, entries: Mapping[str, str]) -> bytes:
    """The graph with these entries in its metadata, in place of those of the same names."""
    model = parse(graph)
    kept = {entry.key: entry.value for entry in model.metadata_props}
    del model.metadata_props[:]
    for key, value in sorted({**kept, **entries}.items()):
        model.metadata_props.add(key=key, value=value)
    return serialize(model)


def graph_digest(graph: bytes) -> str:
    """SHA-256 of a graph without what ties it to its evidence, which holds this digest."""
    model = parse(graph)
    kept = [entry for entry in model.metadata_props if entry.key not in (EVIDENCE_KEY, WEIGHTS_KEY, TOKENIZER_KEY)]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    return hashlib.sha256(serialize(model)).hexdigest()


def external_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """The initialisers whose values lie in another file, or will."""
    return (tensor for tensor in model.graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL)


def link(graph: bytes, layout: Mapping[str, StoredTensor]) -> bytes:
    """The graph with every initialiser that the model stores pointing at the tensor of its name.

    Raises :class:`ArtifactError` when the stored tensors are not those that the graph was made for.
    """
    model = parse(graph)
    problems = []
    for tensor in external_tensors(model):
        location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
        if location and not is_weights(location) and location not in {place.file for place in layout.values()}:
            continue  # a precision's own file
        place = layout.get(tensor.name)
        if place is None:
            problems.append(f"missing {tensor.name}")
        elif tuple(tensor.dims) != place.shape:
            problems.append(f"{tensor.name} has shape {place.shape}, not {tuple(tensor.dims)}")
        elif _DTYPES.get(place.dtype) != tensor.data_type:
            wanted = onnx.TensorProto.DataType.Name(tensor.data_type)
            problems.append(f"{tensor.name} is {place.dtype}, not {wanted}")
        else:
            del tensor.external_data[:]
            for key, value in (("location", place.file), ("offset", place.offset), ("length", place.length)):
                tensor.external_data.add(key=key, value=str(value))
    if problems:
        raise ArtifactError(f"the weights are not in the graph's layout ({'; '.join(problems)})")
    return annotate(serialize(model), {HEADER_KEY: header_digest(layout)})


def header_digest(layout: Mapping[str, StoredTensor]) -> str:
    """SHA-256 of the names, kinds and places of stored tensors, in hexadecimal."""
    entries = [[name, t.file, t.dtype, list(t.shape), t.offset, t.length] for name, t in sorted(layout.items())]
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def pointers(graph: bytes) -> dict[str, tuple[str, int]]:
    """File and offset of every initialiser that some node reads and whose value lies in another file."""
    model = parse(graph)
    read = set(_names_read(model.graph))
    places = {
        tensor.name: {entry.key: entry.value for entry in tensor.external_data} for tensor in external_tensors(model)
    }
    return {
        name: (place.get("location", ""), int(place.get("offset", 0))) for name, place in places.items() if name in read
    }


def _names_read(graph: onnx.GraphProto) -> Iterator[str]:
    """What the nodes of a graph, and of the graphs inside them, read."""
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _names_read(inner)


def referenced_tensors(graphs: Iterable[bytes], layout: Mapping[str, StoredTensor]) -> set[str]:
    """The stored tensors that some graph reads."""
    places = {place for graph in graphs for place in pointers(graph).values()}
    return {name for name, tensor in layout.items() if (tensor.file, tensor.offset) in places}


def contract(model: ir.Model) -> str:
    """What a graph takes and gives, as its metadata says it: names, dimensions and dtypes."""
    sides = {"inputs": model.graph.inputs, "outputs": model.graph.outputs}
    return json.dumps(
        {
            side: [
                {
                    "name": value.name,
                    "dims": [dim if isinstance(dim, int) else str(dim) for dim in value.shape or ()],
                    "dtype": value.dtype.numpy().name if value.dtype else None,
                }
                for value in values
            ]
            for side, values in sides.items()
        }
    )


def widen(graph: bytes) -> bytes | None:
    """The graph with float32 wherever it has float16 or bfloat16. Stored weights stay, and must be replaced.

    None where a constant may have been rounded from a number that nobody knows any more.
    """
    model = parse(graph)
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if value.type.tensor_type.elem_type in _HALVES:
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    known = [_widen_tensor(tensor) for tensor in model.graph.initializer]
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        known.append(_widen_nodes(nodes))
    return serialize(model) if all(known) else None


def _widen_tensor(tensor: onnx.TensorProto) -> bool:
    """Returns whether the numbers are those of the code: few binary digits are nobody's rounding."""
    if tensor.data_type not in _HALVES:
        return True
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        tensor.data_type = onnx.TensorProto.FLOAT
        return True
    values = onnx.numpy_helper.to_array(tensor).astype("float32")
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    return all(math.isinf(value) or (16 * math.frexp(value)[0]).is_integer() for value in values.flat)


def _widen_nodes(nodes: Iterable[onnx.NodeProto]) -> bool:
    known = []
    for node in nodes:
        exact = [float(entry.value) for entry in node.metadata_props if entry.key == EXACT_KEY]
        for attribute in node.attribute:
            if exact and attribute.t.data_type in _HALVES:
                rounded = onnx.numpy_helper.to_array(attribute.t)
                if rounded == rounded.dtype.type(exact[0]):  # else it is not what it says
                    attribute.t.CopyFrom(onnx.helper.make_tensor("", onnx.TensorProto.FLOAT, [], exact))
            if attribute.name in ("to", "dtype") and attribute.i in _HALVES:
                attribute.i = onnx.TensorProto.FLOAT
            elif attribute.type == onnx.AttributeProto.TENSOR:
                known.append(_widen_tensor(attribute.t))
            for inner in (attribute.g, *attribute.graphs):
                known.append(_widen_nodes(inner.node))
    return all(known)


def inline(model: ir.Model) -> None:
    """Put each function's nodes in place of its calls. Nodes keep the paths of their modules."""
    from onnx_ir.passes.common import InlinePass

    InlinePass()(model)
    for node in model.graph.all_nodes():
        path = (node.metadata_props.pop(BLOCK_KEY, ""), node.metadata_props.pop(MODULE_KEY, ""))
        if any(path):
            node.metadata_props[MODULE_KEY] = ".".join(filter(None, path))
