"""Configurations of classifiers, and how their logits become answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self

from zoo.config import Config

__all__ = ["ClassifierConfig", "ProblemType", "problem_of"]

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
"""How logits become answers: by a softmax over the classes, by a sigmoid for each class, or as they are. The values are
those of transformers' ``problem_type``."""


def problem_of(problem: ProblemType | None, num_classes: int) -> ProblemType:
    """Return the problem type of a head with this many classes, with the default of transformers' losses for None.

    The default is regression for one class, and a single label for several.

    Raises:
        ValueError: a single label of one class: its probability would always be 1.

    >>> problem_of(None, 3), problem_of(None, 1)
    ('single_label_classification', 'regression')
    """
    if num_classes == 1 and problem == "single_label_classification":
        what = "problem_type 'single_label_classification' needs at least 2 classes, but num_classes is 1"
        raise ValueError(f"{what}: choose 'multi_label_classification' for a probability, 'regression' for a number")
    return problem or ("regression" if num_classes == 1 else "single_label_classification")


_CLASSES = ("num_classes", "labels", "problem_type")


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig(Config):
    """Base class of configurations whose models may have a classification head.

    ``__post_init__`` of a subclass calls :meth:`check_classes`.
    """

    head_fields: ClassVar[tuple[str, ...]] = ("task", *_CLASSES)
    replaced_modules: ClassVar[tuple[str, ...]] = ("classifier",)
    num_classes: int = 2
    """Number of classes, or of numbers for regression."""
    labels: tuple[str, ...] = ()
    """Names of the classes, if any."""
    problem_type: ProblemType | None = None
    """How logits become answers: by a softmax for a single label, by sigmoids for several labels (or one probability),
    or as they are for regression. By default a single label, or regression if there is only one class. None for a model
    without a classification head."""

    def check_classes(self, *, head: bool) -> None:
        """Set the default of ``problem_type``, and raise ``ValueError`` if the fields contradict each other.

        Args:
            head: whether the configured model has a classification head.
        """
        self.require_positive("num_classes")
        if self.labels and len(self.labels) != self.num_classes:
            raise ValueError(f"{len(self.labels)} labels for num_classes {self.num_classes}")
        if head:
            self.default("problem_type", problem_of(self.problem_type, self.num_classes))

    def with_task(self, task: str, values: Mapping[str, Any] | None = None, where: object = None) -> Self:
        """Return this configuration for a task; see :meth:`zoo.Config.with_task`.

        Another task does not inherit the classes of a classification head. The number of classes follows the labels.
        """
        chosen = dict(values or {})
        if chosen.get("labels"):
            chosen.setdefault("num_classes", len(chosen["labels"]))
        if task != self.task and self.problem_type is not None:
            chosen = {field.name: field.default for field in fields(self) if field.name in _CLASSES} | chosen
        elif chosen.get("num_classes", self.num_classes) != self.num_classes:
            chosen = {"labels": (), "problem_type": None} | chosen
        return super().with_task(task, chosen, where)
