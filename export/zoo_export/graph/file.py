"""Metadata of ONNX files, and their references to weights.

A graph has two forms. Passes take and return ``onnx_ir.Model``: see :func:`load` and :func:`dump`. What is done to
every file, linking and metadata, is done on the parsed protobuf, because onnx-ir imports sympy, which takes as long as
the rest of an export whose traces are cached.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import onnx
from google.protobuf.message import Message

from zoo.arrays import Array
from zoo.artifact.weights import StoredTensor
from zoo.errors import ArtifactError
from zoo_export.graph.join import parts_of, separate, span
from zoo_runtime.onnx_runtime.functions import check_functions

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = [
    "BLOCK_KEY",
    "EVIDENCE_KEY",
    "EXACT_KEY",
    "FLAT_KEY",
    "MODULE_KEY",
    "TOKENIZER_KEY",
    "WEIGHTS_KEY",
    "annotate",
    "arrays_of",
    "check_standard",
    "contract",
    "dump",
    "external_tensors",
    "fault",
    "inline",
    "link",
    "load",
    "metadata",
    "names_read",
    "parse",
    "place_of",
    "pointers",
    "referenced_tensors",
    "serialize",
    "set_place",
    "without_functions",
]

EVIDENCE_KEY = "zoo.evidence_sha256"
"""Graph metadata: digest of the evidence, see :func:`zoo_export.parity.evidence.evidence_digest`."""
WEIGHTS_KEY = "zoo.weights_sha256"
"""Graph metadata: digest of the weights that it was verified with."""
TOKENIZER_KEY = "zoo.tokenizer_sha256"
"""Graph metadata: digest of the tokenizer file."""
HEADER_KEY = "zoo.weights_header_sha256"
"""Graph metadata: digest of the names, dtypes, shapes and locations of all stored tensors."""
MODULE_KEY = "zoo.module"
"""Node metadata: path of the module that the node was traced from; inside a function, relative to the block."""
EXACT_KEY = "zoo.exact"
"""Metadata of a float16 or bfloat16 constant: the unrounded number in the model's code."""
FLAT_KEY = "zoo.without_functions"
"""Graph metadata: why repeated modules did not become functions, if functions were requested."""
BLOCK_KEY = "zoo.block"
"""Metadata of a function call: path of the module that it replaces."""

_DTYPES = {
    "F32": onnx.TensorProto.FLOAT, "F16": onnx.TensorProto.FLOAT16, "BF16": onnx.TensorProto.BFLOAT16,
    "F64": onnx.TensorProto.DOUBLE, "I64": onnx.TensorProto.INT64, "I32": onnx.TensorProto.INT32,
    "I8": onnx.TensorProto.INT8, "U8": onnx.TensorProto.UINT8, "BOOL": onnx.TensorProto.BOOL,
}  # fmt: skip


def parse(graph: bytes) -> onnx.ModelProto:
    """Parse a serialised graph, or raise :class:`ArtifactError`, also if code that reads it would fail."""
    digest = hashlib.sha256(graph).digest()
    if digest not in _SOUND:
        check_functions(graph)
    try:
        model = onnx.load_model_from_string(graph)
    except Exception as error:  # protobuf's errors have no common public base
        raise ArtifactError("not an ONNX graph") from error
    if digest not in _SOUND:
        _check_texts(model)
        for tensor in model.graph.initializer:
            _check_tensor(tensor)
        _SOUND.add(digest)
    return model


_SOUND: set[bytes] = set()
"""The SHA-256 of graphs that were checked in this process."""


def _check_texts(message: Message) -> None:
    """Raise :class:`ArtifactError` for text that is not UTF-8, which protobuf returns as bytes."""
    for field, value in message.ListFields():
        items = (value,) if isinstance(value, Message | str | bytes) else value
        if field.type == field.TYPE_MESSAGE:
            for item in items:
                _check_texts(item)
        elif field.type == field.TYPE_STRING and not all(isinstance(item, str) for item in items):
            raise ArtifactError("a text in the ONNX graph is not UTF-8")


_TYPES = frozenset(onnx.TensorProto.DataType.values()) - {onnx.TensorProto.UNDEFINED}
_OFFSET = re.compile("[0-9]{1,18}")


def _check_tensor(tensor: onnx.TensorProto) -> None:
    """Raise :class:`ArtifactError` for a tensor of an unknown type, or with a place that is none."""
    if tensor.data_type not in _TYPES:
        raise ArtifactError(f"the tensor {tensor.name} of the ONNX graph has the unknown type {tensor.data_type}")
    if any(size < 0 for size in tensor.dims):
        raise ArtifactError(f"the tensor {tensor.name} of the ONNX graph has a negative size")
    for entry in tensor.external_data:
        if entry.key in ("offset", "length") and not _OFFSET.fullmatch(entry.value):
            problem = f"the tensor {tensor.name} of the ONNX graph has the {entry.key} {entry.value!r:.40}"
            raise ArtifactError(problem)


def serialize(model: onnx.ModelProto) -> bytes:
    """Serialise a model deterministically."""
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def load(graph: bytes) -> ir.Model:
    """Parse a serialised graph for passes, or raise :class:`ArtifactError` as :func:`parse` does."""
    import onnx_ir as ir

    return ir.from_proto(parse(graph))


def dump(model: ir.Model) -> bytes:
    """Serialise the result of passes deterministically."""
    import onnx_ir as ir

    return serialize(ir.to_proto(model))


def metadata(graph: bytes) -> Mapping[str, str]:
    """Return the metadata of a serialised graph; empty if it cannot be parsed."""
    try:
        return {entry.key: entry.value for entry in parse(graph).metadata_props}
    except ArtifactError:
        return {}


def annotate(model: onnx.ModelProto, entries: Mapping[str, str]) -> None:
    """Add entries to a graph's metadata, replacing those with the same keys, and sort all by key."""
    before = {entry.key: entry.value for entry in model.metadata_props}
    del model.metadata_props[:]
    for key, value in sorted({**before, **entries}.items()):
        model.metadata_props.add(key=key, value=value)


def check_standard(model: onnx.ModelProto, *, types: bool = False) -> None:
    """Raise onnx's error if a graph violates the ONNX standard, such as by a name that nothing defines.

    Args:
        model: the graph; its external data are not read.
        types: whether to infer and check the types of all values, too.
    """
    checked = onnx.ModelProto()
    checked.CopyFrom(model)
    external = {tensor.name: tensor for tensor in external_tensors(checked)}
    constants = [tensor for tensor in checked.graph.initializer if tensor.name not in external]
    del checked.graph.initializer[:]
    checked.graph.initializer.extend(constants)
    inputs = {value.name for value in checked.graph.input}
    for name in sorted(external.keys() - inputs):  # as inputs, because the checker would look for their files
        tensor = external[name]
        checked.graph.input.append(onnx.helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))
    onnx.checker.check_model(checked, full_check=types)


def fault(model: onnx.ModelProto) -> str | None:
    """Return the first violation of the ONNX standard, or None."""
    try:
        check_standard(model)
    except onnx.checker.ValidationError as error:
        return " ".join(str(error).split())
    return None


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


def without_functions(graph: bytes) -> dict[str, str]:
    """Return why repeated modules of a graph did not become functions, where that was requested."""
    reason = metadata(graph).get(FLAT_KEY)
    return {"without_functions": reason} if reason else {}


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


def contract(model: ir.Model) -> str:
    """Return the names, dimensions and dtypes of a graph's inputs and outputs, as JSON for its metadata."""
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


def inline(model: ir.Model) -> ir.Model:
    """Inline all functions, in place. Nodes keep the full paths of their modules."""
    from onnx_ir.passes.common import InlinePass

    InlinePass()(model)
    for node in model.graph.all_nodes():
        path = (node.metadata_props.pop(BLOCK_KEY, ""), node.metadata_props.pop(MODULE_KEY, ""))
        if any(path):
            node.metadata_props[MODULE_KEY] = ".".join(filter(None, path))
    return model
