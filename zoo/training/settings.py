"""Settings of a training run, torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, Self

from zoo.config import Settings

__all__ = ["CHANGEABLE", "INEXACT", "LowRankSettings", "TrainingSettings"]

CHANGEABLE = ("activation_checkpointing", "checkpoint_every", "checkpoint_minutes", "fsdp", "log_every",
              "micro_batch_size", "workers")  # fmt: skip
"""Settings that may change when a run continues. The gradients do not depend on them, apart from what
:data:`INEXACT` says."""
INEXACT = {
    "micro_batch_size": "sums are rounded in another order, and dropout draws other numbers",
    "fsdp": "sums are rounded in another order",
}
"""Why the weights differ, although the examples of each step are the same."""


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(Settings):
    """Settings of a training run."""

    max_steps: int | None = None
    """Number of steps; by default those of ``epochs``."""
    epochs: float | None = None
    """Passes over the data, if ``max_steps`` is not given; 3 by default."""
    batch_size: int = 32
    """Examples in a step, over all processes."""
    micro_batch_size: int | None = None
    """Examples computed at once; ``batch_size`` by default. Gradients of a step do not depend on it."""
    max_length: int | None = None
    """Longest example, in tokens; longer ones are truncated. The model's longest input by default."""
    buckets: bool = True
    """Whether a batch has examples of like length."""
    seed: int = 0
    """Seed of the weights, the order of examples, masking and dropout."""
    optimizer: Literal["adamw", "adam", "sgd", "adafactor"] = "adamw"
    """The class of ``torch.optim``."""
    learning_rate: float = 3e-4
    """The largest learning rate."""
    schedule: Literal["constant", "linear", "cosine", "inverse-sqrt"] = "linear"
    """How the learning rate decreases after the warm-up."""
    warmup_steps: int = 0
    """Steps in which the learning rate increases linearly from 0."""
    min_learning_rate: float = 0.0
    """The learning rate that ``linear`` and ``cosine`` approach, one step after the last."""
    weight_decay: float = 0.01
    """Applied to matrices only: not to norms, biases and embeddings."""
    beta1: float = 0.9
    """Decay of the first moment of Adam, or the momentum of SGD."""
    beta2: float = 0.999
    """Decay of the second moment of Adam."""
    epsilon: float = 1e-8
    """Added to the denominator of Adam."""
    clip_norm: float | None = 1.0
    """Largest norm of the gradients of a step; None for no limit."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Dtype of matrix products. Weights are always float32."""
    freeze: tuple[str, ...] = ()
    """Globs of parameters that are not trained."""
    layer_decay: float = 1.0
    """Factor of the learning rate from each block to the one below it."""
    ema: float | None = None
    """Decay of the moving average of the weights, which is what is evaluated and saved; None for no average."""
    compile: bool = False
    """Whether the model is compiled by torch.compile."""
    evaluate_every: int | None = None
    """Steps between evaluations; once per epoch by default."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; the same as ``evaluate_every`` by default."""
    checkpoint_minutes: float | None = 10.0
    """Minutes after which a checkpoint is written if there was none meanwhile; None for no limit."""
    log_every: int = 10
    """Steps between records in metrics.jsonl."""
    patience: int | None = None
    """Evaluations without improvement after which training ends; None for no limit."""
    monitor: Literal["loss", "accuracy"] = "loss"
    """The quantity by which evaluations are compared: the lowest loss or the highest accuracy is the best."""
    keep: Literal["best", "last"] = "best"
    """Which weights are kept: those of the best evaluation, if there is data for it, or the last ones."""
    workers: int = 0
    """Processes that prepare batches."""
    activation_checkpointing: bool = False
    """Whether blocks compute their activations again in the backward pass, which saves memory."""
    fsdp: bool = False
    """Whether several processes divide the weights, the gradients and the optimiser's state among them."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a number out of its range."""
        positive = ("max_steps", "epochs", "batch_size", "micro_batch_size", "max_length", "evaluate_every",
                    "checkpoint_every", "checkpoint_minutes", "log_every", "patience", "learning_rate", "epsilon",
                    "clip_norm", "layer_decay")  # fmt: skip
        for name in positive:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        for name in ("seed", "warmup_steps", "min_learning_rate", "weight_decay", "workers"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("beta1", "beta2", "ema"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ValueError(f"{name} must be from 0 to less than 1, got {value}")
        if self.micro_batch_size is not None and self.micro_batch_size > self.batch_size:
            raise ValueError(f"micro_batch_size {self.micro_batch_size} exceeds batch_size {self.batch_size}")
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(f"min_learning_rate {self.min_learning_rate} exceeds learning_rate {self.learning_rate}")
        if self.compile and (self.fsdp or self.activation_checkpointing):
            raise ValueError("compile cannot be combined with fsdp or activation_checkpointing")
        if self.max_steps is not None and self.epochs is not None:
            raise ValueError(f"give max_steps {self.max_steps} or epochs {self.epochs}, not both")


@dataclass(frozen=True, kw_only=True)
class LowRankSettings(Settings):
    """Settings of low-rank adapters (Hu et al. 2021): a dense weight W acts as W + alpha / rank * B A."""

    rank: int = 8
    """Rows of A, and columns of B."""
    alpha: float | None = None
    """The factor of an update, times ``rank``; by default ``rank``, so that the factor is 1."""
    dropout: float = 0.0
    """Dropout of the input of A."""
    targets: tuple[str, ...] = ()
    """Globs of the names of dense layers. By default all dense layers in lists of blocks, thus the projections of
    attention and the feed-forward layers (Dettmers et al. 2023, section 4), and no embedding, pooler or head."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a number out of its range."""
        self.require_positive("rank", "alpha")
        self.require_probability("dropout")
        self.default("alpha", float(self.rank))

    @property
    def scale(self) -> float:
        """The factor of B A."""
        assert self.alpha is not None
        return self.alpha / self.rank

    @classmethod
    def parse(cls, text: str, option: str) -> Self:
        """Return the settings of a ``KEY=VALUE,...`` text of a command-line option."""
        return cls.from_dict(cls.parse_settings(re.split(r",(?=\w+=)", text), option), option)
