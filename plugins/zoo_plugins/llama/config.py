"""Configuration, graphs and cost of Llama, Mistral and Qwen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zoo import Activation, Config, Cost, Graph, causal_graph, cost
from zoo.config import shortest_period


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(Config):
    """Llama 2 7B by default."""

    task: Literal["text-generation"] = "text-generation"
    """Next-token prediction."""
    vocab_size: int = 32000
    """Tokens known."""
    max_seq_len: int = 4096
    """Positions that the model was made for."""
    hidden_size: int = 4096
    """Width of the residual stream."""
    num_layers: int = 32
    """Blocks."""
    num_heads: int = 32
    """Query heads a block."""
    num_kv_heads: int | None = None
    """Key-value heads a block; ``num_heads`` unless grouped."""
    head_dim: int | None = None
    """Width of one head; ``hidden_size`` / ``num_heads`` by default."""
    intermediate_size: int = 11008
    """Width inside the feed-forward network."""
    activation: Activation = "silu"
    """Of the gate of the feed-forward network."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMS norms."""
    rope_theta: float = 10000.0
    """Base of the frequencies of rotary positions."""
    rope_scaling: Literal["none", "linear", "llama3"] = "none"
    """Which frequencies are divided by ``rope_factor``: none, all, or the low ones as in Llama 3.1."""
    rope_factor: float = 1.0
    """How many times longer than in training texts may be."""
    rope_low_turns: float = 1.0
    """With llama3: turns within ``rope_original_length`` below which a frequency is low."""
    rope_high_turns: float = 4.0
    """With llama3: turns above which a frequency stays as it is."""
    rope_original_length: int | None = None
    """With llama3: the longest text of the training before; ``max_seq_len`` by default."""
    attention_bias: bool = False
    """Whether the projections of queries, keys and values have biases."""
    attention_output_bias: bool = False
    """Whether the projection after attention has one."""
    mlp_bias: bool = False
    """Whether the feed-forward network has biases."""
    query_key_norm: bool = False
    """Whether queries and keys have an RMS norm each, head by head, before they are turned."""
    attention_windows: tuple[int, ...] = (0,)
    """How many keys queries see at most, their own and those just before it, in each layer; 0 for all. What there is
    is repeated over the layers."""
    dropout: float = 0.0
    """On attention weights, in training."""
    tie_embeddings: bool = False
    """Whether the head shares the token embedding."""
    bos_token_id: int | None = None
    """Token that begins a text."""
    eos_token_id: int | tuple[int, ...] | None = None
    """Tokens that end a text."""
    pad_token_id: int | None = None
    """Token that fills up shorter texts, which is masked."""

    def __post_init__(self) -> None:
        self.default("num_kv_heads", self.num_heads)
        self.default("rope_original_length", self.max_seq_len)
        self.require_positive(
            "vocab_size", "max_seq_len", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
            "intermediate_size", "norm_eps", "rope_theta", "rope_factor", "rope_low_turns", "rope_original_length",
        )  # fmt: skip
        self.require_probability("dropout")
        self.require_divisible("num_heads", "num_kv_heads")
        if self.head_dim is None:
            self.require_divisible("hidden_size", "num_heads")
            self.default("head_dim", self.hidden_size // self.num_heads)
        if self.key_size % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if self.rope_high_turns <= self.rope_low_turns:
            raise ValueError(
                f"rope_high_turns {self.rope_high_turns} must be more than rope_low_turns {self.rope_low_turns}"
            )
        if not self.attention_windows or min(self.attention_windows) < 0:
            raise ValueError(f"attention_windows must be one or more numbers from 0 on, got {self.attention_windows}")
        windows = [self.attention_windows[layer % len(self.attention_windows)] for layer in range(self.num_layers)]
        object.__setattr__(self, "attention_windows", shortest_period(windows))

    @property
    def key_size(self) -> int:
        """``head_dim``, which is set by now."""
        return self.head_dim or 0

    def window(self, layer: int) -> int | None:
        """How many keys a query of this layer sees at most; None for all."""
        return self.attention_windows[layer % len(self.attention_windows)] or None

    def graphs(self) -> tuple[Graph, ...]:
        """Prefill and decode in one graph."""
        graph = causal_graph(
            vocab_size=self.vocab_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads or self.num_heads,
            head_dim=self.key_size,
        )
        return (graph,)

    def cost(self) -> Cost:
        """Closed form. A window saves nothing: the products are computed and masked."""
        block = (
            2 * cost.rms_norm(self.hidden_size)
            + cost.attention(
                self.hidden_size,
                self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.key_size,
                context=self.max_seq_len,
                bias=self.attention_bias,
                output_bias=self.attention_output_bias,
                query_key_norm=self.query_key_norm,
            )
            + cost.gated_feed_forward(self.hidden_size, self.intermediate_size, bias=self.mlp_bias)
        )
        return (
            cost.embedding(self.vocab_size, self.hidden_size)
            + self.num_layers * block
            + cost.rms_norm(self.hidden_size)
            + cost.head(self.hidden_size, self.vocab_size, tied=self.tie_embeddings)
        )
