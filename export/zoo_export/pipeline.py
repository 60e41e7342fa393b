"""Running a model's declared graphs one after the other, on ONNX Runtime or on anything that can run one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import onnxruntime as ort

from zoo.contract import Graph
from zoo_export.grid import Feeds, Point, empty_past, next_past, slice_feeds
from zoo_export.in_place import PAST_LENGTH, Buffers, run_in_place
from zoo_export.values import run_session

__all__ = ["LOGITS_TO_KEEP", "Arrays", "Executor", "OnnxExecutor", "run_pipeline", "typed_feeds"]

LOGITS_TO_KEEP = "logits_to_keep"
"""The input of some graphs that says how many last positions have logits, 0 for all."""
Arrays = dict[str, "np.ndarray[Any, Any]"]


class Executor(Protocol):
    """Runs one graph on named arrays. ``dtype`` is that of its real inputs."""

    dtype: np.dtype[Any]

    def __call__(self, graph: Graph, feeds: Feeds) -> Arrays: ...


class OnnxExecutor:
    """One session for each graph.

    A graph whose caches are buffers gets them here: what it returns as present are views of the buffers, and when
    those come back as the past the graph goes on in them, without a copy.

    Args:
        sessions: by the name of the graph.
        dtype: of real inputs.
        twice: call a graph that can compute the logits of the last position alone for all of them and for the last,
            and let the last be what the second call returned: so a comparison sees both.
    """

    def __init__(
        self, sessions: Mapping[str, ort.InferenceSession], dtype: np.dtype[Any], *, twice: bool = True
    ) -> None:
        self.sessions = sessions
        self.dtype = dtype
        self.twice = twice
        self.buffers: dict[str, Buffers] = {}

    def __call__(self, graph: Graph, feeds: Feeds) -> Arrays:
        session = self.sessions[graph.name]
        arrays = typed_feeds(graph, feeds, self.dtype)
        inputs = {item.name for item in session.get_inputs()}
        if LOGITS_TO_KEEP not in inputs:
            return self._run(graph, session, arrays)
        outputs = self._run(graph, session, arrays | {LOGITS_TO_KEEP: np.array(0)})
        if self.twice and len(outputs) == len(graph.output_tensors()):  # else somebody looks into the graph
            last = self._run(graph, session, arrays | {LOGITS_TO_KEEP: np.array(1)})
            outputs["logits"] = np.concatenate((outputs["logits"][:, :-1], last["logits"]), axis=1)
        return outputs

    def _run(self, graph: Graph, session: ort.InferenceSession, arrays: Arrays) -> Arrays:
        if all(item.name != PAST_LENGTH for item in session.get_inputs()):
            names = [output.name for output in session.get_outputs()]
            return dict(zip(names, run_session(session, names, arrays), strict=True))
        outputs, self.buffers[graph.name] = run_in_place(session, graph, arrays, self.buffers.get(graph.name))
        return outputs


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
