"""Execution of a model's declared graphs in order, on any executor, such as ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from zoo.arrays import Array
from zoo.contract import Graph
from zoo.errors import UsageError
from zoo.probe.dtypes import dtype_of
from zoo.probe.inputs import Feeds, Point, empty_past, next_past, slice_feeds

__all__ = ["Arrays", "Executor", "decoder_inputs", "run_pipeline", "token_input", "typed_feeds"]

Arrays = dict[str, Array]


class Executor(Protocol):
    """Runs one graph on named arrays. ``dtype`` is the dtype of its floating-point inputs."""

    dtype: np.dtype[Any]

    def __call__(self, graph: Graph, feeds: Feeds) -> Arrays: ...


def typed_feeds(graph: Graph, feeds: Feeds, dtype: np.dtype[Any]) -> Arrays:
    """Return a graph's inputs in declaration order, with the floating-point ones in ``dtype``."""
    return {
        tensor.name: feeds[tensor.name].astype(dtype_of(tensor, dtype), copy=False) for tensor in graph.input_tensors()
    }


def run_pipeline(
    executor: Executor, graphs: Sequence[Graph], feeds: Feeds, point: Point, *, split: bool
) -> dict[str, Arrays]:
    """Return the outputs of every graph; outputs of earlier graphs are inputs of later ones.

    With ``split``, a graph with a past is called on the first ``point.past`` tokens and then on the rest. Otherwise it
    is called once on all tokens, and the outputs of the last ``point.length`` are returned. Both must give the same
    result, as :class:`zoo.Graph` requires.
    """
    arrays: Arrays = dict(feeds)
    results = {}
    for graph in graphs:
        inputs = {tensor.name: arrays[tensor.name] for tensor in graph.input_tensors() if tensor.name in arrays}
        if not graph.pasts:
            outputs = executor(graph, inputs)
        else:
            stop = point.past + point.length
            calls = [(0, point.past), (point.past, stop)] if split and point.past else [(0, stop)]
            past = empty_past(graph, point.batch, executor.dtype)
            outputs = {}
            for start, end in calls:
                outputs = executor(graph, dict(slice_feeds(graph, inputs, start, end)) | past)
                past = next_past(graph, outputs)
            for tensor in graph.output_tensors():
                if "sequence" in tensor.dims and not split:
                    axis = tensor.dims.index("sequence")
                    outputs[tensor.name] = outputs[tensor.name].take(range(point.past, stop), axis)
        arrays |= outputs
        results[graph.name] = outputs
    return results


def token_input(graph: Graph) -> str | None:
    """Return the name of a decoder's token-id input, or None if it has none, for example if it reads embeddings."""
    for tensor in graph.input_tensors():
        is_numbers = tensor.dtype == "int64" and not (tensor.is_mask or tensor.is_blocks)
        if tensor.dims == ("batch", "sequence") and is_numbers:
            return tensor.name
    return None


def decoder_inputs(graph: Graph) -> tuple[str, str | None]:
    """Return the names of the token-id input and of the mask (or None), which grow by one entry per step.

    Raises :class:`UsageError` for a graph that reads no token ids.
    """
    tensors, ids = graph.input_tensors(), token_input(graph)
    if ids is None:
        raise UsageError(f"graph {graph.name!r} reads no token ids, so it cannot generate text")
    return ids, next(
        (tensor.name for tensor in tensors if tensor.is_mask and tensor.dims[1] == graph.total_length), None
    )
