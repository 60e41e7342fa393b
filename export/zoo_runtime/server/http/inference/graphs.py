"""The graphs of a model, run on the tensors of requests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zoo.arrays import Array
from zoo.contract import Graph, TensorSpec, dim_names
from zoo.errors import ArtifactError, ZooError
from zoo.probe.pipeline import token_input
from zoo_runtime.onnx_runtime.run_errors import RunError
from zoo_runtime.running.runner import Runner
from zoo_runtime.server.http.inference.tensors import datatype_of, tensor_dtype
from zoo_runtime.server.models import Served
from zoo_runtime.server.request_error import RequestError

__all__ = ["GraphRunner", "described", "graph_names"]

_MOST_BYTES = 2**28
"""Maximum size of all outputs of a request, which grow with rows and vocabulary: 256 MiB."""


def graph_names(served: Served) -> dict[str, Graph]:
    """Return the graphs of a model by their names in the protocol.

    The only graph of a model has the model's name. Several, such as the encoder and the decoder, are NAME.GRAPH.
    """
    graphs = served.session.graphs
    if len(graphs) == 1:
        return {served.name: graphs[0]}
    return {f"{served.name}.{graph.name}": graph for graph in graphs}


def described(served: Served, name: str, graph: Graph) -> dict[str, Any]:
    """Return the metadata of a graph. Dimensions that are free are -1."""

    def listed(tensors: Sequence[TensorSpec]) -> list[dict[str, Any]]:
        return [
            {
                "name": tensor.name,
                "datatype": datatype_of(tensor_dtype(tensor, served.session.dtype)),
                "shape": [dim if isinstance(dim, int) else -1 for dim in tensor.dims],
            }
            for tensor in tensors
        ]

    facts = {"name": name, "versions": ["1"], "platform": "onnxruntime_onnx"}
    return {**facts, "inputs": listed(graph.input_tensors()), "outputs": listed(graph.output_tensors())}


@dataclass(frozen=True)
class _Feeds:
    """The inputs of one request."""

    arrays: Mapping[str, Array]


class GraphRunner(Runner[_Feeds]):
    """Runs one graph on arrays, as a task whose results are its outputs."""

    def __init__(self, served: Served, graph: Graph) -> None:
        super().__init__(served.session, None)
        self.graph = graph
        self.served = served
        self.plugin = served.session.stored.spec.plugin

    def read(self, value: Mapping[str, Array], number: int = 1) -> _Feeds:
        """Check the arrays of a request. Raises :class:`RequestError` for any that the graph does not declare."""
        declared = {tensor.name: tensor for tensor in self.graph.input_tensors()}
        for name, array in value.items():
            if name not in declared:
                raise _wrong(f"unknown input {name!r:.100}, known: {', '.join(declared)}"[:900])
            expected = datatype_of(tensor_dtype(declared[name], self.served.session.dtype))
            if datatype_of(array.dtype) != expected:
                raise _wrong(f"{name} must have the datatype {expected}, not {datatype_of(array.dtype)}")
        pasts = {tensor.name for tensor in self.graph.past_tensors()}
        absent = [name for name in declared if name not in value]
        if absent and not (set(absent) == pasts):
            raise _wrong(f"the input {absent[0]} is missing")
        self._check_sizes({name: value[name] for name in declared if name in value}, declared, empty=bool(absent))
        return _Feeds(value)

    def answer(self, items: Sequence[_Feeds]) -> Sequence[dict[str, Any] | ZooError]:
        """Return the outputs of each request."""
        return list(self._answers(items))

    def _answers(self, items: Sequence[_Feeds]) -> Iterator[dict[str, Any] | ZooError]:
        for item in items:
            try:
                outputs = self.session.execute(self.graph, item.arrays)
                yield {tensor.name: outputs[tensor.name] for tensor in self.graph.output_tensors()}
            except RunError as error:
                yield ArtifactError(f"the graph {self.graph.name} refuses the inputs ({error.__cause__})")
            except ZooError as error:
                yield error

    def _check_sizes(self, arrays: Mapping[str, Array], declared: Mapping[str, TensorSpec], *, empty: bool) -> None:
        """Raise :class:`RequestError` unless the shapes agree with each other and with the declaration."""
        sizes: dict[str, int] = {}
        if empty and self.graph.past_length is not None:
            sizes[self.graph.past_length] = 0
        for name, array in arrays.items():
            dims = declared[name].dims
            if array.ndim != len(dims):
                raise _wrong(f"{name} must have {len(dims)} dimensions, not {array.ndim}")
            for dim, size in zip(dims, array.shape, strict=True):
                if isinstance(dim, str) and dim_names(dim) == (dim,) and sizes.setdefault(dim, size) != size:
                    raise _wrong(f"{dim} of {name} is {size}, but {sizes[dim]} in another input")
        for name, size in sizes.items():
            if size < 1 and name != self.graph.past_length:
                raise _wrong(f"{name} must be at least 1")
        for name, array in arrays.items():
            tensor = declared[name]
            if tensor.shape(sizes) != array.shape:
                raise _wrong(f"{name} must have the shape {list(tensor.shape(sizes))}, not {list(array.shape)}")
            if tensor.upper is not None and array.size and not 0 <= array.min() <= array.max() < tensor.upper:
                raise _wrong(f"{name} must have integers from 0 to {tensor.upper - 1}")
        positions = self.served.positions
        ids = token_input(self.graph)
        length = arrays[ids].shape[1] if ids is not None and arrays[ids].ndim == 2 else 0
        past = sizes.get(self.graph.past_length or "", 0)
        if positions is not None and length + past > positions:
            raise _wrong(f"{length + past} tokens do not fit in the {positions} positions of the model")
        outputs = [tensor for tensor in self.graph.output_tensors() if _known(tensor, sizes)]
        total = sum(4 * math.prod(tensor.shape(sizes)) for tensor in outputs)
        if total > _MOST_BYTES:
            raise _wrong(f"the outputs would have {total} bytes, more than {_MOST_BYTES}: send fewer rows at a time")


def _known(tensor: TensorSpec, sizes: Mapping[str, int]) -> bool:
    return all(name in sizes for dim in tensor.dims for name in dim_names(dim))


def _wrong(problem: str) -> RequestError:
    return RequestError(400, problem, "invalid_value", "inputs")
