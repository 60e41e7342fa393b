"""Comparison of the profile ``serving`` with a model: declared graphs, run on rows of different lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.artifact import PREFILL
from zoo.contract import Graph
from zoo.errors import ZooError
from zoo.probe.inputs import Feeds
from zoo.probe.pipeline import Arrays, token_input, typed_feeds
from zoo_runtime.onnx_runtime.ort import ort
from zoo_runtime.onnx_runtime.values import run_session
from zoo_runtime.serving.rows import Rows
from zoo_runtime.serving.sizes import check_shapes, fit, sizes_of_session

__all__ = ["ServingExecutor"]

_UNUSED = {2: 1e2, 4: 1e4, 8: 1e4}
"""Fill for unused slots, by the size of a number: finite and large, so that any read of them shows."""


class ServingExecutor:
    """Runs each declared graph on the graphs of the profile ``serving``, with the inputs and outputs that it declares.

    The tokens of each row, without its padding, are packed into a row of buffers, whose other slots hold large numbers.
    So the rows of a batch have pasts of different lengths, and rows without tokens take no part in a call. The rows of
    consecutive calls lie in different places, and consecutive steps have different numbers of rows.

    Args:
        sessions: by graph name, with the graph ``prefill``.
        dtype: dtype of floating-point inputs.
    """

    def __init__(self, sessions: Mapping[str, ort.InferenceSession], dtype: np.dtype[Any]) -> None:
        self.sessions = sessions
        self.dtype = dtype
        self.sizes = sizes_of_session(sessions[PREFILL])
        self.row_counts: set[int] = set()
        """Numbers of rows of the steps so far."""
        self._rows: dict[str, Rows] = {}
        self._turn = 0

    def __call__(self, graph: Graph, feeds: Feeds) -> Arrays:
        arrays = typed_feeds(graph, feeds, self.dtype)
        count = len(next(iter(arrays.values())))
        size = self.sizes["batch"] if graph.pasts else 1
        parts = [
            (self._extend if graph.pasts else self._run)(
                graph, {name: array[start : start + size] for name, array in arrays.items()}
            )
            for start in range(0, count, size)
        ]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _run(self, graph: Graph, arrays: Arrays) -> Arrays:
        """Run a graph without a past on one row, padded to its sizes."""
        actual = {
            str(dim): size
            for tensor in graph.input_tensors()
            for dim, size in zip(tensor.dims, arrays[tensor.name].shape, strict=True)
        }
        sizes = self.sizes | {"batch": 1}
        check_shapes(self.sessions[graph.name], graph, sizes)
        fitted = {tensor.name: fit(tensor, arrays[tensor.name], sizes) for tensor in graph.input_tensors()}
        names = [tensor.name for tensor in graph.output_tensors()]
        outputs = run_session(self.sessions[graph.name], names, fitted)
        return {
            tensor.name: array[tuple(slice(size) for size in tensor.shape(actual))]
            for tensor, array in zip(graph.output_tensors(), outputs, strict=True)
        }

    def _extend(self, graph: Graph, arrays: Arrays) -> Arrays:
        """Put each row's past into buffers, extend it by its new tokens, and return what the graph declares."""
        rows = self._open(graph)
        ids = arrays[str(token_input(graph))]
        count, added = ids.shape
        names = [
            tensor.name for tensor in graph.input_tensors() if tensor.is_mask and tensor.dims[1] == graph.total_length
        ]
        past_length = self._past_length(graph, arrays)
        mask = arrays[names[0]] != 0 if names else np.ones((count, past_length + added), bool)
        self._turn += 1
        size = min((size for size in rows.possible if size >= count), key=lambda size: rows.uses[size])
        rows.counts = tuple(sorted({size, rows.count}))
        places = [(self._turn + row) % size for row in range(count)]
        for row, place in enumerate(places):
            constants = {name: arrays[name][row] for name in rows.constants}
            rows.start(place, constants)
            self._load(rows, graph, arrays, row, place, np.flatnonzero(mask[row, : mask.shape[1] - added]))
        new = {place: ids[row, mask[row, -added:]] for row, place in enumerate(places) if mask[row, -added:].any()}
        before = rows.lengths.copy()
        by_row = rows.extend(new)
        self.row_counts.update(rows.uses)
        logits = next(tensor for tensor in graph.output_tensors() if tensor.name == "logits")
        outputs = {"logits": np.zeros((count, added, int(logits.dims[-1])), self.dtype)}
        for row, place in enumerate(places):
            result = by_row.get(place)
            if isinstance(result, ZooError):
                raise result
            if result is not None:
                outputs["logits"][row, mask[row, -added:]] = result
        for past, present in graph.past_pairs():
            content = rows.past(past.name).read()
            if (past, present) not in graph.growing_pairs():
                outputs[present.name] = content[places]  # a copy
                outputs[present.name][rows.lengths[places] == 0] = 0
                continue
            grown = np.zeros((count, *content.shape[1:2], added, content.shape[3]), content.dtype)
            for row, place in enumerate(places):
                grown[row][:, mask[row, -added:]] = content[place][:, before[place] : rows.lengths[place]]
            outputs[present.name] = np.concatenate([arrays[past.name], grown], axis=2)
        return {tensor.name: outputs[tensor.name] for tensor in graph.output_tensors()}

    def _open(self, graph: Graph) -> Rows:
        if graph.name not in self._rows:
            self._rows[graph.name] = Rows(self.sessions[graph.name], self.sessions[PREFILL], graph, self.dtype)
        return self._rows[graph.name]

    def _past_length(self, graph: Graph, arrays: Arrays) -> int:
        for tensor in graph.past_tensors():
            if graph.past_length in tensor.dims:
                return int(arrays[tensor.name].shape[tensor.dims.index(str(graph.past_length))])
        return 0

    def _load(
        self, rows: Rows, graph: Graph, arrays: Arrays, row: int, place: int, tokens: Sequence[int] | Array
    ) -> None:
        """Put a row's past into a row of buffers."""
        growing = [past.name for past, _ in graph.growing_pairs()]
        states = [past.name for past in graph.past_tensors() if past.name not in growing]
        started = len(tokens) > 0 or any(arrays[name][row].any() for name in states)
        for past in graph.past_tensors():
            buffer = rows.past(past.name)
            fill = 1 if buffer.dtype.kind == "i" else _UNUSED[buffer.dtype.itemsize]
            content = np.full(buffer.shape[1:], fill, buffer.dtype)
            if past.name in growing:
                content[:, : len(tokens)] = arrays[past.name][row][:, tokens]
            elif started:
                content = arrays[past.name][row]
            buffer.write(place, content)
        rows.lengths[place] = max(len(tokens), int(started))
