"""Repeated comparison of an export that has evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from zoo.artifact import Export
from zoo.errors import ParityError
from zoo_export.parity.evidence import restore, revoking
from zoo_export.parity.laws import check_laws
from zoo_export.parity.report import Report

__all__ = ["compare_again"]


def compare_again(
    export: Export, graphs: Mapping[str, bytes], compare: Callable[[bool], Report], *, full_grid: bool
) -> Report:
    """Check the laws of a model, compare its export again, and record a failure, or a success after a failure.

    Args:
        export: the export, whose digests have been checked.
        graphs: its graphs by name.
        compare: compares it, over the full grid if its argument is true.
        full_grid: compare over the full grid; also done if the export failed there.

    Raises:
        ParityError: the model violates a law, or the graphs do not match it on this machine.
    """
    full_grid = full_grid or export.evidence.get("failed_full_grid", False)
    with revoking(export, graphs, full_grid=full_grid):
        laws = check_laws(export.stored)
        report = compare(full_grid)
        if not report.passed:
            raise ParityError(report.verdict(), export.stored.path)
    report.evidence["laws"] = laws
    restore(export, report.evidence)
    return report
