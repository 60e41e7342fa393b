"""Precision, recall and F1 of classes, and how often each is answered for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from zoo.arrays import Array

__all__ = ["ClassReport", "ClassScore", "Confusion", "f1_score", "report_indicators", "report_labels"]

_NAMED = 3
"""Number of classes that a warning names."""


@dataclass(frozen=True)
class ClassScore:
    """How well a class is found. Scores without a denominator are 0."""

    label: str
    support: int
    """Number of targets of the class."""
    predicted: int
    """Number of answers of the class."""
    correct: int
    """Number of both together."""

    @property
    def precision(self) -> float:
        """Share of the answers that are right."""
        return self.correct / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        """Share of the targets that are found."""
        return self.correct / self.support if self.support else 0.0

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall."""
        return f1_score([self])


@dataclass(frozen=True)
class Confusion:
    """The targets of one class that have the answer of one class, which may be the same."""

    label: str
    answer: str
    count: int


@dataclass(frozen=True)
class ClassReport:
    """The scores of all classes."""

    classes: Sequence[ClassScore]
    """In the order of the model's classes."""
    confusions: Sequence[Confusion] | None = None
    """By label and answer, those that occur; None for answers of several classes."""
    kind: str = "inputs"
    """Name of the labelled items in tables, in the plural: ``inputs``, ``words`` or ``entities``."""

    def f1(self, average: Literal["macro", "micro"], *, absent: bool = False) -> float:
        """Return the F1 of all classes: the mean of theirs (macro), or that of their sums (micro).

        Args:
            average: the kind of mean.
            absent: whether classes that are neither a target nor an answer count, with 0, in the mean.
        """
        counted = [item for item in self.classes if absent or item.support or item.predicted]
        if average == "micro":
            return f1_score(counted)
        return sum(item.f1 for item in counted) / len(counted) if counted else 0.0

    def problems(self) -> list[str]:
        """Return what is suspicious: the same answer to all inputs, or classes that are never an answer."""
        wanted = [item for item in self.classes if item.support]
        answers = [item for item in self.classes if item.predicted]
        total = sum(item.predicted for item in answers)
        if self.confusions is not None and len(answers) == 1 and len(wanted) > 1:
            answer = f"the answer {answers[0].label!r}, of {len(self.classes):,} classes"
            return [f"each of {total:,} {self.kind} has {answer}"]
        never = sorted((item for item in wanted if not item.predicted), key=lambda item: -item.support)
        if not never:
            return []
        support = sum(item.support for item in wanted)
        named = ", ".join(f"{item.label!r} ({item.support:,} of {support:,} {self.kind})" for item in never[:_NAMED])
        more = f" and {len(never) - _NAMED:,} more" if len(never) > _NAMED else ""
        return [f"classes that occur are never an answer: {named}{more}"]


def f1_score(classes: Iterable[ClassScore]) -> float:
    """Return the F1 of the sums over classes: twice the right answers, divided by targets and answers together."""
    listed = list(classes)
    both = sum(item.support + item.predicted for item in listed)
    return 2 * sum(item.correct for item in listed) / both if both else 0.0


def report_labels(
    names: Sequence[str], wanted: Sequence[int] | Array, found: Sequence[int] | Array, *, kind: str = "inputs"
) -> ClassReport:
    """Score answers of one class each.

    Args:
        names: the names of the C classes.
        wanted: the numbers of the right classes (N,).
        found: the numbers of the answered classes (N,).
        kind: what has a class, in the plural.
    """
    pairs = Counter(zip(np.asarray(wanted).tolist(), np.asarray(found).tolist(), strict=True))
    support, predicted, correct = Counter[int](), Counter[int](), Counter[int]()
    for (one, other), count in pairs.items():
        support[one] += count
        predicted[other] += count
        correct[one] += count * (one == other)
    classes = [
        ClassScore(name, support[number], predicted[number], correct[number]) for number, name in enumerate(names)
    ]
    confusions = [Confusion(names[one], names[other], count) for (one, other), count in sorted(pairs.items())]
    return ClassReport(classes, confusions, kind)


def report_indicators(names: Sequence[str], wanted: Array, found: Array) -> ClassReport:
    """Score answers of any number of classes each.

    Args:
        names: the names of the C classes.
        wanted: whether each class is right (N, C), booleans.
        found: whether each class is answered (N, C), booleans.
    """
    counts = zip(names, wanted.sum(0).tolist(), found.sum(0).tolist(), (wanted & found).sum(0).tolist(), strict=True)
    return ClassReport([ClassScore(*item) for item in counts])
