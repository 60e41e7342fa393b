"""Checks of the model as ONNX."""

from __future__ import annotations

from zoo.testing.check import Inapplicable, fail
from zoo.testing.subject import Subject

__all__ = ["onnx_dynamic", "onnx_export", "onnx_parity"]


def onnx_export(subject: Subject) -> None:
    """The model can be written as ONNX graphs, one for each that it declares.

    ``zoo export`` follows the code with sizes that are free and numbers that are not there. What depends on the numbers
    cannot be followed: an ``if`` on a tensor's values, ``.item()``, ``.tolist()``.

    Compute both sides and choose with ``torch.where``, and let Python see nothing but shapes and the configuration.
    """
    if isinstance(subject.onnx, Exception):
        fail("the model can be exported", str(subject.onnx))


def onnx_parity(subject: Subject) -> None:
    """The ONNX graphs equal the model, as ``zoo export`` demands before it writes them.

    That is: at every point of a grid of batches, lengths, pasts and paddings, with and without optimisations and with
    noise on every weight, no further from float64 than torch itself is, twice over.

    ``zoo export MODEL --onnx`` names the module where they part, and ``zoo diff`` shows all of them. Do not ask in the
    model whether it is being exported.
    """
    report = subject.report
    if report is None:
        raise Inapplicable("it cannot be exported: see onnx-export")
    if isinstance(report, Exception):
        fail("the graphs equal the model", str(report))
    if not report.passed:
        fail("the graphs equal the model", report.verdict())


def onnx_dynamic(subject: Subject) -> None:
    """The ONNX graphs give the model's results at sizes that ``zoo export`` does not compare, too.

    What is declared free must be free in the graph. A size that was taken for a constant shows at other sizes alone.

    Take sizes from ``x.shape`` where they are needed, never from a tensor's values or from a list that was made before.
    """
    from zoo_export.grid import Point
    from zoo_export.parity import Comparison

    from zoo.testing.compute import masks, stored_model
    from zoo.testing.laws import sides

    report = subject.report
    if report is None:
        raise Inapplicable("it cannot be exported: see onnx-export")
    if isinstance(report, Exception) or not report.passed:
        raise Inapplicable("the graphs do not equal the model at the usual sizes either: see onnx-parity")
    past = 2 if any(graph.past for graph in subject.graphs) else 0
    allowed = [set(sides(mask)) for mask, _ in masks(subject.graphs)]
    padding = next((side for side in ("left", "right") if allowed and all(side in each for each in allowed)), "none")
    points = [
        Point(rows, max(1, min(length, subject.longest - past)), past, padding)  # type: ignore[arg-type]
        for rows, length in ((3, 4), (4, 10), (3, subject.longest - past - 1))
    ]
    with stored_model(subject, subject.build()) as (stored, graphs):
        comparison = Comparison(stored, graphs, "cpu")
        comparison.visit(points)
        failures = [line for line in comparison.failures() if line]
    if failures:
        fail("the graphs give the model's results at other sizes", failures[0])
