"""Configuration, graph and cost of the Attention Free Transformer."""

from dataclasses import dataclass
from typing import Literal

import zoo
from zoo import cost


@dataclass(frozen=True, kw_only=True)
class AFTConfig(zoo.Config):
    """Small enough for a test."""

    task: Literal["text-generation"] = "text-generation"
    """Next-token prediction."""
    vocab_size: int = 260
    """Tokens known."""
    max_seq_len: int = 96
    """Positions with a learned embedding, and with learned biases."""
    hidden_size: int = 48
    """Width."""
    num_layers: int = 2
    """Blocks."""
    intermediate_size: int | None = None
    """Width inside the feed-forward network; 4 x ``hidden_size`` by default."""
    variant: Literal["full", "local", "simple"] = "local"
    """Which pairs of positions have a bias: all of them, those that are near, or none."""
    window: int = 16
    """Of ``local``: a pair has a bias if its positions are less than this apart."""
    bias_size: int = 8
    """The bias of a pair is a product of two learned vectors with as many numbers (the paper's d')."""
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
        """Prefill and decode in one graph. Keys and values are as wide as the model, and have no heads."""
        sizes = {"vocab_size": self.vocab_size, "num_layers": self.num_layers}
        return (zoo.causal_graph(**sizes, num_kv_heads=1, head_dim=self.hidden_size),)

    def cost(self):
        """Closed form. A window saves nothing: all biases are computed, and then some are left out."""
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
