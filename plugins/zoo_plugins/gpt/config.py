"""Configuration, graphs and cost of GPT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zoo import Activation, Config, Cost, Graph, KeyValues, cost, mask, real, token_ids


@dataclass(frozen=True, kw_only=True)
class GPTConfig(Config):
    """GPT-2 small by default."""

    task: Literal["text-generation"] = "text-generation"
    """Next-token prediction."""
    vocab_size: int = 50257
    """Tokens known."""
    max_seq_len: int = 1024
    """Positions with a learned embedding."""
    hidden_size: int = 768
    """Width of the residual stream."""
    num_layers: int = 12
    """Blocks."""
    num_heads: int = 12
    """Query heads a block."""
    num_kv_heads: int | None = None
    """Key-value heads a block; ``num_heads`` unless grouped."""
    intermediate_size: int | None = None
    """Width inside the feed-forward network; 4 x ``hidden_size`` by default."""
    activation: Activation = "gelu_tanh"
    """Of the feed-forward network."""
    norm_eps: float = 1e-5
    """Added to the variance in LayerNorm."""
    dropout: float = 0.1
    """On embeddings, attention weights and residuals, in training."""
    tie_embeddings: bool = True
    """Whether the head shares the token embedding."""
    eos_token_id: int | None = None
    """Token that ends a text."""

    def __post_init__(self) -> None:
        self.default("num_kv_heads", self.num_heads)
        self.default("intermediate_size", 4 * self.hidden_size)
        self.require_positive(
            "vocab_size", "max_seq_len", "hidden_size", "num_layers", "num_heads", "num_kv_heads",
            "intermediate_size", "norm_eps",
        )  # fmt: skip
        self.require_probability("dropout")
        self.require_divisible("hidden_size", "num_heads")
        self.require_divisible("num_heads", "num_kv_heads")

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads

    def graphs(self) -> tuple[Graph, ...]:
        """Prefill and decode in one graph."""
        return (
            Graph(
                inputs=(
                    token_ids("input_ids", self.vocab_size),
                    mask("attention_mask", length="past_sequence + sequence"),
                ),
                outputs=(real("logits", "batch", "sequence", self.vocab_size),),
                past=KeyValues(
                    name="past_key_values",
                    num_layers=self.num_layers,
                    num_heads=self.num_kv_heads or self.num_heads,
                    head_dim=self.head_dim,
                ),
            ),
        )

    def cost(self) -> Cost:
        """Closed form."""
        block = (
            2 * cost.layer_norm(self.hidden_size)
            + cost.attention(
                self.hidden_size,
                self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                context=self.max_seq_len,
            )
            + cost.feed_forward(self.hidden_size, self.intermediate_size or 0)
        )
        head = cost.tied_linear if self.tie_embeddings else lambda i, o: cost.linear(i, o, bias=False)
        return (
            cost.embedding(self.vocab_size + self.max_seq_len, self.hidden_size)
            + self.num_layers * block
            + cost.layer_norm(self.hidden_size)
            + head(self.hidden_size, self.vocab_size)
        )
