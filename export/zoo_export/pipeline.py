"""Running a model's declared graphs one after the other, on ONNX Runtime or on anything that can run one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import onnxruntime as ort

from zoo.contract import Graph
from zoo_export.grid import Feeds, Point, empty_past, slice_feeds

__all__ = ["Arrays", "Executor", "OnnxExecutor", "next_past", "run_pipeline", "typed_feeds"]

Arrays = dict[str, "np.ndarray[Any, Any]"]


class Executor(Protocol):
    """Runs one graph on named arrays. ``dtype`` is that of its real inputs."""

    dtype: np.dtype[Any]

    def __call__(self, graph: Graph, feeds: Feeds) -> Arrays: ...


class OnnxExecutor:
    """One session for each graph."""

    def __init__(self, sessions: Mapping[str, ort.InferenceSession], dtype: np.dtype[Any]) -> None:
        self.sessions = sessions
        self.dtype = dtype

    def __call__(self, graph: Graph, feeds: Feeds) -> Arrays:
        session = self.sessions[graph.name]
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(names, typed_feeds(graph, feeds, self.dtype)), strict=True))


def typed_feeds(graph: Graph, feeds: Feeds, dtype: np.dtype[Any]) -> Arrays:
    """A graph's inputs in the order of its declaration, the real ones in ``dtype``."""
    return {
        tensor.name: feeds[tensor.name].astype(np.int64 if tensor.dtype == "int64" else dtype, copy=False)
        for tensor in graph.input_tensors()
    }


def run_pipeline(
    executor: Executor, graphs: Sequence[Graph], feeds: Feeds, point: Point, *, split: bool
) -> dict[str, Arrays]:
    """Every graph's outputs, each graph fed by the ones before it.

    With ``split`` a graph with a past is called on the first ``point.past`` tokens and then on the rest; without, once
    on all of them, of which the last ``point.length`` are returned. The law of :class:`zoo.Graph` makes these equal.
    """
    known: Arrays = dict(feeds)
    results = {}
    for graph in graphs:
        inputs = {tensor.name: known[tensor.name] for tensor in graph.input_tensors() if tensor.name in known}
        if graph.past is None:
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
        known |= outputs
        results[graph.name] = outputs
    return results


def next_past(graph: Graph, outputs: Mapping[str, Any]) -> dict[str, Any]:
    """The past of the next call, from this call's present."""
    if graph.past is None:
        return {}
    pairs = zip(graph.past.tensors(), graph.present_tensors(), strict=True)
    return {past.name: outputs[present.name] for past, present in pairs}
