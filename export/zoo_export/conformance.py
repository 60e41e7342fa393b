"""ONNX checks that the exporter adds to the conformance kit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from zoo.artifact import ModelDirectory
from zoo.errors import ParityError, ZooError
from zoo.storage import scratch_folder
from zoo.testing.check import Inapplicable, fail
from zoo.testing.subject import Subject

if TYPE_CHECKING:
    from zoo_export.parity.report import Report

__all__ = ["CHECKS", "onnx_dynamic", "onnx_export", "onnx_parity"]


def onnx_export(subject: Subject) -> None:
    """The model can be exported to ONNX, one file per declared graph.

    ``zoo export`` traces the code with symbolic sizes and without values. Control flow that depends on values cannot be
    traced: an ``if`` on a tensor, ``.item()``, ``.tolist()``.

    Compute both branches and select with ``torch.where``; branch in Python only on shapes and the configuration.
    """
    graphs = _graphs(subject)
    if isinstance(graphs, Exception):
        fail("the model can be exported", str(graphs))


def onnx_parity(subject: Subject) -> None:
    """The ONNX graphs match the model, by the criterion of ``zoo export``.

    Over a grid of batch sizes, lengths, pasts and paddings, with and without graph optimisations and with noise on
    every weight, the error against float64 must be at most twice that of PyTorch in the model's own dtype.

    ``zoo export MODEL --onnx`` names the first module that diverges, and ``zoo diff`` lists all of them. A model must
    not behave differently while it is exported.
    """
    report = _report(subject)
    if report is None:
        raise Inapplicable("the model cannot be exported: see onnx-export")
    from zoo_export.parity.laws import LawError

    if isinstance(report, LawError):
        raise Inapplicable(f"there is nothing to compare with: {report}")
    if isinstance(report, Exception):
        fail("the graphs match the model", str(report))


def onnx_dynamic(subject: Subject) -> None:
    """The ONNX graphs also match the model at sizes that ``zoo export`` does not compare.

    Dimensions that are declared dynamic must be dynamic in the graph. A size that was traced as a constant only shows
    at other sizes.

    Take sizes from ``x.shape`` where they are needed, not from tensor values or from a list built earlier.
    """
    report = _report(subject)
    if report is None:
        raise Inapplicable("the model cannot be exported: see onnx-export")
    if isinstance(report, Exception):
        raise Inapplicable("the graphs do not match the model at the usual sizes: see onnx-parity")
    from zoo.probe.inputs import Point
    from zoo.testing.compute import masks
    from zoo.testing.laws import sides
    from zoo_export.parity.subject import OnnxSubject
    from zoo_export.parity.sweep import Sweep

    past = 2 if any(graph.pasts for graph in subject.graphs) else 0
    allowed = [set(sides(mask)) for mask, _ in masks(subject.graphs)]
    padding = next((side for side in ("left", "right") if allowed and all(side in each for each in allowed)), "none")
    points = [
        Point(rows, max(1, min(length, subject.longest - past)), past, padding)  # type: ignore[arg-type]
        for rows, length in ((11, 4), (4, 10), (3, subject.longest - past - 1))
    ]
    with _stored(subject) as (stored, graphs):
        sweep = Sweep(OnnxSubject(stored, graphs, "cpu"))
        sweep.visit(points)
        failures = sweep.failures()
    if failures:
        fail("the graphs match the model at other sizes", failures[0])


CHECKS = (onnx_export, onnx_parity, onnx_dynamic)


def _graphs(subject: Subject) -> dict[str, bytes] | Exception:
    """Return the unlinked ONNX graphs by name, or the error if the model cannot be exported."""
    from zoo_export.trace.make import Options, unlinked_graphs

    if "onnx graphs" not in subject.shared:
        try:
            subject.shared["onnx graphs"] = unlinked_graphs(subject.spec, "float32", Options())
        except Exception as error:
            subject.shared["onnx graphs"] = error
    graphs: dict[str, bytes] | Exception = subject.shared["onnx graphs"]
    return graphs


def _report(subject: Subject) -> Report | ZooError | None:
    """Return the evidence of a match, or the error of the comparison; None without graphs."""
    from zoo_export.trace.cache import repeat_if_stale

    if isinstance(_graphs(subject), Exception):
        return None
    if "onnx report" not in subject.shared:
        try:
            subject.shared["onnx report"] = repeat_if_stale(partial(_compare, subject))
        except ZooError as error:
            subject.shared["onnx report"] = error
    report: Report | ZooError = subject.shared["onnx report"]
    return report


def _compare(subject: Subject) -> Report:
    """Compare graphs, made again, with the model. Raises :class:`ParityError` if they differ or cannot be made."""
    from zoo_export.parity.compare import compare

    subject.shared.pop("onnx graphs", None)
    if isinstance(graphs := _graphs(subject), Exception):
        raise ParityError(str(graphs))
    with _stored(subject) as (stored, graphs):
        report = compare(stored, graphs)
    if not report.passed:
        raise ParityError(report.verdict(), None)
    return report


@contextmanager
def _stored(subject: Subject) -> Iterator[tuple[ModelDirectory, dict[str, bytes]]]:
    """Yield a temporary model directory, and its ONNX graphs linked to its weights."""
    from zoo.models.persist import save_spec
    from zoo_export.trace.make import Options, linked

    graphs = _graphs(subject)
    assert not isinstance(graphs, Exception)
    with scratch_folder() as folder:
        save_spec(subject.spec, subject.build(), folder / "model")
        stored = ModelDirectory.open(folder / "model")
        yield stored, linked(graphs, stored.dtype, stored.layout, Options())
