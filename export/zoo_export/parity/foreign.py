"""The comparison of ONNX exports, for exports in other formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from zoo.artifact import ModelDirectory
from zoo.contract import Graph
from zoo.probe.inputs import Feeds, Point
from zoo.probe.pipeline import Arrays, typed_feeds
from zoo_export.parity.compare import FAINT, PERTURBED, Comparison, Progress
from zoo_export.parity.memory import check_memory
from zoo_export.parity.report import Report

__all__ = ["OpenRuntime", "Run", "compare_runtime"]

Run = Callable[[Arrays], Mapping[str, Any]]
"""Runs one graph: maps inputs by name, in declaration order, to outputs by name."""
OpenRuntime = Callable[[Mapping[str, "np.ndarray[Any, Any]"] | None], Mapping[str, Run]]
"""Opens an export with its own weights or with others; returns one callable per graph name."""


def compare_runtime(
    model: ModelDirectory,
    open_runtime: OpenRuntime,
    *,
    any_weights: bool = True,
    full_grid: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Compare an export in any format with the model in float64, with the tolerance and grid of ONNX exports.

    Args:
        model: the model that was exported.
        open_runtime: opens the export. Returns a function for each name in ``model.spec.graphs``, which takes the
            declared inputs and returns the declared outputs, for any batch size and length. Integers are int64;
            floating-point arrays have the model's dtype, bfloat16 being that of ``ml_dtypes``. The argument of
            ``open_runtime`` is None for the exported weights, or a complete state dict to run the same program on.
        any_weights: False for a format that cannot load other weights. Only the exported weights are compared then,
            which detects fewer errors in a newly initialised model. The evidence records it.
        full_grid: compare at every point of the grid, regardless of the time it takes.
        progress: called with the number of the current point and the number of points.

    Returns:
        A report: ``.evidence``, for an exporter to return; ``.passed``; ``.verdict()``, one line for a failure.

    Raises:
        ParityError: the export does not run at some point, or there is not enough memory.
    """
    check_memory(model)
    report = _RuntimeComparison(model, open_runtime, any_weights).run(full_grid, progress)
    report.subject = "the export"
    if not report.passed:
        report.evidence["reason"] = report.verdict()
    return report


class _RuntimeComparison(Comparison):
    """Comparison of one runtime, without optimisation levels."""

    levels = {"export": True}  # noqa: RUF012
    labels = {"export": "as exported"}  # noqa: RUF012

    def __init__(self, model: ModelDirectory, open_runtime: OpenRuntime, any_weights: bool) -> None:
        self._open, self._any_weights = open_runtime, any_weights
        if any_weights:
            self.labels = {**self.labels, PERTURBED: "with perturbed weights", FAINT: "with faint weights"}
        super().__init__(model, {}, "cpu")

    def _runtime(
        self,
        optimize: bool,
        weights: Mapping[str, np.ndarray[Any, Any]] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> _RunExecutor:
        copies = {name: value.copy() for name, value in weights.items()} if weights else None
        return _RunExecutor(self._open(copies), self.yardstick.dtype)

    def perturb(self, points: list[Point]) -> None:
        if self._any_weights:
            super().perturb(points)

    def _first_divergence(self) -> None:
        """Unknown: other formats do not record the modules of their operators."""

    def _about(self, graph: Graph) -> dict[str, Any]:
        return {}

    def evidence(self, left_out: int, *, verified: bool) -> dict[str, Any]:
        """Evidence without what only ONNX graphs have."""
        evidence = super().evidence(left_out, verified=verified)
        del evidence["provider"], evidence["unused_tensors"]
        return {**evidence, "any_weights": self._any_weights}


class _RunExecutor:
    def __init__(self, graphs: Mapping[str, Run], dtype: np.dtype[Any]) -> None:
        self.graphs, self.dtype = graphs, dtype

    def __call__(self, graph: Graph, feeds: Feeds) -> Arrays:
        outputs = self.graphs[graph.name](typed_feeds(graph, feeds, self.dtype))
        return {tensor.name: np.asarray(outputs[tensor.name]) for tensor in graph.output_tensors()}
