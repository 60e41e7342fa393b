"""The comparison that ONNX exports must pass, for whatever else can run a model's graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from zoo.artifact import ModelDirectory
from zoo.contract import Graph
from zoo_export.grid import Feeds, Point
from zoo_export.parity import FAINT, PERTURBED, Comparison, Progress, Report, check_memory
from zoo_export.pipeline import Arrays, typed_feeds

__all__ = ["OpenRuntime", "Run", "compare_runtime"]

Run = Callable[[Arrays], Mapping[str, Any]]
"""Runs one graph: inputs by name, in the order of its declaration, to outputs by name."""
OpenRuntime = Callable[[Mapping[str, "np.ndarray[Any, Any]"] | None], Mapping[str, Run]]
"""Opens an export, with its own weights or with others: each graph by its name."""


def compare_runtime(
    model: ModelDirectory,
    open_runtime: OpenRuntime,
    *,
    any_weights: bool = True,
    whole_grid: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Compare what runs an export with the model in float64, by the rule and over the grid of "verified".

    Args:
        model: the model that was exported.
        open_runtime: opens the export. Returns, for the name of each of ``model.spec.graphs``, a function that takes
            the arrays that the graph declares and returns those that it declares, with batch and length as they come:
            integers are int64, and real numbers of the model's dtype, bfloat16 being that of ``ml_dtypes``. Its
            argument is None for the weights that were exported; or others, by every name of the model's
            ``state_dict``, that the same program must be run on.
        any_weights: False for a format that cannot take other weights. Then only those that were exported are
            compared: fresh ones hide faults, and the evidence says so.
        whole_grid: compare at every point of the grid, however long that takes.
        progress: called with each compared point and their number.

    Returns:
        ``.evidence``, for an exporter to return; ``.passed``; and ``.verdict()``, a line that says what diverges.

    Raises:
        ParityError: the comparison cannot be made: the export does not run at some point, or memory is short.
    """
    check_memory(model)
    report = _RuntimeComparison(model, open_runtime, any_weights).run(whole_grid, progress)
    report.subject = "the export"
    if not report.passed:
        report.evidence["reason"] = report.verdict()
    return report


class _RuntimeComparison(Comparison):
    """One runtime in place of ONNX Runtime's optimisation levels."""

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
        """The modules of other formats are not known."""

    def _about(self, graph: Graph) -> dict[str, Any]:
        return {}

    def evidence(self, left_out: int, *, verified: bool) -> dict[str, Any]:
        """What was compared, and how far it is off."""
        evidence = super().evidence(left_out, verified=verified)
        del evidence["provider"], evidence["unused_tensors"]
        return {**evidence, "any_weights": self._any_weights}


class _RunExecutor:
    def __init__(self, graphs: Mapping[str, Run], dtype: np.dtype[Any]) -> None:
        self.graphs, self.dtype = graphs, dtype

    def __call__(self, graph: Graph, feeds: Feeds) -> Arrays:
        outputs = self.graphs[graph.name](typed_feeds(graph, feeds, self.dtype))
        return {tensor.name: np.asarray(outputs[tensor.name]) for tensor in graph.output_tensors()}
