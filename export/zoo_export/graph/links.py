"""References of graphs to the weights: initialisers whose values lie in other files."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping

import onnx

from zoo.arrays import Array
from zoo.artifact.weights import StoredTensor
from zoo.errors import ArtifactError
from zoo_export.graph.file import parse
from zoo_export.graph.join import parts_of, separate, span
from zoo_export.graph.metadata import HEADER_KEY, annotate

__all__ = [
    "arrays_of",
    "external_tensors",
    "header_digest",
    "link",
    "names_read",
    "place_of",
    "pointers",
    "referenced_tensors",
    "set_place",
]

_DTYPES = {
    "F32": onnx.TensorProto.FLOAT, "F16": onnx.TensorProto.FLOAT16, "BF16": onnx.TensorProto.BFLOAT16,
    "F64": onnx.TensorProto.DOUBLE, "I64": onnx.TensorProto.INT64, "I32": onnx.TensorProto.INT32,
    "I8": onnx.TensorProto.INT8, "U8": onnx.TensorProto.UINT8, "BOOL": onnx.TensorProto.BOOL,
}  # fmt: skip


def external_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Return the initialisers with external data, linked or not."""
    return (tensor for tensor in model.graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL)


def place_of(tensor: onnx.TensorProto) -> tuple[str, int, int]:
    """Return the file of an initialiser's external data, empty if it is not linked, and the offset and length there."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    length = entries.get("length") or math.prod(tensor.dims) * _item_size(tensor)
    return entries.get("location", ""), int(entries.get("offset", 0)), int(length)


def set_place(tensor: onnx.TensorProto, file: str, offset: int, length: int) -> None:
    """Link an initialiser to bytes of a file."""
    del tensor.external_data[:]
    for key, value in (("location", file), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))


def _item_size(tensor: onnx.TensorProto) -> int:
    return int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def link(model: onnx.ModelProto, layout: Mapping[str, StoredTensor], kept: Collection[str] = ()) -> None:
    """Link every stored initialiser of a graph to the stored tensor of the same name.

    Initialisers in the files ``kept``, such as those of quantised weights, stay as they are. One that spans several
    tensors (:mod:`zoo_export.graph.join`) is divided if these do not follow one another in this layout.

    Raises:
        ArtifactError: tensors are missing, or have different shapes or dtypes.
    """
    separate(model, layout)
    problems = []
    for tensor in external_tensors(model):
        if place_of(tensor)[0] in kept:
            continue
        parts = parts_of(tensor)
        place = span(parts, layout) if parts else layout.get(tensor.name)
        if place is None:
            problems.append(f"missing {tensor.name}")
        elif tuple(tensor.dims) != place.shape:
            problems.append(f"{tensor.name} has shape {place.shape}, not {tuple(tensor.dims)}")
        elif _DTYPES.get(place.dtype) != tensor.data_type:
            expected = onnx.TensorProto.DataType.Name(tensor.data_type)
            problems.append(f"{tensor.name} is {place.dtype}, not {expected}")
        else:
            set_place(tensor, place.file, place.offset, place.length)
    if problems:
        raise ArtifactError(f"the weights do not fit the graph ({'; '.join(problems)})")
    annotate(model, {HEADER_KEY: header_digest(layout)})


def header_digest(layout: Mapping[str, StoredTensor]) -> str:
    """Return the SHA-256 digest (hexadecimal) of the names, dtypes, shapes and locations of stored tensors."""
    entries = [[name, t.file, t.dtype, list(t.shape), t.offset, t.length] for name, t in sorted(layout.items())]
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def pointers(graph: bytes) -> dict[str, tuple[str, int]]:
    """Return the file and offset of every external initialiser that a node reads, by name."""
    model = parse(graph)
    read = set(names_read(model.graph.node))
    return {tensor.name: place_of(tensor)[:2] for tensor in external_tensors(model) if tensor.name in read}


def arrays_of(graph: bytes, stored: Mapping[tuple[str, int], Array]) -> dict[str, Array]:
    """Return the arrays at which external initialisers point, by the names and in the shapes of these.

    Those of another type or size than the initialiser, and those that are not contiguous, are left out.

    Args:
        graph: the serialised graph.
        stored: the stored tensors, by file and offset.
    """
    arrays = {}
    for tensor in external_tensors(parse(graph)):
        array = stored.get(place_of(tensor)[:2])
        if array is None or not array.flags.c_contiguous or array.size != math.prod(tensor.dims):
            continue
        if array.dtype == onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type):
            arrays[tensor.name] = array.reshape(tuple(tensor.dims))
    return arrays


def names_read(nodes: Iterable[onnx.NodeProto]) -> Iterator[str]:
    """Yield the names that nodes and those of their subgraphs read."""
    for node in nodes:
        yield from node.input
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from names_read(inner.node)


def referenced_tensors(graphs: Iterable[bytes], layout: Mapping[str, StoredTensor]) -> set[str]:
    """Return the names of the stored tensors that any of the graphs reads, alone or in an initialiser that spans it."""
    read = {place for graph in graphs for place in _ranges(graph)}
    starts = {(file, start) for file, start, _ in read}

    def is_spanned(tensor: StoredTensor) -> bool:
        end = tensor.offset + tensor.length
        return any(file == tensor.file and start <= tensor.offset and end <= stop for file, start, stop in read)

    return {name for name, tensor in layout.items() if (tensor.file, tensor.offset) in starts or is_spanned(tensor)}


def _ranges(graph: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield the file and the first and last offset of every external initialiser that a node reads."""
    model = parse(graph)
    read = set(names_read(model.graph.node))
    for tensor in external_tensors(model):
        if tensor.name in read:
            file, start, _ = place_of(tensor)
            yield file, start, start + math.prod(tensor.dims) * _item_size(tensor)
