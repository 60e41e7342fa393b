"""The base class of scorers, and what they share."""

from __future__ import annotations

import importlib
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from zoo.arrays import Array
from zoo.errors import ZooWarning
from zoo.training.criterion import Criterion, Row, is_list
from zoo_export.scoring.reports import ClassReport

__all__ = ["Kind", "Result", "Scorer", "correlations", "input_of", "library"]

Result = Mapping[str, Any]
Kind = TypeVar("Kind", bound=Criterion)


class Scorer(ABC, Generic[Kind]):
    """Scores the answers of a task.

    Args:
        criterion: the objective.
        options: options of the task that are given.
        rows: all rows, each with an example. They are read again for each variant.

    Raises:
        UsageError: an option does not fit the labels.
    """

    task = ""
    """The task of ``zoo run`` that answers the rows."""
    target: ClassVar[str | None] = "label"
    """The role of the column that :meth:`prediction` is compared with; None if there is none."""

    def __init__(self, criterion: Kind, options: Mapping[str, Any], rows: Iterable[Row]) -> None:
        self.criterion, self.options = criterion, dict(options)
        """The options of the task with which rows are answered."""
        self.notes: list[str] = []
        """Remarks on the scores, such as why one is left out."""
        self.problems: list[str] = []
        """Warnings of answers that say nothing about the inputs."""
        self.report: ClassReport | None = None
        """The scores of each class, once :meth:`scores` was called."""

    @property
    def has_confusion(self) -> bool:
        """Whether an answer is one of several classes."""
        return False

    def inputs(self, row: Row) -> Sequence[Any]:
        """Return the inputs of the task for a row."""
        return (input_of(row["text"]),)

    @abstractmethod
    def add(self, row: Row, results: Sequence[Result]) -> None:
        """Add the answers to the inputs of a row."""

    @abstractmethod
    def prediction(self, row: Row, results: Sequence[Result]) -> dict[str, Any]:
        """Return the answer to a row for a file of predictions: ``prediction``, and numbers that go with it."""

    def target_of(self, row: Row) -> Any:
        """Return what the prediction should be, in the same form."""
        return None if self.target is None else row.get(self.target)

    @abstractmethod
    def scores(self) -> dict[str, float]:
        """Return the scores by name; those that are not defined are left out."""

    def judge(self, report: ClassReport) -> None:
        self.report = report
        self.problems += report.problems()


def input_of(value: Any) -> Any:
    """Return a value of a column as an input of a task: a text, or a list."""
    return list(value) if is_list(value) else value


def correlations(found: Array, wanted: Array) -> dict[str, float]:
    """Return the correlations of Pearson and Spearman, if they are defined."""
    if len(found) < 2 or np.ptp(found) == 0 or np.ptp(wanted) == 0:
        return {}
    scores = {"pearson": float(np.corrcoef(found, wanted)[0, 1])}
    scipy = library("scipy.stats")
    if scipy is not None:
        scores["spearman"] = float(scipy.spearmanr(found, wanted).statistic)
    return {name: value for name, value in scores.items() if math.isfinite(value)}


def library(name: str) -> Any:
    """Import a library of metrics; warn and return None if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        problem = f"scores of {name.partition('.')[0]} are left out: pip install attention-zoo[metrics]"
        warnings.warn(problem, ZooWarning, stacklevel=2)
        return None
