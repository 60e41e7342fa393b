"""Requests and answers of the Open Inference Protocol: tensors in JSON, and as binary data after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from zoo.arrays import Array
from zoo.contract import TensorSpec
from zoo.probe.dtypes import dtype_of, is_bfloat16
from zoo_runtime.server.http.bodies import Body, BodyPart
from zoo_runtime.server.http.encoding import encode_json
from zoo_runtime.server.request_error import RequestError

__all__ = ["Array", "InferBody", "RequestTensor", "datatype_of", "decode", "encode", "tensor_dtype"]

Natural = Annotated[int, Field(ge=0)]
_DTYPES = {"BOOL": "?", "INT8": "i1", "INT32": "<i4", "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8"}
_NAMES = {np.dtype(code): name for name, code in _DTYPES.items()}
_KINDS = {"BOOL": "b", "INT8": "iu", "INT32": "iu", "INT64": "iu"}
"""Kinds of JSON numbers that each datatype accepts. Floating-point datatypes accept all but booleans."""


class Hints(BodyPart):
    """Parameters with which clients say how codecs of other servers would read an array."""

    content_type: str | None = None
    """Ignored: tensors are read by their datatype."""
    headers: dict[str, Any] | None = None
    """Ignored."""


class InputParameters(Hints):
    """Parameters of an input."""

    binary_data_size: Natural | None = None
    """Number of bytes of the tensor after the JSON, in place of ``data``."""


class RequestTensor(BodyPart):
    """An input."""

    name: str
    shape: Annotated[list[Natural], Field(max_length=32, fail_fast=True)]
    datatype: Literal["BOOL", "INT8", "INT32", "INT64", "FP16", "FP32", "FP64"]
    parameters: InputParameters | None = None
    data: list[Any] | None = None
    """The numbers in row-major order, as a flat list or nested ones."""

    @property
    def size(self) -> int | None:
        """Number of its bytes after the JSON; None if it has ``data``."""
        return self.parameters.binary_data_size if self.parameters is not None else None


class OutputParameters(Hints):
    """Parameters of an output."""

    binary_data: bool | None = None
    """Return the tensor as bytes after the JSON."""


class RequestOutput(BodyPart):
    """An output to return."""

    name: str
    parameters: OutputParameters | None = None


class InferParameters(Hints):
    """Parameters of a request."""

    binary_data_output: bool = False
    """Return outputs as bytes after the JSON, unless they say otherwise."""


class InferBody(Body):
    """Body of ``/v2/models/NAME/infer``."""

    id: str | None = None
    """Returned with the answer."""
    parameters: InferParameters | None = None
    inputs: Annotated[list[RequestTensor], Field(min_length=1, fail_fast=True)]
    """Inputs of a past may be left out, all of them together: the past is empty then."""
    outputs: Annotated[list[RequestOutput], Field(fail_fast=True)] | None = None
    """Outputs to return; by default all."""

    def binary(self, output: RequestOutput | None) -> bool:
        """Return whether an output is returned as bytes."""
        asked = None if output is None or output.parameters is None else output.parameters.binary_data
        return self.parameters is not None and self.parameters.binary_data_output if asked is None else asked


def tensor_dtype(tensor: TensorSpec, real: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a declared tensor, given that of the model. The protocol has bfloat16 as float32."""
    dtype = dtype_of(tensor, real)
    return np.dtype(np.float32) if is_bfloat16(dtype) else dtype


def datatype_of(dtype: np.dtype[Any]) -> str:
    """Return the protocol's name of a dtype."""
    return _NAMES[dtype.newbyteorder("<")]


def decode(tensors: Sequence[RequestTensor], rest: bytes) -> dict[str, Array]:
    """Return the arrays of inputs, by name.

    Args:
        tensors: the inputs.
        rest: the bytes after the JSON.

    Raises:
        RequestError: the numbers do not fit the shape or the datatype, or an input is given twice.
    """
    arrays: dict[str, Array] = {}
    start = 0
    for place, tensor in enumerate(tensors):
        param = f"inputs[{place}]"
        if tensor.name in arrays:
            raise RequestError(400, f"the input {tensor.name!r:.100} is given twice", "invalid_value", param)
        if (tensor.data is None) == (tensor.size is None):
            problem = f"{tensor.name!r:.100} needs either data or binary_data_size"
            raise RequestError(400, problem, "invalid_value", param)
        if tensor.size is None:
            array = _from_json(tensor, param)
        else:
            array = _from_bytes(tensor, rest[start : start + tensor.size], param)
            start += tensor.size
        try:
            arrays[tensor.name] = array.reshape(tensor.shape)
        except (ValueError, OverflowError) as error:
            problem = f"{tensor.name!r:.100} has {array.size} numbers, which do not fit the shape {tensor.shape}"
            raise RequestError(400, problem, "invalid_value", param) from error
    if start != len(rest):
        raise RequestError(400, f"{len(rest)} bytes after the JSON, but the inputs have {start}", "invalid_value")
    return arrays


def _from_json(tensor: RequestTensor, param: str) -> Array:
    dtype = np.dtype(_DTYPES[tensor.datatype])
    try:
        array = np.array(tensor.data)
    except ValueError:  # lists of different lengths
        array = np.array(None)
    mixed = array.dtype.kind != "b" and _has_booleans(tensor.data)  # which numpy has made numbers
    if array.size and (mixed or array.dtype.kind not in _KINDS.get(tensor.datatype, "iuf")):
        problem = f"the data of {tensor.name!r:.100} are not numbers of the type {tensor.datatype}"
        raise RequestError(400, problem, "invalid_type", param)
    with np.errstate(over="ignore"):
        converted = array.astype(dtype)
    exact = np.isfinite(converted).all() if dtype.kind == "f" else (converted == array).all()
    if array.size and not exact:
        raise RequestError(400, f"the data of {tensor.name!r:.100} are out of range", "invalid_value", param)
    return converted


def _has_booleans(data: Any) -> bool:
    kinds = set(map(type, data or ()))
    return bool in kinds or (list in kinds and any(_has_booleans(item) for item in data if isinstance(item, list)))


def _from_bytes(tensor: RequestTensor, data: bytes, param: str) -> Array:
    dtype = np.dtype(_DTYPES[tensor.datatype])
    if len(data) != tensor.size or len(data) % dtype.itemsize:
        problem = (
            f"{tensor.name!r:.100} has {len(data)} bytes instead of {tensor.size}, of {dtype.itemsize} each number"
        )
        raise RequestError(400, problem, "invalid_value", param)
    if tensor.datatype == "BOOL":
        return np.frombuffer(data, np.uint8) != 0
    return np.frombuffer(data, dtype)


def encode(facts: Mapping[str, Any], outputs: Sequence[tuple[str, Array, bool]]) -> tuple[bytes, int | None]:
    """Return the body of an answer, and the length of its JSON if binary data follow.

    Args:
        facts: fields besides ``outputs``.
        outputs: each output with its name, and whether it is returned as bytes.

    Raises:
        RequestError: a number that JSON cannot express, or too many numbers: see :func:`encode_json`.
    """
    described: list[dict[str, Any]] = []
    parts: list[bytes] = []
    for name, array, binary in outputs:
        tensor: dict[str, Any] = {"name": name, "datatype": datatype_of(array.dtype), "shape": list(array.shape)}
        if binary:
            parts.append(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
            tensor["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                problem = f"the output {name} has numbers that are not finite: ask for binary data"
                raise RequestError(400, problem, "not_finite")
            tensor["data"] = array.ravel()
        described.append(tensor)
    text = encode_json({**facts, "outputs": described}, "ask for binary data")
    return b"".join([text, *parts]), len(text) if parts else None
