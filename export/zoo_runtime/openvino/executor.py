"""Running declared graphs on OpenVINO."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.contract import Graph
from zoo.probe.inputs import Feeds
from zoo.probe.pipeline import Arrays, typed_feeds
from zoo_runtime.onnx_runtime.executor import LOGITS_TO_KEEP, run_keeping
from zoo_runtime.openvino.compiled import ROWS, CompiledGraph, Request

__all__ = ["OpenVinoExecutor"]


class OpenVinoExecutor:
    """Runs each declared graph by a request of its own, for one thread.

    The past of a decoder is written to the state of its request. If the present outputs of the last call are passed
    back as the past, the state is extended in place instead, as it is while a text is generated.

    Args:
        compiled: the compiled graphs by name.
        dtype: dtype of floating-point inputs.
        twice: run graphs that have the input ``logits_to_keep`` again with 1 and with 3, and take the last positions'
            logits from these runs, so that a comparison covers them.
    """

    def __init__(self, compiled: Mapping[str, CompiledGraph], dtype: np.dtype[Any], *, twice: bool = True) -> None:
        self.compiled = compiled
        self.dtype = dtype
        self.twice = twice
        self._requests: dict[str, Request] = {}
        self._present: dict[str, Mapping[str, Array]] = {}
        """The past after the last call of a graph, by the names of its inputs."""

    def __call__(self, graph: Graph, feeds: Feeds) -> Arrays:
        arrays = typed_feeds(graph, feeds, self.dtype)
        run = partial(self._run, graph)
        if LOGITS_TO_KEEP in self.compiled[graph.name].inputs:
            return run_keeping(graph, run, arrays, twice=self.twice)
        return run(arrays)

    def _run(self, graph: Graph, arrays: Arrays) -> Arrays:
        compiled = self.compiled[graph.name]
        if graph.name not in self._requests:
            self._requests[graph.name] = compiled.request()
        request = self._requests[graph.name]
        feeds = {name: np.asarray(array, order="C") for name, array in arrays.items() if name in compiled.inputs}
        if not graph.pasts:
            return {name: array.copy() for name, array in request.run(feeds).items()}
        present = self._present.pop(graph.name, None)
        past = {tensor.name: arrays[tensor.name] for tensor in graph.past_tensors()}
        if present is None or any(past[name] is not present[name] for name in past):
            request.write_past(past)
        feeds[ROWS] = np.arange(len(next(iter(past.values()))), dtype=np.int32)
        outputs = {name: array.copy() for name, array in request.run(feeds).items()}
        self._present[graph.name] = present = request.read_past()
        presents = {present_tensor.name: present[tensor.name] for tensor, present_tensor in graph.past_pairs()}
        return outputs | presents
