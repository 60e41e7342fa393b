"""Classification of texts and pairs of texts, and regression, as the model's ``problem_type`` says."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.arrays import Array
from zoo.classes import ClassifierConfig, default_names
from zoo.config import Config
from zoo.training.criterion import Batch, Criterion, Loss, Row, wide
from zoo.training.data.examples import Example
from zoo.training.data.labels import class_name, items_of

__all__ = ["TextClassification", "class_loss", "class_number", "label_array", "label_tensor", "require_classes"]


def class_number(config: ClassifierConfig, label: Any) -> int:
    """Return the number of a class, given as its name or, unless the names are numbers, its number.

    Raises :class:`ValueError` if it is unknown.
    """
    names, name = _numbers(config.labels), class_name(label)
    number = names.get(str(label), names.get(name))
    if number is None and isinstance(label, bool | np.bool_):
        unnamed = names.keys() <= {"0", "1"} or config.labels == default_names(config.num_classes)
        number = int(label) if config.num_classes <= 2 and unnamed else None
    elif number is None and name.isdecimal() and not all(map(str.isdecimal, names or [""])):
        number = int(name)
    if number is None or number >= config.num_classes:
        classes = ", ".join(config.labels) or f"0 to {config.num_classes - 1}"
        raise ValueError(f"label {label!r} is not one of {classes}")
    return number


@lru_cache(maxsize=1)
def _numbers(labels: tuple[str, ...]) -> dict[str, int]:
    return {name: number for number, name in enumerate(labels)}


def label_array(config: ClassifierConfig, label: Any) -> Array:
    """Return a label as an array: a class (1,), an indicator of each class (num_classes,), or numbers (num_classes,).

    A class is given as its name or number, several classes as a list of these, numbers as a list or a single one.

    Raises:
        ValueError: the label is not one of the model's.
    """
    several = items_of(label)
    if config.problem_type == "single_label_classification":
        if len(several) != 1:
            raise ValueError(f"label must be one class, got {label!r}")
        return np.array([class_number(config, several[0])], np.int32)
    if config.problem_type == "multi_label_classification":
        indicator = np.zeros(config.num_classes, np.float32)
        if config.num_classes == 1:  # the probability of one class: 0 or 1, or a list with or without its name
            named = [class_name(item) for item in several]
            labels = ("1", "True", *config.labels)
            if named not in ([], ["0"], ["False"], *([name] for name in labels)):
                raise ValueError(f"label must be 0 or 1, or a list with or without {labels[-1]!r}, got {label!r}")
            indicator[:] = bool(named) and named[0] in labels
            return indicator
        numbers = [class_number(config, item) for item in several]
        if len(set(numbers)) < len(numbers):
            raise ValueError(f"label names a class twice, got {label!r}: list the classes that apply")
        indicator[numbers] = 1
        return indicator
    try:
        values = np.array([float(item) for item in several], np.float32)
    except (TypeError, ValueError) as error:
        raise ValueError(f"label must be a number, got {label!r}") from error
    if len(values) != config.num_classes or not np.isfinite(values).all():
        raise ValueError(f"label must be {config.num_classes} finite numbers, got {label!r}")
    return values


def class_loss(config: ClassifierConfig, logits: Tensor, labels: Tensor) -> Loss:
    """Return the loss of logits (B, C): cross-entropy, binary cross-entropy, or squared error.

    As in transformers' losses, the last two are means over the C outputs of an example; an example is the target.

    Args:
        config: names the problem type.
        logits: (B, C).
        labels: classes (B, 1), indicators (B, C) or numbers (B, C).
    """
    logits = wide(logits)
    if config.problem_type == "single_label_classification":
        total = F.cross_entropy(logits, labels[:, 0], reduction="sum")
        return Loss(total, len(labels), int(logits.argmax(-1).eq(labels[:, 0]).sum()))
    if config.problem_type == "multi_label_classification":
        losses = F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none")
        return Loss(losses.mean(-1).sum(), len(labels), int(logits.gt(0).eq(labels.gt(0.5)).all(-1).sum()))
    return Loss(F.mse_loss(logits, labels.to(logits.dtype), reduction="none").mean(-1).sum(), len(labels))


def label_tensor(examples: Sequence[Example]) -> Tensor:
    """Return the field ``labels`` of examples as one tensor, for :func:`class_loss`."""
    labels = torch.from_numpy(np.stack([example["labels"] for example in examples]))
    return labels if labels.is_floating_point() else labels.long()


def require_classes(config: Config) -> None:
    """Raise :class:`ValueError` if a configuration has no classes."""
    if not isinstance(config, ClassifierConfig):
        raise ValueError(f"{type(config).__name__} has no classes")


class TextClassification(Criterion):
    """Classes of a text or of a pair of texts. The columns are ``text``, ``label`` and, for pairs, ``pair``."""

    config: ClassifierConfig

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        require_classes(self.config)

    def encode(self, row: Row) -> Example:
        label = label_array(self.config, row["label"])
        if "pair" not in row:
            return {"input_ids": self.token_ids(row), "labels": label}
        return {**self.pair_fields(self.encode_text(row, "text", "pair")), "labels": label}

    def collate(self, examples: Sequence[Example], generators: Sequence[np.random.Generator]) -> Batch:
        return {**self.text_batch(examples), "labels": label_tensor(examples)}

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        return class_loss(self.config, self.outputs(model, batch)["logits"], batch["labels"])
