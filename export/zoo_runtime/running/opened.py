"""The graphs of an export, open in this process."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np

from zoo.arrays import Array
from zoo.artifact import OPENVINO, PREFILL, Export, ModelDirectory
from zoo.contract import Graph
from zoo.errors import UsageError
from zoo.probe.dtypes import is_bfloat16, numpy_dtype
from zoo.probe.inputs import empty_past
from zoo.probe.pipeline import Arrays, Executor
from zoo_runtime.arguments import check_seconds
from zoo_runtime.onnx_runtime.executor import OnnxExecutor, check_feeds, check_finite
from zoo_runtime.onnx_runtime.mapped_weights import MappedWeights
from zoo_runtime.onnx_runtime.ort import ort
from zoo_runtime.onnx_runtime.providers import Memory, Provider, open_session
from zoo_runtime.onnx_runtime.stopping import Call
from zoo_runtime.serving.capture import open_for_capture
from zoo_runtime.serving.executor import ServingExecutor
from zoo_runtime.serving.rows import Rows
from zoo_runtime.serving.sizes import sizes_of_session

if TYPE_CHECKING:
    from zoo_runtime.openvino.compiled import CompiledGraph

__all__ = ["OpenExport"]


class OpenExport:
    """The graphs of an export, the weights that they map, and the calls that run on them.

    A forked process opens the graphs anew when they are next used.
    """

    def __init__(
        self,
        stored: ModelDirectory,
        export: Export,
        provider: Provider,
        threads: int | None,
        memory: Memory,
        provider_options: Mapping[str, str],
    ) -> None:
        self.stored = stored
        self.export = export
        self.provider = provider
        self.threads = threads
        self.memory = memory
        self.provider_options = provider_options
        self.is_closed = False
        self.lock = threading.Lock()
        """Held while graphs are opened or closed."""
        self.free_rows: list[Rows] = []
        """Buffers of an export for serving that are not in use."""
        self._sessions: dict[str, ort.InferenceSession] = {}
        self._compiled: dict[str, CompiledGraph] = {}
        self._calls: set[Call] = set()
        self._weights = MappedWeights(stored.path, {})
        _LIVING.add(self)

    @property
    def path(self) -> Path:
        """The model directory."""
        return self.stored.path

    @property
    def sessions(self) -> dict[str, ort.InferenceSession]:
        """ONNX Runtime sessions of this process, by graph name; they are opened on first use. None for OpenVINO."""
        with self.lock:
            self.check_open()
            if not self._sessions and self.provider != OPENVINO:
                self._map_weights()
                opened: dict[str, ort.InferenceSession] = {}
                for name in sorted(self.export.graph_files, key=lambda name: name != PREFILL):
                    opened[name] = self.open_graph(name, prefill=opened.get(PREFILL))
                self._sessions = {name: opened[name] for name in self.export.graph_files}
            return self._sessions

    @property
    def compiled(self) -> dict[str, CompiledGraph]:
        """OpenVINO's graphs of this process, by name; they are compiled on first use. None for ONNX Runtime."""
        with self.lock:
            self.check_open()
            if not self._compiled and self.provider == OPENVINO:
                from zoo_runtime.openvino.compiled import compile_graphs

                self._map_weights()
                self._compiled = compile_graphs(self.export, threads=self.threads, properties=self.provider_options)
            return self._compiled

    def _map_weights(self) -> None:
        files = self.stored.files.items()
        self._weights.close()
        self._weights = MappedWeights(
            self.path, {name: entry for name, entry in files if name.endswith(".safetensors")}
        )
        self._weights.check()

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of floating-point inputs and of caches."""
        return numpy_dtype(self.export.dtype)

    @cached_property
    def adapters(self) -> tuple[str, ...]:
        """The names of the low-rank adapters in the variant ``adapters``; empty in others."""
        return tuple(self.export.evidence.get("adapters", ())) if self.export.traits.interface == "adapters" else ()

    def open_graph(
        self, graph: str, *, placements: bool = False, prefill: ort.InferenceSession | None = None
    ) -> ort.InferenceSession:
        """Open one graph, and record on request which provider runs each node.

        On a device, a step has all rows: kernels are recorded, or compiled, for one size. Their number is in the
        metadata of ``prefill``, by default of the one that is open.
        """
        path = self.path / self.export.graph_files[graph]
        steps = self.export.traits.interface == "rows" and graph == self.export.graphs[-1].name
        sizes: dict[str, int] = {}
        if steps and self.provider != "cpu":
            sizes["batch"] = sizes_of_session(prefill or self._sessions[PREFILL])["batch"]

        def open_with(options: Mapping[str, str]) -> ort.InferenceSession:
            return open_session(
                path,
                provider=self.provider,
                threads=self.threads,
                memory=self.memory,
                provider_options=options,
                placements=placements or self.provider == "cuda",
                sizes=sizes,
            )

        if steps and self.provider == "cuda":
            return open_for_capture(open_with, self.provider_options, path)
        return open_with(self.provider_options)

    def check_open(self) -> None:
        """Raise :class:`zoo.UsageError` once the export is closed."""
        if self.is_closed:
            raise UsageError("the session is closed", self.path, "open another")

    def check_weights(self) -> None:
        """Raise :class:`ArtifactError` if a file of the open weights has been truncated or altered."""
        self._weights.check()

    def execute(self, graph: Graph, feeds: Mapping[str, Array], timeout: float | None) -> Arrays:
        """Run one declared graph on arrays: see :meth:`zoo_runtime.Session.execute`."""
        check_feeds(graph, feeds)
        if self.export.is_verified():
            kinds = self.export.evidence.get("grid", {}).get("non_finite", {})
            check_finite(self.export.graphs, graph, feeds, {name for name, facts in kinds.items() if facts["equal"]})
        if graph.pasts and graph.past_tensors()[0].name not in feeds:
            rows = len(next(iter(feeds.values())))
            feeds = {**feeds, **empty_past(graph, rows, self.dtype)}
        with self.stoppable(check_seconds("timeout", timeout)):
            outputs = self.executor()(graph, feeds)
        return {
            name: value.astype(np.float32) if is_bfloat16(value.dtype) else value for name, value in outputs.items()
        }

    def executor(self) -> Executor:
        """Return what runs declared graphs, for one thread."""
        if self.provider == OPENVINO:
            from zoo_runtime.openvino.executor import OpenVinoExecutor

            return OpenVinoExecutor(self.compiled, self.dtype, twice=False)
        if self.export.traits.interface == "rows":
            return ServingExecutor(self.sessions, self.dtype)
        return OnnxExecutor(self.sessions, self.dtype, twice=False)

    @contextmanager
    def stoppable(self, seconds: float | None = None) -> Iterator[None]:
        """Let the block be ended by :meth:`interrupt`, or after a time."""
        self.check_open()
        self.check_weights()
        call = Call(seconds, self.path)
        self._calls.add(call)
        try:
            with call:
                yield
        finally:
            self._calls.discard(call)

    def interrupt(self) -> None:
        """Stop the blocks of :meth:`stoppable` in other threads."""
        for call in list(self._calls):
            call.stop()

    def close(self) -> None:
        """Release threads and memory. The caller holds the lock."""
        self.is_closed = True
        self._sessions = {}
        self._compiled = {}
        self.free_rows = []
        self._weights.close()

    def forget(self) -> None:
        """In a forked child: abandon the open graphs, whose threads exist only in the parent.

        Buffers may lie on a device that the child cannot use, and OpenVINO would wait for its threads, so leaked
        references keep them alive.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.free_rows))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._compiled))
        self._sessions = {}
        self._compiled = {}
        self.free_rows = []
        self.lock = threading.Lock()  # another thread of the parent may hold the old one
        self._calls = set()


_LIVING: WeakSet[OpenExport] = WeakSet()


def _forget_all() -> None:
    for opened in _LIVING:
        opened.forget()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_forget_all)
