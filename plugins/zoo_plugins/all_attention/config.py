"""Configuration, graph and cost of all-attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zoo import Config, Cost, Graph, causal_graph, cost


@dataclass(frozen=True, kw_only=True)
class AllAttentionConfig(Config):
    """The small model of characters by default."""

    task: Literal["text-generation"] = "text-generation"
    """Next-token prediction."""
    vocab_size: int = 260
    """Tokens known."""
    max_seq_len: int = 1024
    """Longest text. Nothing in the model is this long: it says what the model was trained for."""
    hidden_size: int = 512
    """Width of the residual stream."""
    num_layers: int = 18
    """Blocks."""
    num_heads: int = 8
    """Heads a block."""
    num_memories: int = 1024
    """Persistent vectors a head, seen by every query; none for plain attention."""
    span: int = 1024
    """The most keys that any query sees, its own among them."""
    span_ramp: int | None = None
    """Tokens over which a key fades out behind a span that each head learns (Sukhbaatar et al. 2019a); without it
    every head has the whole span."""
    initial_span: float = 0.0
    """Every learned span at first, in tokens."""
    span_penalty: float = 2e-6
    """What the mean of learned spans is multiplied by in the loss."""
    norm_eps: float = 1e-5
    """Added to the variance in LayerNorm."""
    dropout: float = 0.0
    """On attention weights and sub-layers, in training."""
    tie_embeddings: bool = False
    """Whether the head shares the token embedding."""
    bos_token_id: int | None = None
    """Token that begins a text."""
    eos_token_id: int | tuple[int, ...] | None = None
    """Tokens that end a text."""
    pad_token_id: int | None = None
    """Token that fills up shorter texts, which is masked."""

    def __post_init__(self) -> None:
        self.require_positive(
            "vocab_size", "max_seq_len", "hidden_size", "num_layers", "num_heads", "span", "span_ramp", "norm_eps",
        )  # fmt: skip
        self.require_probability("dropout")
        self.require_divisible("hidden_size", "num_heads")
        if self.num_memories < 0:
            raise ValueError(f"num_memories must not be negative, got {self.num_memories}")
        if not 0 <= self.initial_span <= self.span:
            raise ValueError(f"initial_span {self.initial_span} does not lie within 0 and span {self.span}")
        if self.span_penalty < 0:
            raise ValueError(f"span_penalty must not be negative, got {self.span_penalty}")

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads

    def graphs(self) -> tuple[Graph, ...]:
        """Prefill and decode in one graph."""
        graph = causal_graph(
            vocab_size=self.vocab_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.head_dim,
            num_memories=self.num_memories,
        )
        return (graph,)

    def cost(self) -> Cost:
        """Closed form. A span saves nothing: the products are computed and masked."""
        block = cost.layer_norm(self.hidden_size) + cost.span_attention(
            self.hidden_size,
            self.num_heads,
            context=self.max_seq_len,
            adaptive=self.span_ramp is not None,
            num_memories=self.num_memories,
        )
        return (
            cost.embedding(self.vocab_size, self.hidden_size)
            + cost.embedding(self.span, self.head_dim)
            + self.num_layers * block
            + cost.head(self.hidden_size, self.vocab_size, tied=self.tie_embeddings)
        )
