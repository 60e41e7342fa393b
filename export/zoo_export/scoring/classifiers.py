"""Scores of classes, of numbers, and of entities in texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.classes import ClassifierConfig, class_names
from zoo.errors import UsageError
from zoo.training.criterion import IGNORED, Row
from zoo.training.data.labels import items_of
from zoo.training.objectives.classification import class_number, label_array
from zoo.training.objectives.images import image_of
from zoo.training.objectives.tokens import TokenClassification
from zoo_export.scoring.reports import ClassReport, ClassScore, report_indicators, report_labels
from zoo_export.scoring.scorer import Result, Scorer, correlations, input_of
from zoo_runtime.running.inputs import Pair
from zoo_runtime.tasks.tags import Scheme, entities_of, scheme_of

__all__ = ["Classes", "Images", "Tokens"]


class Classes(Scorer[Any]):
    """F1 of classes, or the squared error and correlations of numbers."""

    task = "text-classification"

    def __init__(self, criterion: Any, options: Mapping[str, Any], rows: Iterable[Row]) -> None:
        super().__init__(criterion, options, rows)
        config: ClassifierConfig = criterion.config
        self._config = config
        self._names = class_names(config.labels, config.num_classes, config.problem_type)
        self._found: list[Array] = []
        self._wanted: list[Array] = []

    @property
    def has_confusion(self) -> bool:
        problem, classes = self._config.problem_type, self._config.num_classes
        return problem == "single_label_classification" or (problem != "regression" and classes == 1)

    def inputs(self, row: Row) -> Sequence[Any]:
        return (Pair(row["text"], row["pair"]) if "pair" in row else input_of(row["text"]),)

    def add(self, row: Row, results: Sequence[Result]) -> None:
        self._found.append(_numbers(results))
        self._wanted.append(label_array(self._config, row["label"]))

    def prediction(self, row: Row, results: Sequence[Result]) -> dict[str, Any]:
        found = _numbers(results)
        if self._config.problem_type == "single_label_classification":
            return {"prediction": self._names[int(found.argmax())], "probability": float(found.max())}
        predicted = self._readable(found)
        if self._config.problem_type == "regression":
            return {"prediction": predicted}
        chances = found[-1:] if self._config.num_classes == 1 else found
        return {"prediction": predicted, "probability": chances.tolist()[0] if len(chances) == 1 else chances.tolist()}

    def target_of(self, row: Row) -> Any:
        if self._config.problem_type == "regression":  # as given, not rounded to the precision of training
            numbers = [float(item) for item in items_of(row["label"])]
            return numbers if len(numbers) > 1 else numbers[0]
        label = label_array(self._config, row["label"])
        if self._config.problem_type == "single_label_classification":
            return self._names[int(label[0])]
        return self._readable(label)

    def _readable(self, values: Array) -> Any:
        """Return the numbers of a regression, the names of several classes, or 0 or 1 for a single one."""
        if self._config.problem_type == "regression":
            return values.tolist() if len(values) > 1 else float(values[0])
        if self._config.num_classes == 1:
            return int(values[-1] > 0.5)
        return [name for name, value in zip(self._names, values, strict=True) if value > 0.5]

    def scores(self) -> dict[str, float]:
        config = self._config
        found, wanted = np.stack(self._found), np.stack(self._wanted)
        if config.problem_type == "regression":
            error = {"mean_squared_error": float(((found - wanted) ** 2).mean())}
            return error | (correlations(found[:, 0], wanted[:, 0]) if config.num_classes == 1 else {})
        if config.problem_type == "single_label_classification":
            self.judge(report := report_labels(self._names, wanted[:, 0], found.argmax(-1)))
            return {"f1": report.f1("macro")}
        if config.num_classes == 1:  # the probability of class 1
            names = ("0", "1") if self._names == ("1",) else (f"not {self._names[0]}", self._names[0])
            self.judge(report := report_labels(names, wanted[:, 0] > 0.5, found[:, -1] > 0.5))
            return {"f1": report.classes[1].f1}
        self.judge(report := report_indicators(self._names, wanted > 0.5, found > 0.5))
        return {"f1_micro": report.f1("micro"), "f1_macro": report.f1("macro", absent=True)}


class Images(Classes):
    task = "image-classification"

    def inputs(self, row: Row) -> Sequence[Any]:
        return (image_of(row["image"]),)


class Tokens(Scorer[TokenClassification]):
    """Precision, recall and F1 of entities if labels are tags of a scheme; otherwise F1 of the classes of words.

    An entity is found if its type, its first word and its last are right. Words without a label are left out. Those
    without an answer, such as truncated ones, have the tag O; they have no class.
    """

    task = "token-classification"

    def __init__(self, criterion: TokenClassification, options: Mapping[str, Any], rows: Iterable[Row]) -> None:
        super().__init__(criterion, options, rows)
        config = criterion.config
        self._names = config.labels or tuple(map(str, range(config.num_classes)))
        chosen = self.options.get("scheme", "auto")
        if chosen == "lenient":
            raise UsageError("entities are scored strictly", "scheme=lenient", "name a scheme, or leave it out")
        self._scheme: Scheme | None = scheme_of(config.labels) if chosen == "auto" else chosen
        self._found: list[list[str]] = []
        self._wanted: list[list[str]] = []

    @property
    def has_confusion(self) -> bool:
        return self._scheme is None

    def prediction(self, row: Row, results: Sequence[Result]) -> dict[str, Any]:
        answers = self._answers(results)
        return {
            "prediction": [answer["label"] for answer in answers],
            "probability": [answer.get("probability") for answer in answers],
        }

    def target_of(self, row: Row) -> list[str | None]:
        numbers = (None if label == IGNORED else class_number(self.criterion.config, label) for label in row["label"])
        return [None if number is None else self._names[number] for number in numbers]

    def _answers(self, results: Sequence[Result]) -> Sequence[Result]:
        (result,) = results
        answers: Sequence[Result] = result.get("words", result.get("classes"))
        return answers

    def add(self, row: Row, results: Sequence[Result]) -> None:
        answers = self._answers(results)
        pairs = [
            (self._names[class_number(self.criterion.config, label)], answer["label"])
            for label, answer in zip(row["label"], answers, strict=False)
            if label != IGNORED
        ]
        if self._scheme is None:
            pairs = [(wanted, found) for wanted, found in pairs if found is not None]
        self._wanted.append([wanted for wanted, _ in pairs])
        self._found.append([found or "O" for _, found in pairs])

    def scores(self) -> dict[str, float]:
        if self._scheme is None:
            numbers = {name: number for number, name in enumerate(self._names)}
            wanted, found = (
                [numbers[name] for name in chain.from_iterable(rows)] for rows in (self._wanted, self._found)
            )
            self.judge(report := report_labels(self._names, wanted, found, kind="words"))
            return {"f1": report.f1("macro")}
        known, given, right, lost = Counter[str](), Counter[str](), Counter[str](), 0
        for tags, predicted in zip(self._wanted, self._found, strict=True):
            one, other = (set(entities_of(row, self._scheme)) for row in (tags, predicted))
            for counts, entities in ((known, one), (given, other), (right, one & other)):
                counts.update(entity.label for entity in entities)
            lost += sum(tag != "O" for tag in tags) - sum(entity.stop - entity.first for entity in one)
        labels = dict.fromkeys(name.partition("-")[2] for name in self._names if name != "O")
        scored = [ClassScore(label, known[label], given[label], right[label]) for label in {**labels, **known, **given}]
        self.judge(ClassReport(scored, kind="entities"))
        if self._scheme in ("IOB2", "IOE2") and "scheme" not in self.options:
            self.notes.append(f"tags are read as {self._scheme}: --option scheme={self._scheme[:-1]}1 for the other")
        if lost:
            problem = f"{lost:,} of the data's tags contradict {self._scheme} and belong to no entity"
            self.notes.append(f"{problem}: declare another scheme with --option scheme=NAME")
        total = ClassScore("", known.total(), given.total(), right.total())
        return {"precision": total.precision, "recall": total.recall, "f1": total.f1}


def _numbers(results: Sequence[Result]) -> Array:
    """Return the probabilities of a classifier, or the numbers of a regression."""
    (result,) = results
    return np.asarray(result["values"] if "values" in result else result["probabilities"], np.float64)
