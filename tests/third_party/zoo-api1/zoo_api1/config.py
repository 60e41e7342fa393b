"""Configuration of the decoder."""

from dataclasses import dataclass
from typing import Literal

import zoo
from zoo import cost


@dataclass(frozen=True, kw_only=True)
class Api1Config(zoo.Config):
    """Small enough for a test."""

    task: Literal["text-generation", "feature-extraction"] = "text-generation"
    """Next-token prediction, or the hidden states."""
    vocab_size: int = 260
    """Tokens known."""
    max_seq_len: int = 64
    """Longest text."""
    hidden_size: int = 24
    """Width."""
    num_layers: int = 2
    """Blocks."""
    num_heads: int = 4
    """Heads."""
    num_kv_heads: int | None = None
    """Key-value heads; ``num_heads`` by default."""
    activation: zoo.Activation = "gelu"
    """Of the feed-forward network."""
    dropout: float = 0.0
    """On residuals, in training."""
    bos_token_id: int | None = 257
    """Token that begins a text."""
    eos_token_id: int | tuple[int, ...] | None = 258
    """Token that ends a text."""

    def __post_init__(self) -> None:
        self.default("num_kv_heads", self.num_heads)
        self.require_positive("vocab_size", "max_seq_len", "hidden_size", "num_layers", "num_heads", "num_kv_heads")
        self.require_probability("dropout")
        self.require_divisible("hidden_size", "num_heads")
        self.require_divisible("num_heads", "num_kv_heads")

    def graphs(self) -> tuple[zoo.Graph, ...]:
        ids = zoo.token_ids("input_ids", self.vocab_size)
        if self.task == "feature-extraction":
            hidden = zoo.floats("last_hidden_state", "batch", "sequence", self.hidden_size)
            return (zoo.Graph(inputs=(ids, zoo.mask("attention_mask")), outputs=(hidden,), causal=True),)
        past = zoo.KeyValues(
            name="past_key_values",
            num_layers=self.num_layers,
            num_heads=self.num_kv_heads,
            head_dim=self.hidden_size // self.num_heads,
        )
        mask = zoo.mask("attention_mask", length="past_sequence + sequence", padding="both")
        logits = zoo.TensorSpec(name="logits", dims=("batch", "sequence", self.vocab_size))
        return (zoo.Graph(name="model", method="forward", inputs=(ids, mask), outputs=(logits,), past=past),)

    def cost(self) -> zoo.Cost:
        block = (
            2 * cost.layer_norm(self.hidden_size)
            + cost.attention(
                self.hidden_size,
                self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.hidden_size // self.num_heads,
                context=self.max_seq_len,
                bias=True,
            )
            + cost.feed_forward(self.hidden_size, 4 * self.hidden_size)
        )
        return (
            cost.embedding(self.vocab_size, self.hidden_size)
            + self.num_layers * block
            + cost.layer_norm(self.hidden_size)
            + cost.tied_linear(self.hidden_size, self.vocab_size)
        )
