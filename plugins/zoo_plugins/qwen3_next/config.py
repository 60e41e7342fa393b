"""Configuration, graph and cost of Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zoo import Activation, Config, Cost, Graph, cost, floats, shortest_period
from zoo_plugins.qwen3_next.graph import hybrid_graph, repeated


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(Config):
    """Configuration of Qwen3-Next and Qwen3.5 without experts. The defaults are Qwen3.5 9B."""

    task: Literal["text-generation"] = "text-generation"
    """Logits of the next token."""
    vocab_size: int = 248320
    """Size of the vocabulary."""
    max_seq_len: int = 262144
    """Maximum context length."""
    hidden_size: int = 4096
    """Width of the residual stream."""
    num_layers: int = 32
    """Number of blocks."""
    linear_layers: tuple[bool, ...] = (True, True, True, False)
    """Whether each layer has linear attention, not full attention. The pattern repeats over the layers, which must
    include both kinds."""
    num_heads: int = 16
    """Query heads of a layer with full attention."""
    num_kv_heads: int = 4
    """Key-value heads of a layer with full attention."""
    head_dim: int = 256
    """Width of one head of full attention."""
    rotary_dim: int | None = None
    """Number of leading elements of each head that are rotated; a quarter of ``head_dim`` by default."""
    rope_theta: float = 10000000.0
    """Base of the rotary frequencies."""
    attention_bias: bool = False
    """Whether the projections of full attention have biases."""
    linear_num_heads: int = 32
    """Value heads of a layer with linear attention, each with a state of its own."""
    linear_head_dim: int = 128
    """Width of one value head of linear attention."""
    linear_num_key_heads: int = 16
    """Query and key heads of a layer with linear attention, each shared by consecutive value heads."""
    linear_key_head_dim: int = 128
    """Width of one query or key head of linear attention."""
    kernel_size: int = 4
    """Tokens that the convolution of linear attention reads, the current one included."""
    intermediate_size: int = 12288
    """Hidden width of the feed-forward network."""
    activation: Activation = "silu"
    """Activation after the convolution and of the gate in the feed-forward network. The gates of attention are SiLU in
    linear and the logistic function in full attention."""
    norm_eps: float = 1e-6
    """Epsilon of the RMS norms."""
    dropout: float = 0.0
    """Dropout on the weights of full attention, during training."""
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
            "vocab_size", "max_seq_len", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
            "rope_theta", "linear_num_heads", "linear_head_dim", "linear_num_key_heads", "linear_key_head_dim",
            "intermediate_size", "norm_eps",
        )  # fmt: skip
        self.require_probability("dropout")
        self.require_divisible("num_heads", "num_kv_heads")
        self.require_divisible("linear_num_heads", "linear_num_key_heads")
        self.default("rotary_dim", self.head_dim // 4)
        if self.turned_size % 2 or not 0 < self.turned_size <= self.head_dim:
            raise ValueError(f"rotary_dim must be even and at most head_dim {self.head_dim}, got {self.rotary_dim}")
        if self.kernel_size < 2:
            raise ValueError(f"kernel_size must be 2 or more, got {self.kernel_size}")
        pattern = self.linear_layers
        layers = repeated(pattern, self.num_layers)
        if len(set(layers)) < 2:
            what = f"got {pattern} for num_layers {self.num_layers}"
            raise ValueError(f"linear_layers must have both True and False within the layers, {what}")
        object.__setattr__(self, "linear_layers", shortest_period(layers))

    @property
    def turned_size(self) -> int:
        """``rotary_dim``, set by ``__post_init__``."""
        return self.rotary_dim or 0

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values of all heads of linear attention."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        return 2 * keys + self.linear_num_heads * self.linear_head_dim

    def is_linear(self, layer: int) -> bool:
        """Whether this layer has linear attention."""
        return self.linear_layers[layer % len(self.linear_layers)]

    @property
    def num_linear(self) -> int:
        """Number of layers with linear attention."""
        return sum(map(self.is_linear, range(self.num_layers)))

    @property
    def num_full(self) -> int:
        """Number of layers with full attention."""
        return self.num_layers - self.num_linear

    def graphs(self) -> tuple[Graph, ...]:
        """Declare one graph, whose past has keys and values of full attention and states of linear attention."""
        size = (self.linear_num_heads, self.linear_key_head_dim, self.linear_head_dim)
        graph = hybrid_graph(
            vocab_size=self.vocab_size,
            num_attentions=self.num_full,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            num_states=self.num_linear,
            states=(
                floats("convolution", "batch", self.channels, self.kernel_size - 1),
                floats("recurrence", "batch", *size),
            ),
        )
        return (graph,)

    def has_experts(self, layer: int) -> bool:
        """Whether this layer has experts rather than one feed-forward network."""
        return False

    def feed_forward_cost(self, layer: int) -> Cost:
        """Return the cost of one layer's feed-forward network."""
        return cost.gated_feed_forward(self.hidden_size, self.intermediate_size)

    def cost(self) -> Cost:
        """Return the closed-form cost. The FLOPs of linear attention are those of its equation, step by step."""
        full = cost.attention(
            self.hidden_size,
            self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            context=self.max_seq_len,
            bias=self.attention_bias,
            qk_norm=True,
            output_gate=True,
        )
        linear = cost.delta_rule(
            self.hidden_size,
            self.linear_num_heads,
            head_dim=self.linear_head_dim,
            num_key_heads=self.linear_num_key_heads,
            key_head_dim=self.linear_key_head_dim,
            kernel_size=self.kernel_size,
        )
        norm = cost.rms_norm(self.hidden_size)
        return (
            cost.embedding(self.vocab_size, self.hidden_size)
            + self.num_full * full
            + self.num_linear * linear
            + sum(map(self.feed_forward_cost, range(self.num_layers)), start=Cost())
            + (2 * self.num_layers + 1) * norm
            + cost.head(self.hidden_size, self.vocab_size, tied=self.tie_embeddings)
        )


@dataclass(frozen=True, kw_only=True)
class Qwen3NextMoeConfig(Qwen3NextConfig):
    """Configuration of Qwen3-Next: that of Qwen3.5, and experts. The defaults are Qwen3-Next-80B-A3B."""

    vocab_size: int = 151936
    """Size of the vocabulary."""
    hidden_size: int = 2048
    """Width of the residual stream."""
    num_layers: int = 48
    """Number of blocks."""
    num_kv_heads: int = 2
    """Key-value heads of a layer with full attention."""
    intermediate_size: int = 5120
    """Hidden width of the feed-forward network in layers without experts."""
    expert_layers: tuple[bool, ...] = (True,)
    """Whether each layer has experts rather than one feed-forward network. The pattern repeats over the layers."""
    num_experts: int = 512
    """Number of experts in a layer."""
    experts_per_token: int = 10
    """Number of experts that each token uses, beside the shared one."""
    expert_intermediate_size: int = 512
    """Hidden width of an expert."""
    shared_intermediate_size: int = 512
    """Hidden width of the expert that all tokens use."""
    normalize_routing: bool = True
    """Whether the weights of a token's experts add up to 1; otherwise they are probabilities among all experts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive(
            "num_experts", "experts_per_token", "expert_intermediate_size", "shared_intermediate_size"
        )
        if self.experts_per_token > self.num_experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} is above num_experts {self.num_experts}")
        if not self.expert_layers:
            raise ValueError("expert_layers must be one or more booleans, got ()")
        layers = [self.has_experts(layer) for layer in range(self.num_layers)]
        object.__setattr__(self, "expert_layers", shortest_period(layers))

    def has_experts(self, layer: int) -> bool:
        """Whether this layer has experts rather than one feed-forward network."""
        return self.expert_layers[layer % len(self.expert_layers)]

    def feed_forward_cost(self, layer: int) -> Cost:
        """Return the cost of one layer's experts or feed-forward network."""
        if not self.has_experts(layer):
            return super().feed_forward_cost(layer)
        experts = cost.mixture_of_experts(
            self.hidden_size,
            self.expert_intermediate_size,
            num_experts=self.num_experts,
            top_k=self.experts_per_token,
        )
        shared = cost.gated_feed_forward(self.hidden_size, self.shared_intermediate_size)
        return experts + shared + cost.linear(self.hidden_size, 1, bias=False)
