"""Configuration, graph and cost of the Attention Free Transformer."""

from dataclasses import dataclass
from typing import Literal

import zoo
from zoo import cost


@dataclass(frozen=True, kw_only=True)
class AFTConfig(zoo.Config):
    """Configuration of AFT. The defaults are small enough for a test."""

    task: Literal["text-generation"] = "text-generation"
    """Next-token prediction."""
    vocab_size: int = 260
    """Size of the vocabulary."""
    max_seq_len: int = 96
    """Maximum text length. Each position has a learned embedding and learned biases."""
    hidden_size: int = 48
    """Width of the residual stream."""
    num_layers: int = 2
    """Number of blocks."""
    intermediate_size: int | None = None
    """Hidden width of the feed-forward network; 4 x ``hidden_size`` by default."""
    variant: Literal["full", "local", "simple"] = "local"
    """Which pairs of positions have a bias: all, nearby ones, or none."""
    window: int = 16
    """With ``local``: pairs less than this far apart have a bias."""
    bias_size: int = 8
    """Size of the learned vectors whose product is the bias of a pair (the paper's d')."""
    norm_eps: float = 1e-5
    """Added to the variance in LayerNorm."""
    eos_token_id: int | None = None
    """Token that ends a text."""

    def __post_init__(self):
        self.default("intermediate_size", 4 * self.hidden_size)
        self.require_positive(
            "vocab_size", "max_seq_len", "hidden_size", "num_layers", "intermediate_size", "window", "bias_size",
            "norm_eps",
        )  # fmt: skip

    def graphs(self):
        """Prefill and decoding in one graph. Keys and values are one head of the model's width."""
        sizes = {"vocab_size": self.vocab_size, "num_layers": self.num_layers}
        return (zoo.causal_graph(**sizes, num_kv_heads=1, head_dim=self.hidden_size),)

    def cost(self):
        """Return the closed-form cost. A window saves no work: all biases are computed, then some are masked."""
        hidden, context = self.hidden_size, self.max_seq_len
        block = (
            2 * cost.layer_norm(hidden)
            + 3 * cost.linear(hidden, hidden)
            + zoo.Cost(0, 2 * context * hidden)
            + cost.feed_forward(hidden, self.intermediate_size)
        )
        if self.variant != "simple":
            block += 2 * cost.embedding(context, self.bias_size) + zoo.Cost(0, 2 * context * self.bias_size)
        return (
            cost.embedding(self.vocab_size + context, hidden)
            + self.num_layers * block
            + cost.layer_norm(hidden)
            + cost.tied_linear(hidden, self.vocab_size)
        )
