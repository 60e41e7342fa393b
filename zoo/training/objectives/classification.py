"""Classification of texts and pairs of texts, and regression, as the model's ``problem_type`` says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.classes import ClassifierConfig
from zoo.training.criterion import Batch, Criterion, Loss, Row, mask_of, padded, wide
from zoo.training.examples import Example

__all__ = ["TextClassification", "class_loss", "label_array"]


def label_array(config: ClassifierConfig, label: Any) -> np.ndarray[Any, Any]:
    """Return a label as an array: a class (1,), an indicator of each class (num_classes,), or numbers (num_classes,).

    A class is given as its name or number, several classes as a list of these, numbers as a list or a single one.

    Raises:
        ValueError: the label is not one of the model's.
    """
    names = {name: number for number, name in enumerate(config.labels)}

    def number_of(item: Any) -> int:
        found = names.get(str(item), item)
        found = int(found) if isinstance(found, int | np.integer) or str(found).isdecimal() else -1
        if not 0 <= found < config.num_classes:
            known = ", ".join(config.labels) or f"0 to {config.num_classes - 1}"
            raise ValueError(f"label {item!r} is not one of {known}")
        return found

    several = label if isinstance(label, list | tuple | np.ndarray) else [label]
    if config.problem_type == "single_label_classification":
        if len(several) != 1:
            raise ValueError(f"label must be one class, got {label!r}")
        return np.array([number_of(several[0])], np.int32)
    if config.problem_type == "multi_label_classification":
        indicator = np.zeros(config.num_classes, np.float32)
        if config.num_classes == 1:  # the probability of one class: 0 or 1
            several = [0] if str(label) in ("1", "True", *config.labels) else []
            if not several and str(label) not in ("0", "False"):
                raise ValueError(f"label must be 0 or 1, got {label!r}")
        indicator[[number_of(item) for item in several]] = 1
        return indicator
    try:
        numbers = np.array([float(item) for item in several], np.float32)
    except (TypeError, ValueError) as error:
        raise ValueError(f"label must be a number, got {label!r}") from error
    if len(numbers) != config.num_classes or not np.isfinite(numbers).all():
        raise ValueError(f"label must be {config.num_classes} finite numbers, got {label!r}")
    return numbers


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


class TextClassification(Criterion):
    """Classes of a text or of a pair of texts. The columns are ``text``, ``label`` and, for pairs, ``pair``."""

    config: ClassifierConfig

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if not isinstance(self.config, ClassifierConfig):
            raise ValueError(f"{type(self.config).__name__} has no classes")
        tensors = (tensor for graph in self.config.graphs() for tensor in graph.input_tensors())
        self._inputs = {tensor.name for tensor in tensors}

    def encode(self, row: Row) -> Example:
        label = label_array(self.config, row["label"])
        if "pair" not in row:
            return {"input_ids": self.token_ids(row), "labels": label}
        encoded = self.encode_text(row, "text", "pair")
        ids = self.checked(encoded.ids, "text")
        return {"input_ids": ids, "token_type_ids": np.asarray(encoded.type_ids, np.int32), "labels": label}

    def collate(self, examples: Sequence[Example], generators: Sequence[np.random.Generator]) -> Batch:
        ids = [example["input_ids"] for example in examples]
        batch = {"input_ids": padded(ids, self.pad_id), "attention_mask": mask_of(ids)}
        if "token_type_ids" in examples[0]:
            batch["token_type_ids"] = padded([example["token_type_ids"] for example in examples], 0)
        labels = torch.from_numpy(np.stack([example["labels"] for example in examples]))
        batch["labels"] = labels if labels.is_floating_point() else labels.long()
        return {name: tensor for name, tensor in batch.items() if name in self._inputs | {"labels"}}

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        outputs = model(**{name: tensor for name, tensor in batch.items() if name != "labels"})
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs
        return class_loss(self.config, logits, batch["labels"])
