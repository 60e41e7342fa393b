"""Comparison of exported ONNX graphs with the unmodified module, evaluated in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from zoo.artifact import HALVES, ModelDirectory
from zoo.contract import Graph
from zoo.errors import ParityError
from zoo.probe.inputs import Point
from zoo.probe.module import declared_tensors, not_perturbed
from zoo.system import release_memory
from zoo_export.comparison import Comparison
from zoo_export.graph.links import referenced_tensors
from zoo_export.graph.widen import widen
from zoo_export.parity.answers import Answers, Questions
from zoo_export.parity.evidence import evidence_of
from zoo_export.parity.memory import check_memory
from zoo_export.parity.reference import SEED, without_advice
from zoo_export.parity.report import Report
from zoo_export.parity.subject import OnnxSubject
from zoo_export.parity.sweep import Sweep
from zoo_runtime.onnx_runtime.providers import check_dtype
from zoo_runtime.onnx_runtime.stopping import named

if TYPE_CHECKING:
    from torch import nn

__all__ = ["MakeSubject", "check_fixed", "compare", "judge"]

MakeSubject = Callable[..., OnnxSubject]
"""The class :class:`OnnxSubject`, or a function with its arguments."""
_MOVED = 8
"""Number of times that constants of a half-precision graph are moved within their rounding."""


def compare(
    stored: ModelDirectory,
    graphs: Mapping[str, bytes],
    comparison: Comparison = Comparison(),
    *,
    declared: Sequence[Graph] | None = None,
    make_subject: MakeSubject = OnnxSubject,
) -> Report:
    """Compare serialised graphs, by name, with the model over the grid and at each optimisation level.

    Graphs in float16 or bfloat16 are compared in float32 as well: rounding to two or three digits can hide a wrong
    result.

    Args:
        stored: the model.
        graphs: its graphs.
        comparison: how they are compared.
        declared: the graphs with their inputs and outputs; by default those that the architecture declares.
        make_subject: opens the graphs, by default on ONNX Runtime.

    Raises:
        ParityError: the comparison cannot be made.
        UsageError: the provider does not load, or does not support the model's dtype.
    """
    check_dtype(stored.dtype, comparison.provider, stored.path)
    check_memory(stored, declared)
    release_memory()  # of laws and traces
    subject = make_subject(stored, graphs, comparison.provider, declared)
    sweep = Sweep(subject, comparison.longest or subject.capacity)
    check_fixed(subject.models.yardstick.model, stored, graphs)
    report = judge(sweep, comparison)
    points = sweep.points
    del sweep, subject  # they hold perturbed weights
    if report.passed and stored.dtype in HALVES:
        in_float32 = partial(make_subject, stored, provider=comparison.provider, declared=declared, in_float32=True)
        _compare_in_float32(report, points, graphs, in_float32)
    return report


def check_fixed(model: nn.Module, stored: ModelDirectory, graphs: Mapping[str, bytes]) -> None:
    """Raise :class:`ParityError` if a graph may contain a fixed tensor as a constant, which no noise would show."""
    unread = set(stored.layout) - referenced_tensors(graphs.values(), stored.layout)
    for name in sorted(unread & declared_tensors(model).fixed):
        raise ParityError(
            f"no graph reads {name}, which the model declares fixed", stored.path, "remove the declaration"
        )


@without_advice()
def judge(sweep: Sweep, comparison: Comparison = Comparison(), *, run_tasks: bool = True) -> Report:
    """Run a sweep and, unless ``run_tasks`` is false, the model's tasks, and report their failures."""
    subject = sweep.subject
    with closing(subject), named(subject.stored.path):
        questions = Questions(subject, sweep.runtimes) if run_tasks else None
        sweep.prepare(comparison.full_grid)
        answers = questions.compare() if questions else Answers()  # before the sweep, which leaves weights perturbed
        sweep.run(comparison)
        failures = [*sweep.failures(), *answers.failures]
        recorded = sweep.recording.content() if sweep.recording and not failures else None
    names = not_perturbed(subject.models.yardstick.model)
    evidence = {**evidence_of(sweep, verified=not failures), "not_perturbed": names, "answers": answers.evidence}
    return Report(evidence, failures, recorded=recorded)


def _compare_in_float32(
    report: Report, points: Sequence[Point], graphs: Mapping[str, bytes], make_subject: MakeSubject
) -> None:
    """Compare graphs widened to float32 with the model in float32, and add the result to the report."""
    wide = {name: widen(graph) for name, graph in graphs.items()}
    moved = []
    if not all(exact for _, exact in wide.values()):
        rng = np.random.default_rng(SEED)
        moved = [{name: widen(graph, rng)[0] for name, graph in graphs.items()} for _ in range(_MOVED)]
    subject = make_subject(files={name: data for name, (data, _) in wide.items()}, moved=moved)
    sweep = Sweep(subject, subject.capacity)
    sweep.perturb(points)
    report.failures += sweep.failures()
    report.evidence |= {
        "verified": report.passed,
        "in_float32": {graph.name: {"outputs": sweep.findings.outputs(graph)} for graph in sweep.subject.graphs},
    }
