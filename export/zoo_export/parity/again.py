"""Repeated comparison of an export that may have evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from zoo.artifact import ModelDirectory, Record
from zoo.errors import IncomparableError, ParityError
from zoo_export.comparison import Comparison
from zoo_export.parity.laws import check_laws
from zoo_export.parity.report import Report

__all__ = ["compare_again"]


def compare_again(
    record: Record,
    stored: ModelDirectory,
    compare: Callable[[Comparison], Report],
    comparison: Comparison,
    write: Callable[[Mapping[str, Any]], None] | None = None,
    dtype: str | None = None,
) -> Report:
    """Check the laws of a model and compare an export of it. If that fails, mark earlier evidence as failed.

    An error that says nothing about the graphs, as for want of memory, changes no evidence.

    Args:
        record: the evidence, if there is any.
        stored: the model.
        compare: compares the export, over the full grid if the evidence says that it failed there.
        comparison: how it is compared.
        write: replaces the evidence, if more depends on it than the manifest.
        dtype: the dtype of the graphs, by default that of the model.

    Raises:
        ParityError: the model violates a law, or the graphs do not match it on this machine.
    """
    failed_before = record.exists and record.evidence.get("failed_full_grid", False)
    comparison = replace(comparison, full_grid=comparison.full_grid or failed_before)
    try:
        laws = check_laws(stored, dtype)
        report = compare(comparison)
        if not report.passed:
            raise ParityError(report.verdict(), stored.path)
    except IncomparableError:
        raise
    except ParityError as error:
        if not record.exists:
            raise
        raise record.revoked(error, write, failed_full_grid=comparison.full_grid) from error
    report.evidence["laws"] = laws
    return report
