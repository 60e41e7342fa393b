"""Configuration, graph and cost of TextCNN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zoo import ClassifierConfig, Cost, Graph, cost, floats, mask, token_ids


@dataclass(frozen=True, kw_only=True)
class TextCNNConfig(ClassifierConfig):
    """Configuration of TextCNN. By default the hyper-parameters of section 3.1 and the paper's MR vocabulary."""

    task: Literal["text-classification"] = "text-classification"
    """Text classification."""
    vocab_size: int = 18765
    """Size of the vocabulary, in words."""
    max_seq_len: int = 512
    """Longest text that the model is trained for. No parameter depends on it."""
    hidden_size: int = 300
    """Width of an embedding, the paper's k."""
    kernel_sizes: tuple[int, ...] = (3, 4, 5)
    """Width in words of each group of filters, the paper's h."""
    num_filters: int = 100
    """Filters per group."""
    dropout: float = 0.5
    """Dropout on the features, during training."""
    pad_token_id: int | None = None
    """Token that pads shorter inputs of a batch; 0 if unset."""

    def __post_init__(self) -> None:
        self.require_positive("vocab_size", "max_seq_len", "hidden_size", "num_filters")
        self.require_probability("dropout")
        if not self.kernel_sizes or min(self.kernel_sizes) < 1:
            raise ValueError(f"kernel_sizes must be one or more positive numbers, got {list(self.kernel_sizes)}")
        self.check_classes(head=True)
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(f"pad_token_id {self.pad_token_id} lies outside vocab_size {self.vocab_size}")

    @property
    def num_features(self) -> int:
        """Width of the classifier's input: one feature per filter."""
        return len(self.kernel_sizes) * self.num_filters

    def graphs(self) -> tuple[Graph, ...]:
        """One graph."""
        inputs = (token_ids("input_ids", self.vocab_size), mask("attention_mask"))
        return (Graph(inputs=inputs, outputs=(floats("logits", "batch", self.num_classes),)),)

    def cost(self) -> Cost:
        """Return the closed-form cost; FLOPs per token exclude the classifier, which runs once per text."""
        total = cost.embedding(self.vocab_size, self.hidden_size)
        for size in self.kernel_sizes:
            total += cost.convolution(self.hidden_size, self.num_filters, size)
        return total + Cost(cost.linear(self.num_features, self.num_classes).parameters)
