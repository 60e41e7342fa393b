"""Graphs on onnxruntime-web, as subjects of a comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from zoo.artifact import ModelDirectory
from zoo.contract import Graph
from zoo.errors import ParityError
from zoo.probe.dtypes import numpy_dtype
from zoo.probe.inputs import Feeds
from zoo.probe.pipeline import Arrays, Executor, typed_feeds
from zoo_export.graph.file import parse, serialize
from zoo_export.graph.links import external_tensors, names_read, place_of, set_place
from zoo_export.graph.metadata import without_functions
from zoo_export.parity.subject import OnnxSubject
from zoo_export.variants.quantized.subject import QuantizedSubject, Values
from zoo_export.variants.reduced.model import ReducedModel, weights_of_graph
from zoo_export.web.browser import Browser, WebGraph, WebSession
from zoo_runtime.onnx_runtime.buffers import PAST_LENGTH, Buffers
from zoo_runtime.onnx_runtime.executor import LOGITS_TO_KEEP, run_keeping
from zoo_runtime.onnx_runtime.providers import Memory, Provider

__all__ = ["WebExecutor", "WebQuantizedSubject", "WebSubject", "with_files"]

_VALUES = "values.bin"
"""The file of weights that differ from the stored ones."""
_ALIGNMENT = 64


class WebExecutor:
    """Runs each declared graph in its own session of onnxruntime-web.

    Cache buffers are inputs and outputs like all others there, and every call is given new ones.

    Args:
        sessions: by graph name.
        dtype: dtype of floating-point inputs.
    """

    def __init__(self, sessions: Mapping[str, WebSession], dtype: np.dtype[Any]) -> None:
        self.sessions, self.dtype = sessions, dtype

    def __call__(self, graph: Graph, feeds: Feeds) -> Arrays:
        session = self.sessions[graph.name]
        arrays = typed_feeds(graph, feeds, self.dtype)
        run = partial(_run_in_buffers, session, graph) if PAST_LENGTH in session.inputs else session.run
        return run_keeping(graph, run, arrays) if LOGITS_TO_KEEP in session.inputs else run(arrays)


def _run_in_buffers(session: WebSession, graph: Graph, arrays: Arrays) -> Arrays:
    """Run a graph whose caches have spare positions."""
    pairs = graph.growing_pairs()
    axis = pairs[0][0].dims.index(str(graph.past_length))
    tokens = next(tensor for tensor in graph.input_tensors() if "sequence" in tensor.dims)
    start = arrays[pairs[0][0].name].shape[axis]
    total = start + arrays[tokens.name].shape[tokens.dims.index("sequence")]
    buffers = Buffers([arrays[past.name] for past, _ in pairs], total, axis, "cpu")
    pasts = {past.name: buffer for (past, _), buffer in zip(pairs, buffers.arrays, strict=True)}
    outputs = session.run(arrays | pasts | {PAST_LENGTH: np.array(start)})
    for _, present in pairs:
        outputs[present.name] = outputs[present.name].take(range(total), axis)
    return outputs


class _InBrowser:
    """Sessions and evidence of a subject whose graphs run in a browser."""

    recorded: str | None = None
    browser: Browser
    stored: ModelDirectory
    files: Mapping[str, bytes]

    def _open_graphs(self, graphs: Mapping[str, WebGraph], dtype: np.dtype[Any], *, optimize: bool) -> Executor:
        try:
            return WebExecutor(self.browser.open(graphs, optimize=optimize), dtype)
        except RuntimeError as error:
            raise ParityError(f"{self.browser.provider} cannot load the graphs ({error})", self.stored.path) from error

    def _facts(self, graph: bytes) -> dict[str, Any]:
        """Evidence about a graph; onnxruntime-web does not tell which provider runs a node."""
        return without_functions(graph)

    def _provider_facts(self) -> dict[str, Any]:
        device = {"device": self.browser.device} if self.browser.device else {}
        return {"provider": self.browser.provider, "browser": self.browser.name, "threads": 1, **device}


class WebSubject(_InBrowser, OnnxSubject):
    """ONNX graphs on onnxruntime-web, with and without its optimisations.

    Graphs and weights are the files of the model directory. Perturbed weights are files of the same layout.

    Args:
        stored: the model that was exported.
        files: its serialised graphs, by name.
        provider: ``cpu``, whose dtypes are those of browsers.
        browser: the browser.
    """

    def __init__(
        self,
        stored: ModelDirectory,
        files: Mapping[str, bytes],
        provider: Provider,
        *arguments: Any,
        browser: Browser,
        **options: Any,
    ) -> None:
        super().__init__(stored, files, provider, *arguments, **options)
        self.browser = browser

    def long_runtimes(self, runtimes: Mapping[str, Executor]) -> Mapping[str, Executor]:
        return {"all": runtimes["all"]}

    def open_perturbed(self) -> Iterator[dict[str, Executor]]:
        self.browser.close_tabs()
        for runtimes in super().open_perturbed():
            yield runtimes
            self.browser.close_tabs()

    def graph_facts(self, graph: Graph, runtimes: Mapping[str, Executor]) -> dict[str, Any]:
        return self._facts(self.files[graph.name])

    def facts(self) -> dict[str, Any]:
        facts = {key: value for key, value in super().facts().items() if key != "weights_in_memory"}
        return facts | self._provider_facts()

    def _open(
        self,
        files: Mapping[str, bytes],
        optimize: bool,
        memory: Memory = "mapped",
        *,
        share: bool = False,
        pool: bool = True,
    ) -> Executor:
        folder = self._scratch or self.stored.path
        graphs = {}
        for name, file in files.items():
            replaced = self._replaced(file)
            graphs[name] = with_files(file, folder) if replaced is None else _with_values(file, replaced)
        return self._open_graphs(graphs, self.models.yardstick.dtype, optimize=optimize)


class WebQuantizedSubject(_InBrowser, QuantizedSubject):
    """Graphs with quantised weights on onnxruntime-web.

    Args:
        stored: the float32 model.
        reduced: the model with quantised weights.
        browser: the browser.
    """

    def __init__(self, stored: ModelDirectory, reduced: ReducedModel, browser: Browser) -> None:
        super().__init__(stored, reduced, "cpu")
        self.browser = browser

    def open_perturbed(self) -> Iterator[dict[str, Executor]]:
        self.browser.close_tabs()
        yield from super().open_perturbed()

    def graph_facts(self, graph: Graph, runtimes: Mapping[str, Executor]) -> dict[str, Any]:
        return self._facts(self.reduced.files()[graph.name])

    def facts(self) -> dict[str, Any]:
        return super().facts() | self._provider_facts()

    def _open(
        self, reduced: ReducedModel, *, optimize: bool, values: Values | None = None, memory: Memory = "fast"
    ) -> Executor:
        graphs = {}
        for name, file in reduced.files().items():
            if values is None:
                graphs[name] = with_files(file, self.stored.path, {reduced.path.name: reduced.path})
            else:
                graphs[name] = _with_values(file, weights_of_graph(reduced, reduced.graphs[name], values))
        return self._open_graphs(graphs, numpy_dtype(reduced.dtype), optimize=optimize)


def with_files(graph: bytes, folder: Path, others: Mapping[str, Path] | None = None) -> WebGraph:
    """Return an unchanged graph, with its weights in a folder and in other files, by name."""
    names = {place_of(tensor)[0] for tensor in external_tensors(parse(graph))}
    return WebGraph(graph, {name: (others or {}).get(name, folder / name) for name in sorted(names)})


def _with_values(graph: bytes, values: Mapping[str, np.ndarray[Any, Any]]) -> WebGraph:
    """Return a graph whose external initialisers have other values, in a file of their own.

    Those without a value, which no node reads, are removed.
    """
    model, data = parse(graph), bytearray()
    read = set(names_read(model.graph.node))
    for tensor in [*external_tensors(model)]:
        if tensor.name not in values:
            assert tensor.name not in read, tensor.name
            model.graph.initializer.remove(tensor)
            continue
        content = np.asarray(values[tensor.name]).tobytes()
        data.extend(bytes(-len(data) % _ALIGNMENT))
        set_place(tensor, _VALUES, len(data), len(content))
        data.extend(content)
    return WebGraph(serialize(model), {_VALUES: bytes(data)})
