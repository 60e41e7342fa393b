"""Sessions on graphs in memory, or on the module itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any, Self

import numpy as np
from torch import nn

from zoo.arrays import Array
from zoo.artifact import SERVING, Export, ModelDirectory
from zoo.contract import Graph
from zoo.errors import UsageError
from zoo.probe.dtypes import BFLOAT16
from zoo.probe.inputs import empty_past, next_past
from zoo.probe.module import TorchExecutor
from zoo.probe.pipeline import Arrays, Executor, decoder_inputs
from zoo_runtime.generation.stepper import Stepper, check_mask, check_roll_back, check_rows, check_saved, check_tokens
from zoo_runtime.onnx_runtime.executor import OnnxExecutor
from zoo_runtime.onnx_runtime.ort import ort
from zoo_runtime.openvino.compiled import CompiledGraph
from zoo_runtime.openvino.executor import OpenVinoExecutor
from zoo_runtime.running.session import Session
from zoo_runtime.serving.executor import ServingExecutor

__all__ = ["ExecutorSession", "ModuleSession", "execute"]


def execute(executor: Executor, graph: Graph, feeds: Mapping[str, Array]) -> Arrays:
    """Run a graph, with an empty past unless one is given."""
    if graph.pasts and graph.past_tensors()[0].name not in feeds:
        feeds = {**feeds, **empty_past(graph, len(next(iter(feeds.values()))), executor.dtype)}
    return executor(graph, feeds)


class ExecutorSession(Session):
    """A session on what an executor runs.

    Args:
        stored: the model directory.
        graphs: the graphs.
        executor: runs them.
        truncate: number of tokens to which texts are truncated.
    """

    def __init__(
        self, stored: ModelDirectory, graphs: Sequence[Graph], executor: Executor, truncate: int | None = None
    ) -> None:
        self._executor, self._graphs = executor, tuple(graphs)
        variant = SERVING if isinstance(executor, ServingExecutor) else ""
        super().__init__(stored, Export(stored, variant), "cpu", None, "fast", {}, None, truncate=truncate)

    @property
    def graphs(self) -> tuple[Graph, ...]:
        return self._graphs

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._executor.dtype

    @property
    def sessions(self) -> dict[str, ort.InferenceSession]:
        executor = self._executor
        if isinstance(executor, OnnxExecutor | ServingExecutor):
            return dict(executor.sessions)
        return {} if isinstance(executor, OpenVinoExecutor) else _NoSessions()

    @property
    def compiled(self) -> dict[str, CompiledGraph]:
        executor = self._executor
        return dict(executor.compiled) if isinstance(executor, OpenVinoExecutor) else {}

    def executor(self) -> Executor:
        return self._executor

    def execute(self, graph: Graph, feeds: Mapping[str, Array], *, timeout: float | None = None) -> Arrays:
        outputs = execute(self._executor, graph, feeds)
        return {name: value.astype(np.float32) if value.dtype == BFLOAT16 else value for name, value in outputs.items()}


class _NoSessions(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        raise UsageError("the task needs sessions of ONNX Runtime")


class ModuleSession(ExecutorSession):
    """A session on a module, which also generates texts.

    Args:
        stored: the model directory.
        module: the model of that directory.
        truncate: number of tokens to which texts are truncated.
    """

    def __init__(self, stored: ModelDirectory, module: nn.Module, truncate: int | None = None) -> None:
        super().__init__(stored, stored.spec.graphs, TorchExecutor(module), truncate)

    def stepper(self, feeds: Mapping[str, Array] = MappingProxyType({}), *, rows: int | None = None) -> Stepper:
        *encoders, graph = self.graphs
        tensors = dict(feeds)
        for encoder in encoders:
            if not {tensor.name for tensor in encoder.output_tensors()} <= tensors.keys():
                inputs = {tensor.name: tensors[tensor.name] for tensor in encoder.input_tensors()}
                tensors |= self._executor(encoder, inputs)
        count = rows if rows is not None else len(next(iter(tensors.values())))
        return _ModuleStepper(self._executor, graph, tensors, count, self.option("max_seq_len"))


class _ModuleStepper:
    """A :class:`zoo_runtime.Stepper` on a module."""

    can_roll_back = False

    def __init__(
        self, executor: Executor, graph: Graph, known: Mapping[str, Array], rows: int, positions: int | None
    ) -> None:
        self.executor, self.graph, self.positions = executor, graph, positions
        self.ids_name, self.mask_name = decoder_inputs(graph)
        self.past: Arrays = empty_past(graph, rows, executor.dtype)
        tensors = {tensor.name: tensor for tensor in graph.input_tensors()}
        self.upper = tensors[self.ids_name].upper
        self.constants = {name: known[name] for name in tensors.keys() - {self.ids_name, self.mask_name, *self.past}}
        self.mask = np.zeros((rows, 0), np.int64)
        self.owner = object()

    @property
    def rows(self) -> int:
        """B."""
        return len(self.mask)

    @property
    def length(self) -> int:
        """Number of positions in the past."""
        return self.mask.shape[1]

    @property
    def room(self) -> int | None:
        """Number of positions that still fit."""
        return None if self.positions is None else self.positions - self.length

    def step(self, tokens: Array, mask: Array | None = None, *, every: bool = False) -> Array:
        """Read tokens, and return the logits of the last position, or of all."""
        where = f"graph {self.graph.name}"
        tokens = check_tokens(tokens, self.rows, name=self.ids_name, width=None, upper=self.upper, where=where)
        new = np.ones_like(tokens) if mask is None else check_mask(mask, (self.rows, tokens.shape[1]))
        self.mask, first = np.concatenate((self.mask, new), 1), 0 if self.graph.past_length else self.length
        feeds = {**self.constants, **self.past, self.ids_name: tokens.astype(np.int64)}
        if self.mask_name is not None:
            feeds[self.mask_name] = self.mask[:, first:]
        outputs = self.executor(self.graph, feeds)
        self.past = next_past(self.graph, outputs)
        logits = outputs["logits"].astype(np.float32)
        return logits if every else logits[:, -1]

    def take(self, rows: Array) -> None:
        """Continue with the given rows."""
        indices = check_rows(rows, self.rows, f"graph {self.graph.name}")
        self.mask = self.mask[indices]
        self.past = {name: array[indices] for name, array in self.past.items()}
        self.constants = {name: array[indices] for name, array in self.constants.items()}

    def roll_back(self, count: int) -> None:
        """Refuse: see :meth:`save`."""
        check_roll_back(count, self, f"graph {self.graph.name}")

    def save(self) -> Any:
        """Return the past, of which nothing is changed in place."""
        return SimpleNamespace(owner=self.owner, mask=self.mask, past=self.past, constants=self.constants)

    def restore(self, saved: Any) -> None:
        """Return to a saved past."""
        check_saved(saved, self.owner, f"graph {self.graph.name}")
        self.mask, self.past, self.constants = saved.mask, saved.past, saved.constants

    def close(self) -> None:
        """Release the past."""
        self.past, self.constants = {}, {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
