"""What a checkpoint says of a run, apart from tensors. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Best", "Evaluation", "Progress"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Means over all targets of the examples for evaluation."""

    loss: float
    accuracy: float | None
    targets: int
    terms: Mapping[str, float] = field(default_factory=dict)
    """The losses and accuracies of an objective with several terms, such as ``next_sentence_loss``."""


@dataclass(frozen=True, slots=True)
class Best(Evaluation):
    """The best evaluation of a run so far."""

    step: int = field(kw_only=True)
    """The step after which it was made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The progress of an unfinished run, as it is stored beside the plan."""

    step: int
    """Number of steps done."""
    best: Best | None
    worse: int
    """Evaluations since the best one."""
    origin: Mapping[str, Any]
    """The origin of the weights before training, see :class:`zoo.artifact.provenance.Origin`."""
