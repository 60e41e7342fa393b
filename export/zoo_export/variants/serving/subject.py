"""Comparison of graphs of the profile ``serving`` with the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zoo.artifact import PREFILL
from zoo.probe.inputs import Feeds, Point
from zoo.probe.pipeline import Executor
from zoo_export.coverage.outcomes import Conditions
from zoo_export.graph.serving import graph_sizes
from zoo_export.parity.modules import ModuleError
from zoo_export.parity.subject import OnnxSubject
from zoo_runtime.onnx_runtime.ort import ort
from zoo_runtime.serving.executor import ServingExecutor
from zoo_runtime.serving.names import CAPACITY

__all__ = ["ServingSubject"]


class ServingSubject(OnnxSubject):
    """The graphs of the profile ``serving``, compared on rows of different lengths.

    Every point of the grid runs through :class:`ServingExecutor`: each row's tokens, without its padding, lie in a row
    of the buffers, whose unused slots hold large numbers; rows that a batch does not need take no part.
    """

    _can_close = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._row_counts: list[set[int]] = []
        """Numbers of rows of the steps of each executor, which is not kept."""

    @property
    def capacity(self) -> int:
        return graph_sizes(self.files[PREFILL])[CAPACITY]

    def compares(self, point: Point) -> bool:
        """A row without its padding equals one with it only if the model reads padding on that side."""
        masks = [tensor for graph in self.graphs if graph.pasts for tensor in graph.input_tensors() if tensor.is_mask]
        return all(point.padding in ("none", "empty row", mask.padding) or mask.padding == "both" for mask in masks)

    def conditions(self) -> Sequence[Conditions]:
        return ()

    def module_errors(self, level: str, name: str, feeds: Feeds, point: Point) -> list[ModuleError]:
        return []  # modules of packed rows have no counterpart in the model

    def facts(self) -> dict[str, Any]:
        counts = sorted(set[int]().union(*self._row_counts))
        return {**super().facts(), "sizes": graph_sizes(self.files[PREFILL]), "row_counts": counts}

    def _executor(self, sessions: Mapping[str, ort.InferenceSession]) -> Executor:
        executor = ServingExecutor(sessions, self.models.yardstick.dtype)
        self._row_counts.append(executor.row_counts)
        return executor
