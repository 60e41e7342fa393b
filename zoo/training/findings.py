"""What the data of a run says before its first step: the classes, unknown tokens, and labels that contradict others.

Importing this module imports torch.
"""

from __future__ import annotations

import warnings

import numpy as np

from zoo.classes import ClassifierConfig, class_names
from zoo.config import Config
from zoo.errors import ArtifactError, ZooWarning
from zoo.training.cache import Data, Facts
from zoo.training.data.examples import StoredExamples

__all__ = ["class_counts", "classes_note", "warn_of"]

_SHOWN = 10
"""Maximum number of classes that a line lists."""


def class_counts(config: Config, data: Data) -> dict[str, int]:
    """Return how often each class is a label, by name; empty for data without classes."""
    examples = data.examples
    if not isinstance(config, ClassifierConfig) or not isinstance(examples, StoredExamples):
        return {}
    if config.problem_type not in ("single_label_classification", "multi_label_classification"):
        return {}
    if "labels" not in examples.fields:
        return {}
    labels = examples.stream("labels")
    if config.problem_type == "multi_label_classification":
        counts = labels.reshape(-1, config.num_classes).sum(0, np.float64).astype(int)
    else:
        counts = np.bincount(labels[labels >= 0], minlength=config.num_classes)
    names = class_names(config.labels, config.num_classes, config.problem_type)
    return dict(zip(names, counts.tolist(), strict=True))


def classes_note(counts: dict[str, int]) -> str:
    """Return a line with the classes and their numbers of labels, the rarest ones last if there are many."""
    listed = list(counts.items())
    if len(listed) > _SHOWN:
        listed = sorted(listed, key=lambda item: -item[1])
        listed = [*listed[: _SHOWN - 2], ("...", 0), *listed[-2:]]
    shown = ", ".join(name if name == "..." else f"{name} ({count:,})" for name, count in listed)
    return f"{len(counts):,} {'classes' if len(counts) > 1 else 'class'}: {shown}"


def warn_of(facts: Facts, where: str) -> None:
    """Warn of unknown tokens and of equal inputs with different labels.

    Raises :class:`ArtifactError` if all tokens of texts are unknown.
    """
    if facts.unknown and facts.unknown == facts.encoded:
        what = f"all {facts.encoded:,} tokens of the texts are unknown to the tokenizer"
        raise ArtifactError(what, where, "train one on such texts with zoo tokenizer train")
    if facts.unknown:
        share = f"{facts.unknown / facts.encoded:.2%} of {facts.encoded:,} tokens are unknown to the tokenizer"
        warnings.warn(f"{share}: {where}: train one on such texts with zoo tokenizer train", ZooWarning, stacklevel=2)
    if facts.ambiguous:
        same = f"{facts.ambiguous:,} of {facts.rows - facts.bad:,} rows are the same to the model as another one"
        warnings.warn(f"{same}, but have a different label: {where}", ZooWarning, stacklevel=2)
