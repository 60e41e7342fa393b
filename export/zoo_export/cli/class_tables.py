"""Tables and figures of the classes in the answers that ``zoo evaluate`` scores."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.cli.output import echo, is_terminal
from zoo.cli.report import columns

if TYPE_CHECKING:
    from zoo_export.scoring.reports import ClassReport

__all__ = ["draw_confusions", "print_reports", "report_facts"]

_CLASSES = 20
"""Number of classes whose scores are printed."""
_MATRIX = 12
"""Number of classes up to which a whole matrix is printed."""
_CONFUSIONS = 10
"""Number of confusions that are printed otherwise."""


def report_facts(report: ClassReport) -> dict[str, Any]:
    """Return all scores of classes for JSON, and all pairs of a label and an answer that occur."""
    classes = [
        {"label": item.label, "precision": item.precision, "recall": item.recall, "f1": item.f1,
         "support": item.support, "predicted": item.predicted, "correct": item.correct}
        for item in report.classes
    ]  # fmt: skip
    pairs = None if report.confusions is None else [asdict(item) for item in report.confusions]
    return {"classes": classes, "confusion": pairs}


def print_reports(reports: Mapping[str, ClassReport]) -> None:
    """Print the scores of classes and the confusions of each variant, once for those that are the same."""
    groups: list[tuple[list[str], ClassReport]] = []
    for name, report in reports.items():
        same = next((names for names, other in groups if other == report), None)
        if same is None:
            groups.append(([name], report))
        else:
            same.append(name)
    for names, report in groups:
        if len(report.classes) > 1:
            echo(f"\n{', '.join(names)}: classes")
            _print_classes(report)
        if report.confusions is not None:
            _print_confusions(report, ", ".join(names))


def _print_classes(report: ClassReport) -> None:
    counted = [item for item in report.classes if item.support or item.predicted]
    shown = counted
    if len(counted) > _CLASSES:
        shown = sorted(counted, key=lambda item: (item.f1, -item.support))[:_CLASSES]
    rows = [
        (item.label, f"{item.precision:.4f}", f"{item.recall:.4f}", f"{item.f1:.4f}", f"{item.support:,}")
        for item in shown
    ]
    columns([("class", "precision", "recall", "f1", "support"), *rows], right=range(1, 5), middle=[0])
    if len(counted) > len(shown):
        left = f"{len(counted) - len(shown):,} of {len(counted):,} classes"
        echo(f"left out: {left}, with an F1 of {shown[-1].f1:.4f} or more (all: --json)")
    if absent := len(report.classes) - len(counted):
        echo(f"neither a label nor an answer: {absent:,} of {len(report.classes):,} classes")


def _print_confusions(report: ClassReport, names: str) -> None:
    counts = {(item.label, item.answer): item.count for item in report.confusions or ()}
    present = {name for pair in counts for name in pair}
    labels = [item.label for item in report.classes if item.label in present]
    if len(labels) <= _MATRIX and _fits(labels, counts.values()):
        echo(f"\n{names}: {report.kind} by label (row) and answer (column)")
        rows = [(one, *(f"{counts.get((one, other), 0):,}" for other in labels)) for one in labels]
        columns([("", *labels), *rows], right=range(1, len(labels) + 1))
        return
    wrong = [item for item in report.confusions or () if item.label != item.answer]
    if not wrong:
        return
    largest = sorted(wrong, key=lambda item: -item.count)[:_CONFUSIONS]
    echo(f"\n{names}: largest confusions")
    columns([("label", "answer", report.kind), *((item.label, item.answer, f"{item.count:,}") for item in largest)],
            right=[2], middle=[0, 1])  # fmt: skip
    if len(wrong) > len(largest):
        lost = sum(item.count for item in wrong) - sum(item.count for item in largest)
        left = f"{len(wrong) - len(largest):,} of {len(wrong):,} pairs of classes"
        echo(f"left out: {left}, {lost:,} {report.kind} (all: --json)")


def _fits(labels: Sequence[str], counts: Iterable[int]) -> bool:
    """Return whether a matrix fits the width of the terminal, if stdout is one."""
    if not is_terminal(sys.stdout):
        return True
    number = max(len(f"{count:,}") for count in counts)
    width = max(map(len, labels)) + sum(2 + max(len(label), number) for label in labels)
    return width <= shutil.get_terminal_size().columns


def draw_confusions(name: str, reports: Mapping[str, ClassReport], target: Path, *, force: bool) -> None:
    """Draw the confusion matrix of each variant, one beside the other."""
    from zoo.plots import confusion

    pairs = {
        variant: [(item.label, item.answer, item.count) for item in report.confusions]
        for variant, report in reports.items()
        if report.confusions is not None
    }
    labels = [item.label for item in next(iter(reports.values())).classes]
    plot = confusion(f"{name}: labels and answers", labels, pairs)
    plot.write(target, force=force)
    echo(f"{target}: {plot.title}", err=True)
