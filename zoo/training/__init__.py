"""Training: objectives, data, and a loop whose every step is a pure function of the seed and the step number.

``zoo train`` on the command line; :func:`train` from Python. An objective is a subclass of :class:`Criterion`, which a
plugin declares with the hook ``zoo_objectives``. Importing this package imports no other module of it; its names import
torch, except those of settings, options and trackers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.training.adapters.merge import merge_adapter
    from zoo.training.criterion import Batch, Criterion, Loss, Row, mask_of, padded, wide
    from zoo.training.curve import plot_loss
    from zoo.training.data.examples import Example
    from zoo.training.launch import train
    from zoo.training.loop import Step, TrainingError
    from zoo.training.options import (
        ImageClassificationOptions,
        MaskingOptions,
        SentenceEmbeddingOptions,
        SequenceToSequenceOptions,
        TokenClassificationOptions,
    )
    from zoo.training.progress import Evaluation
    from zoo.training.run import Outcome
    from zoo.training.settings import LowRankSettings, TrainingSettings
    from zoo.training.tracking import TrackedRun, Tracking

__all__ = [
    "Batch",
    "Criterion",
    "Evaluation",
    "Example",
    "ImageClassificationOptions",
    "Loss",
    "LowRankSettings",
    "MaskingOptions",
    "Outcome",
    "Row",
    "SentenceEmbeddingOptions",
    "SequenceToSequenceOptions",
    "Step",
    "TokenClassificationOptions",
    "TrackedRun",
    "Tracking",
    "TrainingError",
    "TrainingSettings",
    "mask_of",
    "merge_adapter",
    "padded",
    "plot_loss",
    "train",
    "wide",
]

_HOMES = {
    **dict.fromkeys(
        (
            "ImageClassificationOptions", "MaskingOptions", "SentenceEmbeddingOptions", "SequenceToSequenceOptions",
            "TokenClassificationOptions",
        ),
        "zoo.training.options",
    ),
    **dict.fromkeys(("LowRankSettings", "TrainingSettings"), "zoo.training.settings"),
    **dict.fromkeys(("TrackedRun", "Tracking"), "zoo.training.tracking"),
    "Evaluation": "zoo.training.progress",
    **dict.fromkeys(("Batch", "Criterion", "Loss", "Row", "mask_of", "padded", "wide"), "zoo.training.criterion"),
    **dict.fromkeys(("Step", "TrainingError"), "zoo.training.loop"),
    "Outcome": "zoo.training.run",
    "train": "zoo.training.launch",
    "plot_loss": "zoo.training.curve",
    "Example": "zoo.training.data.examples",
    "merge_adapter": "zoo.training.adapters.merge",
}  # fmt: skip


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def __getattr__(name: str) -> Any:
    """Import a public name's module when the name is first used: every command imports this package."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'zoo.training' has no attribute {name!r}")
