"""Configuration, graph and cost of decoders with attention spans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zoo import Activation, Config, Cost, Graph, causal_graph, cost


@dataclass(frozen=True, kw_only=True)
class SpanDecoderConfig(Config):
    """Fields of every decoder with spans: adaptive span and all-attention."""

    task: Literal["text-generation"] = "text-generation"
    """Next-token prediction."""
    vocab_size: int = 260
    """Size of the vocabulary."""
    max_seq_len: int = 1024
    """Longest text that the model is trained for. No parameter depends on it."""
    hidden_size: int = 256
    """Width of the residual stream."""
    num_layers: int = 8
    """Number of blocks."""
    num_heads: int = 4
    """Heads per block."""
    span: int = 1024
    """Maximum number of keys that a query attends to, its own included: the paper's S."""
    span_ramp: int | None = 32
    """Tokens over which attention fades out beyond a learned span: the paper's R. None gives every head the full
    span."""
    initial_span: float = 0.0
    """Initial span of every head, the paper's z, in tokens."""
    span_penalty: float = 2e-6
    """Coefficient of the mean span in the loss: the paper's lambda."""
    norm_eps: float = 1e-5
    """Added to the variance in LayerNorm."""
    dropout: float = 0.0
    """Dropout on attention weights and on sub-layers, during training."""
    tie_embeddings: bool = False
    """Whether the head shares the token embedding."""
    bos_token_id: int | None = None
    """Token that begins a text."""
    eos_token_id: int | tuple[int, ...] | None = None
    """Tokens that end a text."""
    pad_token_id: int | None = None
    """Token that pads shorter texts; the mask excludes it."""

    def __post_init__(self) -> None:
        self.require_positive(
            "vocab_size", "max_seq_len", "hidden_size", "num_layers", "num_heads", "span", "span_ramp", "norm_eps",
        )  # fmt: skip
        self.require_probability("dropout")
        self.require_divisible("hidden_size", "num_heads")
        if not 0 <= self.initial_span <= self.span:
            raise ValueError(f"initial_span {self.initial_span} lies outside 0 ... span {self.span}")
        if self.span_penalty < 0:
            raise ValueError(f"span_penalty must not be negative, got {self.span_penalty}")

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads

    def graph(self, num_memories: int = 0) -> Graph:
        """Declare one graph for prefill and decoding, with ``num_memories`` persistent keys per head."""
        return causal_graph(
            vocab_size=self.vocab_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.head_dim,
            num_memories=num_memories,
        )

    def attention_cost(self, num_memories: int = 0) -> Cost:
        """Cost of one attention layer. Spans save no work, because scores are computed before masking."""
        return cost.span_attention(
            self.hidden_size,
            self.num_heads,
            context=self.max_seq_len,
            adaptive=self.span_ramp is not None,
            num_memories=num_memories,
        )

    def decoder_cost(self, block: Cost) -> Cost:
        """Cost of embeddings, blocks and head."""
        return (
            cost.embedding(self.vocab_size, self.hidden_size)
            + cost.embedding(self.span, self.head_dim)
            + self.num_layers * block
            + cost.head(self.hidden_size, self.vocab_size, tied=self.tie_embeddings)
        )


@dataclass(frozen=True, kw_only=True)
class AdaptiveSpanConfig(SpanDecoderConfig):
    """A decoder whose heads learn their spans. By default a small model of bytes."""

    span_ramp: int = 32
    """Tokens over which attention fades out beyond a head's span: the paper's R."""
    intermediate_size: int | None = None
    """Width of the feed-forward network; 4 x ``hidden_size`` by default."""
    activation: Activation = "relu"
    """Activation of the feed-forward network."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.default("intermediate_size", 4 * self.hidden_size)
        self.require_positive("intermediate_size")

    def graphs(self) -> tuple[Graph, ...]:
        """Declare one graph for prefill and decoding."""
        return (self.graph(),)

    def cost(self) -> Cost:
        """Return the closed-form cost."""
        return self.decoder_cost(
            2 * cost.layer_norm(self.hidden_size)
            + self.attention_cost()
            + cost.feed_forward(self.hidden_size, self.intermediate_size or 0)
        )
