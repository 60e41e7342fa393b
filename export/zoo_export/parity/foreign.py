"""The comparison of ONNX exports, on other runtimes and for exports in other formats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from zoo.artifact import ModelDirectory
from zoo.exporters import Progress
from zoo.models import persist
from zoo.probe.pipeline import Executor
from zoo_export.comparison import Comparison
from zoo_export.graph.static import fixed_sizes
from zoo_export.parity.compare import judge
from zoo_export.parity.memory import check_memory
from zoo_export.parity.reference import Models
from zoo_export.parity.report import Report
from zoo_export.parity.runtimes import OpenRuntime, OtherRuntime, RunExecutor, opener
from zoo_export.parity.subject import PERTURBED_LABELS, REFERENCE, Subject, Weights, open_perturbed
from zoo_export.parity.sweep import Sweep

__all__ = ["compare_on", "compare_runtime"]

_EXPORT = "export"
"""The only level on the stored weights."""


def compare_runtime(
    model: ModelDirectory,
    open_runtime: OpenRuntime,
    *,
    any_weights: bool = True,
    fixed: Mapping[str, int] = MappingProxyType({}),
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
        fixed: sizes of the dimensions that have only one in the export, such as ``{"batch": 1}``.
        full_grid: compare at every point of the grid, regardless of the time it takes.
        progress: called with the number of the current point and the number of points.

    Returns:
        A report: ``.evidence``, for an exporter to return; ``.passed``; ``.verdict()``, one line for a failure.

    Raises:
        ParityError: the export does not run at some point, or there is not enough memory.
    """
    check_memory(model)
    subject = _RuntimeSubject(model, open_runtime, any_weights)
    subject.fixed = fixed
    sweep = Sweep(subject)
    report = judge(sweep, Comparison(full_grid=full_grid, progress=progress))
    report.subject = "the export"
    if not report.passed:
        report.evidence["reason"] = report.verdict()
    return report


def compare_on(
    runtime: OtherRuntime,
    stored: ModelDirectory,
    graphs: Mapping[str, bytes],
    comparison: Comparison = Comparison(),
) -> Report:
    """Compare serialised graphs, by name, with the model on another runtime on the CPU.

    Raises:
        UsageError: the runtime is not installed, or does not support the model's dtype.
        ParityError: the runtime cannot run a graph, or there is not enough memory.
    """
    name, open_all = opener(runtime, stored, graphs)
    fixed = fixed_sizes(next(iter(graphs.values())))
    report = compare_runtime(
        stored, open_all, fixed=fixed, full_grid=comparison.full_grid, progress=comparison.progress
    )
    report.subject = f"the export on {name}"
    report.evidence["provider"] = name
    return report


class _RuntimeSubject(Subject):
    """An export in any format, without optimisation levels."""

    def __init__(self, stored: ModelDirectory, open_runtime: OpenRuntime, any_weights: bool) -> None:
        self._open_runtime, self._any_weights = open_runtime, any_weights
        labels = {_EXPORT: "as exported"} | (PERTURBED_LABELS if any_weights else {})
        super().__init__(stored, stored.spec.graphs, Models(partial(persist.load_directory, stored)), labels)

    def open(self) -> dict[str, Executor]:
        return {_EXPORT: self._open(None)}

    def open_perturbed(self) -> Iterator[dict[str, Executor]]:
        if self._any_weights:
            for level, weights in open_perturbed(self.models):
                yield {level: self._open({name: value.copy() for name, value in weights.items()})}

    def facts(self) -> dict[str, Any]:
        return {"dtype": self.stored.dtype, "reference": REFERENCE, "any_weights": self._any_weights}

    def _open(self, weights: Weights | None) -> Executor:
        return RunExecutor(self._open_runtime(weights), self.models.yardstick.dtype)
