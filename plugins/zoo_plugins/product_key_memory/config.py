"""Configuration, graph and cost of a decoder with product-key memories."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zoo import Activation, Config, Cost, Graph, causal_graph, cost


@dataclass(frozen=True, kw_only=True)
class ProductKeyMemoryConfig(Config):
    """Configuration of a decoder with product-key memories. By default 12 layers of width 1,024 with one memory."""

    task: Literal["text-generation"] = "text-generation"
    """Next-token prediction."""
    vocab_size: int = 60000
    """Size of the vocabulary."""
    max_seq_len: int = 512
    """Positions with a learned embedding."""
    hidden_size: int = 1024
    """Width of the residual stream and of the memory's values."""
    num_layers: int = 12
    """Number of blocks."""
    num_heads: int = 16
    """Attention heads per block."""
    intermediate_size: int | None = None
    """Hidden width of the feed-forward network; 4 x ``hidden_size`` by default."""
    activation: Activation = "gelu"
    """Activation of the feed-forward network."""
    memory_layers: tuple[int, ...] | None = None
    """Blocks, counted from 0, with a memory instead of a feed-forward network; by default the last block of the first
    half."""
    memory_keys: int = 512
    """Half-keys per side. Their pairs are the slots: 512 half-keys give 512 x 512 slots."""
    memory_top_k: int = 32
    """Slots that each head reads."""
    memory_heads: int = 4
    """Heads of a memory, each with its own queries and half-keys."""
    memory_query_size: int = 512
    """Width of a memory's queries; each half is compared with half-keys of that width."""
    norm_eps: float = 1e-12
    """Added to the variance in LayerNorm."""
    dropout: float = 0.1
    """Dropout on embeddings, attention weights and sub-layers, during training."""
    tie_embeddings: bool = True
    """Whether the head shares the token embedding."""
    bos_token_id: int | None = None
    """Token that begins a text."""
    eos_token_id: int | tuple[int, ...] | None = None
    """Tokens that end a text."""
    pad_token_id: int | None = None
    """Token that pads shorter texts; the mask excludes it."""

    def __post_init__(self) -> None:
        self.default("intermediate_size", 4 * self.hidden_size)
        self.require_positive(
            "vocab_size", "max_seq_len", "hidden_size", "num_layers", "num_heads", "intermediate_size", "memory_keys",
            "memory_top_k", "memory_heads", "memory_query_size", "norm_eps",
        )  # fmt: skip
        self.default("memory_layers", ((self.num_layers - 1) // 2,))
        self.require_probability("dropout")
        self.require_divisible("hidden_size", "num_heads")
        if self.memory_top_k > self.memory_keys:
            raise ValueError(f"memory_top_k {self.memory_top_k} is above memory_keys {self.memory_keys}")
        if self.memory_query_size % 2:
            raise ValueError(f"memory_query_size must be even, got {self.memory_query_size}")
        layers = self.memory_layers or ()
        if len(set(layers)) < len(layers) or not all(0 <= layer < self.num_layers for layer in layers):
            raise ValueError(
                f"memory_layers {layers} must be different numbers from 0 to {self.num_layers - 1}, since num_layers "
                f"is {self.num_layers}"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    def has_memory(self, layer: int) -> bool:
        """Whether this block has a memory instead of a feed-forward network."""
        return layer in (self.memory_layers or ())

    def graphs(self) -> tuple[Graph, ...]:
        """Declare one graph for prefill and decoding."""
        graph = causal_graph(
            vocab_size=self.vocab_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.head_dim,
        )
        return (graph,)

    def cost(self) -> Cost:
        """Return the closed-form cost."""
        attention = cost.attention(
            self.hidden_size, self.num_heads, head_dim=self.head_dim, context=self.max_seq_len
        ) + 2 * cost.layer_norm(self.hidden_size)
        memory = cost.product_key_memory(
            self.hidden_size,
            num_keys=self.memory_keys,
            top_k=self.memory_top_k,
            num_heads=self.memory_heads,
            query_size=self.memory_query_size,
        )
        memories = len(self.memory_layers or ())
        return (
            cost.embedding(self.vocab_size + self.max_seq_len, self.hidden_size)
            + cost.layer_norm(self.hidden_size)
            + self.num_layers * attention
            + memories * memory
            + (self.num_layers - memories) * cost.feed_forward(self.hidden_size, self.intermediate_size or 0)
            + cost.head(self.hidden_size, self.vocab_size, tied=self.tie_embeddings)
        )
