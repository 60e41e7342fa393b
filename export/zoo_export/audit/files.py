"""ONNX files of any tool: their inputs, outputs and precision, read without trust."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import onnx

from zoo.errors import ArtifactError
from zoo.reading import read_bytes
from zoo_export.graph.file import parse
from zoo_export.graph.links import names_read, place_of

__all__ = ["PRECISIONS", "ForeignGraph", "Port", "read_graph"]

PRECISIONS = ("int4", "int8", "bfloat16", "float16", "float32")
"""Precisions by which graphs are judged, the coarsest first."""
_IN_INT8 = frozenset({"DequantizeLinear", "QuantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger",
                      "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "DynamicQuantizeLSTM", "QAttention", "QGemm",
                      "QEmbedLayerNormalization"})  # fmt: skip
"""Operators of graphs that compute in 8 bits."""
_IN_BITS = frozenset({"MatMulNBits", "GatherBlockQuantized", "MatMulBnb4", "QMoE"})
"""Operators whose weights have the number of bits of an attribute, 4 by default."""
_BITS = {"INT4": "int4", "UINT4": "int4", "FLOAT4E2M1": "int4", "INT8": "int8", "UINT8": "int8",
         "BFLOAT16": "bfloat16", "FLOAT16": "float16", "FLOAT": "float32", "DOUBLE": "float32"}  # fmt: skip
"""The precision of matrices by the type that they are stored in."""
_SHARE = 0.1
"""Part of the numbers in matrices that have a precision if the graph is judged by it."""


@dataclass(frozen=True, slots=True)
class Port:
    """An input or an output of a graph."""

    name: str
    dims: tuple[str | int, ...] | None
    """A size that is fixed, or the name of one that is free, perhaps empty. None if the rank is unknown."""
    dtype: np.dtype[Any]

    def fixed(self, axis: int) -> int | None:
        """Return the size of an axis if it is fixed."""
        dim = self.dims[axis] if self.dims is not None and -len(self.dims) <= axis < len(self.dims) else None
        return dim if isinstance(dim, int) else None


@dataclass(frozen=True, slots=True)
class ForeignGraph:
    """An ONNX file."""

    path: Path
    label: str
    """The name of the file in the report, which no other graph has."""
    inputs: tuple[Port, ...]
    """The inputs without a default value."""
    outputs: tuple[Port, ...]
    unread: frozenset[str]
    """Inputs that no node reads."""
    precision: str
    """One of :data:`PRECISIONS`."""
    producer: str
    opset: int
    sha256: str
    """SHA-256 of the file without its external data."""

    @property
    def dtype(self) -> str:
        """The dtype in which it computes, as far as its rounding is concerned."""
        return "float32" if self.precision in ("int4", "int8") else self.precision


def read_graph(path: Path, label: str | None = None) -> ForeignGraph:
    """Read an ONNX file without its external data. ``label`` is its name in the report, by default that of the file.

    Raises:
        ArtifactError: it is no ONNX graph, or its external data is missing, too short, or in another folder.
    """
    try:
        data = read_bytes(path)
    except OSError as error:
        raise ArtifactError(f"cannot be read ({error.strerror})", path) from error
    try:
        model = parse(data)
    except ArtifactError as error:
        raise ArtifactError(error.what, path) from error
    if not model.graph.output or not model.graph.node:
        raise ArtifactError("not an ONNX graph", path, "give a file that an exporter wrote")
    for tensor in _tensors(model):
        _check_place(tensor, path)
    given = {tensor.name for tensor in model.graph.initializer}
    read = {*names_read(model.graph.node), *(output.name for output in model.graph.output)}
    inputs = tuple(_port(value, path) for value in model.graph.input if value.name not in given)
    return ForeignGraph(
        path=path,
        label=label or path.name,
        inputs=inputs,
        outputs=tuple(_port(value, path) for value in model.graph.output),
        unread=frozenset(port.name for port in inputs if port.name not in read),
        precision=_precision(model),
        producer=f"{model.producer_name} {model.producer_version}".strip() or "an unnamed tool",
        opset=max((item.version for item in model.opset_import if item.domain in ("", "ai.onnx")), default=0),
        sha256=hashlib.sha256(data).hexdigest(),
    )


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and those inside its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                if inner.node or inner.initializer:
                    yield from _graphs(inner)


def _nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    for graph in _graphs(model.graph):
        yield from graph.node
    for function in model.functions:
        yield from function.node


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield all constants: initialisers and attributes."""
    for graph in _graphs(model.graph):
        yield from graph.initializer
    for node in _nodes(model):
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors


def _check_place(tensor: onnx.TensorProto, path: Path) -> None:
    """Raise :class:`ArtifactError` unless the external data of a tensor lies in the folder of its graph."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return
    location, offset, length = place_of(tensor)
    parts = {*PurePosixPath(location).parts, *PureWindowsPath(location).parts}
    if not location or ".." in parts or PurePosixPath(location).is_absolute() or PureWindowsPath(location).anchor:
        problem = f"the weights of {tensor.name!r:.80} lie outside the folder of the graph, at {location!r:.80}"
        raise ArtifactError(problem, path, "put graph and weights into one folder")
    file = path.parent / location
    if not file.is_file():
        raise ArtifactError(f"the file of weights {location!r:.80} is missing", path, "copy it beside the graph")
    if offset + length > file.stat().st_size:
        raise ArtifactError(f"the file of weights {location!r:.80} is too short", path, "is it complete?")


def _port(value: onnx.ValueInfoProto, path: Path) -> Port:
    tensor = value.type.tensor_type
    kind = tensor.elem_type or onnx.TensorProto.FLOAT  # some tools leave out the types of outputs
    try:
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind))
    except KeyError as error:
        raise ArtifactError(f"{value.name!r:.80} is no tensor of numbers", path) from error
    return Port(value.name, tuple(map(_dim, tensor.shape.dim)) if tensor.HasField("shape") else None, dtype)


def _dim(dim: onnx.TensorShapeProto.Dimension) -> str | int:
    return int(dim.dim_value) if dim.HasField("dim_value") else str(dim.dim_param)


def _precision(model: onnx.ModelProto) -> str:
    """Return the coarsest precision that a considerable part of the matrices has, and that operators compute in.

    Otherwise a single constant would decide the rule: those of any type occur in any graph.
    """
    used = {"float32", "float16", "bfloat16"}
    for node in _nodes(model):
        if node.op_type in _IN_BITS:
            bits = next((item.i for item in node.attribute if item.name == "bits"), 4)
            used.add("int4" if bits <= 4 else "int8")
        elif node.op_type in _IN_INT8 or node.op_type.startswith("QLinear"):
            used |= {"int8", "int4"}
    counts: Counter[str] = Counter()
    for tensor in _tensors(model):
        stored = _BITS.get(onnx.TensorProto.DataType.Name(tensor.data_type))
        if stored is not None and len(tensor.dims) > 1:
            packed = stored == "int8" and "int8" not in used  # two numbers of 4 bits in a byte
            counts["int4" if packed else stored] += math.prod(tensor.dims) * (1 + packed)
    least = _SHARE * counts.total()
    return next((name for name in PRECISIONS if name in used and counts[name] >= least > 0), "float32")
