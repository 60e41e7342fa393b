"""Reading and writing of ONNX graphs.

A graph has two forms. Passes take and return ``onnx_ir.Model``: see :func:`load` and :func:`dump`. What is done to
every file, linking and metadata, is done on the parsed protobuf, because onnx-ir imports sympy, which takes as long as
the rest of an export whose traces are cached.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

import onnx
from google.protobuf.message import Message

from zoo.errors import ArtifactError
from zoo_runtime.onnx_runtime.functions import check_functions

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["dump", "load", "parse", "serialize"]


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
