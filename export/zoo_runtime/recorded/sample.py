"""The file of a recorded comparison, ``recorded.safetensors.gz``.

It holds safetensors, compressed by gzip: reading them executes nothing, and takes no more memory than the file has
numbers, which neither the pickles nor the declared shapes of ``.npz`` files ensure. The tensor ``index`` is JSON that
describes the others.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from zoo.arrays import Array
from zoo.contract import Graph, dim_names
from zoo.errors import EXPORT_AGAIN, ArtifactError
from zoo.probe.inputs import Padding, Point, given_inputs
from zoo_runtime.onnx_runtime.executor import check_values

__all__ = ["RecordedCall", "RecordedOutput", "Sample", "digest_of", "dump", "parse"]

_SCHEMA = 1
_LARGEST = 2**24
"""Bytes of the decompressed file that are read at most."""
_TOKENS = 2**20
"""Tokens that a point may have at most: inputs are generated from its sizes."""
_MALFORMED = (ArtifactError, AttributeError, KeyError, OverflowError, RecursionError, SafetensorError, TypeError,
              ValueError, zlib.error)  # fmt: skip
_DTYPES = {"places": np.dtype(np.int64), "values": np.dtype(np.float64), "allowed": np.dtype(np.float64),
           "best": np.dtype(np.int64)}  # fmt: skip
"""The tensors with the numbers of all outputs, one output after another."""


@dataclass(frozen=True, kw_only=True)
class RecordedOutput:
    """Numbers of one output at one point, computed by the model in float64."""

    graph: str
    name: str
    shape: tuple[int, ...]
    places: Array
    """(N,) places of the recorded numbers in the output, in C order."""
    values: Array
    """(N,) the numbers in float64."""
    allowed: Array
    """(N,) the largest allowed error of each."""
    best: Array
    """(M,) places of the largest logit of some rows, those without a near-tie."""


@dataclass(frozen=True, kw_only=True)
class RecordedCall:
    """The inputs and outputs of the graphs at one point of the grid."""

    point: Point
    inputs: Mapping[str, Array]
    """The inputs of the graphs by name. Those of tokens have all ``past + length`` of them."""
    generated: Mapping[str, str]
    """:func:`digest_of` the inputs that are too large for the file: those that ``make_feeds`` makes for the point."""
    outputs: Sequence[RecordedOutput]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A recorded comparison."""

    calls: Sequence[RecordedCall]
    seed: int
    """This and the next three are arguments of :func:`zoo.probe.inputs.make_feeds`."""
    longest: int
    special: Sequence[int]
    fixed: Mapping[str, int]


def digest_of(values: Array) -> str:
    """Return the SHA-256 of an array's numbers in hexadecimal."""
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def dump(sample: Sample) -> bytes:
    """Return the content of the file; the same bytes for the same sample."""
    outputs = [output for call in sample.calls for output in call.outputs]
    index = {
        "schema": _SCHEMA,
        "seed": sample.seed,
        "longest": sample.longest,
        "special": list(sample.special),
        "fixed": dict(sample.fixed),
        "calls": [
            {
                "point": call.point.to_dict(),
                "inputs": list(call.inputs),
                "generated": dict(call.generated),
                "outputs": [
                    {
                        "graph": output.graph,
                        "name": output.name,
                        "shape": output.shape,
                        "numbers": len(output.places),
                        "best": len(output.best),
                    }
                    for output in call.outputs
                ],
            }
            for call in sample.calls
        ],
    }
    tensors = {
        f"inputs.{number}.{name}": np.ascontiguousarray(value)
        for number, call in enumerate(sample.calls)
        for name, value in call.inputs.items()
    }
    for name in _DTYPES:
        tensors[name] = np.concatenate([getattr(output, name) for output in outputs])
    tensors["index"] = np.frombuffer(json.dumps(index).encode(), np.uint8)
    return gzip.compress(save(tensors), mtime=0)


def parse(content: bytes, graphs: Sequence[Graph], where: object) -> Sample:
    """Read the content of the file.

    Args:
        content: from a file that anyone may have written.
        graphs: the declared graphs, whose inputs and outputs it must have.
        where: the file, for errors.

    Raises:
        ArtifactError: the content is truncated, malformed or too large, or does not fit the graphs.
    """
    try:
        return _Reader(load(_decompressed(content)), graphs).sample()
    except _MALFORMED as error:
        problem = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ArtifactError(f"not a recorded comparison ({problem:.200})", where, EXPORT_AGAIN) from error


def _decompressed(content: bytes) -> bytes:
    reader = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)  # gzip
    data = reader.decompress(content, _LARGEST)
    if reader.unconsumed_tail:
        raise ValueError(f"more than {_LARGEST:,} bytes")
    if not reader.eof or reader.unused_data:
        raise ValueError("truncated, or followed by other data")
    return data


class _Reader:
    """Reads a sample from tensors. Its methods raise the exceptions that :func:`parse` converts."""

    def __init__(self, tensors: Mapping[str, Array], graphs: Sequence[Graph]) -> None:
        self._tensors, self._graphs = tensors, graphs
        self._inputs = given_inputs(graphs)
        self._outputs = {(graph.name, tensor.name): tensor for graph in graphs for tensor in graph.output_tensors()}
        self._read = dict.fromkeys(_DTYPES, 0)
        """Count of the numbers that outputs have taken so far, by tensor."""
        for name, dtype in _DTYPES.items():
            values = tensors[name]
            if values.dtype != dtype or values.ndim != 1 or not np.isfinite(values).all():
                raise ValueError(f"{name} are not finite numbers of the type {dtype}")
        if np.min(tensors["allowed"], initial=0.0) < 0:
            raise ValueError("an allowed error is negative")

    def sample(self) -> Sample:
        index = json.loads(self._tensors["index"].tobytes())
        if index["schema"] != _SCHEMA:
            raise ValueError(f"it has the schema {index['schema']!r:.40}")
        sample = Sample(
            calls=[self._call(number, entry) for number, entry in enumerate(index["calls"])],
            seed=_count(index["seed"]),
            longest=_count(index["longest"], 1),
            special=[int(number) for number in index["special"]],
            fixed={name: _count(size, 1) for name, size in index["fixed"].items()},
        )
        if not sample.calls or any(count != len(self._tensors[name]) for name, count in self._read.items()):
            raise ValueError("its index describes other numbers")
        outputs = [output for call in sample.calls for output in call.outputs if output.places.size]
        if missing := sorted(self._outputs.keys() - {(output.graph, output.name) for output in outputs}):
            raise ValueError(f"it has no numbers of {' of '.join(reversed(missing[0]))}")
        return sample

    def _call(self, number: int, entry: Any) -> RecordedCall:
        sizes = entry["point"]
        batch, length, past = _count(sizes["batch"], 1), _count(sizes["length"], 1), _count(sizes["past"])
        point = Point(batch, length, past, sizes["padding"])
        if point.padding not in get_args(Padding) or point.tokens > _TOKENS:
            raise ValueError(f"{point} is not a point of a grid")
        inputs = {name: self._tensors[f"inputs.{number}.{name}"] for name in entry["inputs"]}
        if {*inputs, *entry["generated"]} != self._inputs.keys():
            raise ValueError(f"its inputs are not those of the graphs: {', '.join(sorted(self._inputs))}")
        self._check_inputs(point, inputs)
        outputs = [self._output(part) for part in entry["outputs"]]
        return RecordedCall(point=point, inputs=inputs, generated=dict(entry["generated"]), outputs=outputs)

    def _check_inputs(self, point: Point, inputs: Mapping[str, Array]) -> None:
        sizes: dict[str, int] = {}
        for graph in self._graphs:
            if graph.pasts:
                sizes |= {"batch": point.batch, "sequence": point.past + point.length, str(graph.past_length): 0}
        for name, value in inputs.items():
            tensor = self._inputs[name]
            for dim, size in zip(tensor.dims, value.shape, strict=True):
                if dim_names(dim) == (dim,):
                    sizes.setdefault(str(dim), size)
            if tensor.shape(sizes) != value.shape:
                raise ValueError(f"{name} has the shape {value.shape}")
            check_values(tensor, value, str(point))

    def _output(self, entry: Any) -> RecordedOutput:
        tensor = self._outputs[entry["graph"], entry["name"]]
        shape = tuple(_count(size) for size in entry["shape"])
        if len(shape) != len(tensor.dims):
            raise ValueError(f"{tensor.name} has {len(shape)} dimensions")
        places, values, allowed = (self._take(name, entry["numbers"]) for name in ("places", "values", "allowed"))
        best = self._take("best", entry["best"])
        for part in (places, best):
            if part.size and not 0 <= part.min() <= part.max() < math.prod(shape):
                raise ValueError(f"a place is outside of {tensor.name}")
        return RecordedOutput(
            graph=entry["graph"],
            name=tensor.name,
            shape=shape,
            places=places,
            values=values,
            allowed=allowed,
            best=best,
        )

    def _take(self, name: str, count: Any) -> Array:
        """Return the next numbers of a tensor."""
        start = self._read[name]
        self._read[name] += _count(count)
        return self._tensors[name][start : start + count]


def _count(value: Any, low: int = 0) -> int:
    if type(value) is not int or not low <= value < 2**31:
        raise ValueError(f"{value!r:.40} is not a whole number from {low}")
    return value
