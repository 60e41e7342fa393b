"""Configuration, graph and cost of recurrent classifiers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zoo import Config, Cost, Graph, cost, mask, real, token_ids

GATES = {"gru": 3, "lstm": 4}
"""Of each cell, the product of inputs and states that it needs."""


@dataclass(frozen=True, kw_only=True)
class RNNConfig(Config):
    """A small bidirectional LSTM by default."""

    task: Literal["text-classification", "token-classification"] = "text-classification"
    """The class of a text, or of each of its tokens."""
    cell: Literal["gru", "lstm"] = "lstm"
    """Cho et al. 2014, or Hochreiter and Schmidhuber 1997."""
    bidirectional: bool = True
    """Whether each layer also reads from the end."""
    vocab_size: int = 30000
    """Tokens known."""
    max_seq_len: int = 512
    """Longest text. Nothing in the model is this long."""
    embedding_size: int = 300
    """Width of an embedding."""
    hidden_size: int = 300
    """Width of a state, in each direction."""
    num_layers: int = 1
    """Layers, each of which reads what the one before gives at every token."""
    dropout: float = 0.5
    """On embeddings, between layers and before the classifier, in training."""
    num_classes: int = 2
    """Classes of a text, or of each token."""
    labels: tuple[str, ...] = ()
    """Names of the classes, where they have any."""
    pad_token_id: int | None = None
    """Token that fills up shorter inputs of a batch; 0 where none is named."""

    def __post_init__(self) -> None:
        self.require_positive("vocab_size", "max_seq_len", "embedding_size", "hidden_size", "num_layers", "num_classes")
        self.require_probability("dropout")
        if self.labels and len(self.labels) != self.num_classes:
            raise ValueError(f"{len(self.labels)} labels for num_classes {self.num_classes}")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(f"pad_token_id {self.pad_token_id} lies outside vocab_size {self.vocab_size}")

    @property
    def num_features(self) -> int:
        """What the classifier reads: a state of each direction."""
        return (2 if self.bidirectional else 1) * self.hidden_size

    def graphs(self) -> tuple[Graph, ...]:
        """One graph. Tokens that are classified one by one by a single direction know nothing of what follows."""
        tagger = self.task == "token-classification"
        dims = ("batch", "sequence", self.num_classes) if tagger else ("batch", self.num_classes)
        inputs = (token_ids("input_ids", self.vocab_size), mask("attention_mask"))
        causal = not self.bidirectional if tagger else None
        return (Graph(inputs=inputs, outputs=(real("logits", *dims),), causal=causal),)

    def cost(self) -> Cost:
        """Closed form. The classifier of a text runs once a text and counts no FLOPs."""
        ways, gates = (2 if self.bidirectional else 1), GATES[self.cell]
        total = cost.embedding(self.vocab_size, self.embedding_size)
        for layer in range(self.num_layers):
            inputs = self.num_features if layer else self.embedding_size
            total += ways * cost.recurrent(inputs, self.hidden_size, gates=gates)
        head = cost.linear(self.num_features, self.num_classes)
        return total + (head if self.task == "token-classification" else Cost(head.parameters))
