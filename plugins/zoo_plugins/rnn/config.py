"""Configuration, graph and cost of recurrent classifiers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zoo import ClassifierConfig, Cost, Graph, cost, floats, mask, token_ids

GATES = {"gru": 3, "lstm": 4}
"""Gates per cell, each with a product of input and state."""


@dataclass(frozen=True, kw_only=True)
class RNNConfig(ClassifierConfig):
    """Configuration of recurrent classifiers. The default is a small bidirectional LSTM."""

    task: Literal["text-classification", "token-classification"] = "text-classification"
    """Classify whole texts, or each of their tokens."""
    cell: Literal["gru", "lstm"] = "lstm"
    """GRU (Cho et al. 2014) or LSTM (Hochreiter and Schmidhuber 1997)."""
    bidirectional: bool = True
    """Whether each layer also reads backwards."""
    vocab_size: int = 30000
    """Size of the vocabulary."""
    max_seq_len: int = 512
    """Longest text that the model is trained for. No parameter depends on it."""
    embedding_size: int = 300
    """Width of an embedding."""
    hidden_size: int = 300
    """Width of a state, in each direction."""
    num_layers: int = 1
    """Number of stacked recurrent layers."""
    dropout: float = 0.5
    """Dropout on embeddings, between layers and before the classifier, during training."""
    pad_token_id: int | None = None
    """Token that pads shorter inputs of a batch; 0 if unset."""

    def __post_init__(self) -> None:
        self.require_positive("vocab_size", "max_seq_len", "embedding_size", "hidden_size", "num_layers")
        self.require_probability("dropout")
        self.check_classes(head=True)
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(f"pad_token_id {self.pad_token_id} lies outside vocab_size {self.vocab_size}")

    @property
    def num_features(self) -> int:
        """Width of the classifier's input: one hidden state per direction."""
        return (2 if self.bidirectional else 1) * self.hidden_size

    def graphs(self) -> tuple[Graph, ...]:
        """Declare one graph, causal for a unidirectional token classifier."""
        tagger = self.task == "token-classification"
        dims = ("batch", "sequence", self.num_classes) if tagger else ("batch", self.num_classes)
        inputs = (token_ids("input_ids", self.vocab_size), mask("attention_mask"))
        causal = not self.bidirectional if tagger else None
        return (Graph(inputs=inputs, outputs=(floats("logits", *dims),), causal=causal),)

    def cost(self) -> Cost:
        """Return the closed-form cost; FLOPs per token exclude a text classifier's head, which runs once per text."""
        ways, gates = (2 if self.bidirectional else 1), GATES[self.cell]
        total = cost.embedding(self.vocab_size, self.embedding_size)
        for layer in range(self.num_layers):
            inputs = self.num_features if layer else self.embedding_size
            total += ways * cost.recurrent(inputs, self.hidden_size, gates=gates)
        head = cost.linear(self.num_features, self.num_classes)
        return total + (head if self.task == "token-classification" else Cost(head.parameters))
