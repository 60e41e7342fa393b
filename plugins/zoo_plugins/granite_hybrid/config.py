"""Configuration, graph and cost of Granite 4 without experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zoo import Activation, Config, Cost, Graph, cost, floats, shortest_period
from zoo_plugins.qwen3_next.graph import hybrid_graph, repeated


@dataclass(frozen=True, kw_only=True)
class GraniteHybridConfig(Config):
    """Configuration of Granite 4 without experts. The defaults are Granite 4.0 H 1B."""

    task: Literal["text-generation"] = "text-generation"
    """Logits of the next token."""
    vocab_size: int = 100352
    """Size of the vocabulary."""
    max_seq_len: int = 131072
    """Maximum context length."""
    hidden_size: int = 1536
    """Width of the residual stream."""
    num_layers: int = 40
    """Number of blocks."""
    state_layers: tuple[bool, ...] = (True, True, True, True, True, False, True, True, True, True)
    """Whether each layer is a state-space layer, not attention. The pattern repeats over the layers, at least one of
    which must have attention."""
    num_heads: int = 12
    """Query heads of a layer with attention."""
    num_kv_heads: int = 4
    """Key-value heads of a layer with attention."""
    rotary: bool = False
    """Whether attention has rotary positions. Otherwise it has none, and only the mask tells earlier from later."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    attention_scale: float = 0.0078125
    """Factor of the scores of attention."""
    attention_bias: bool = False
    """Whether the projections of attention have biases."""
    state_num_heads: int = 48
    """Heads of a state-space layer."""
    state_head_dim: int = 64
    """Width of one head of a state-space layer, the P of Dao and Gu 2024."""
    state_size: int = 128
    """Width of the state of each channel, the N of Dao and Gu 2024."""
    num_groups: int = 1
    """Groups of heads that share the input and output projections of the state, and the groups of the gated norm."""
    kernel_size: int = 4
    """Tokens that the convolution of a state-space layer reads, the current one included."""
    projection_bias: bool = False
    """Whether the dense projections of state-space layers have biases."""
    convolution_bias: bool = True
    """Whether the convolutions have biases."""
    min_step: float = 0.0
    """Smallest step size of the recurrence."""
    max_step: float | None = None
    """Largest step size of the recurrence, if there is a limit."""
    intermediate_size: int = 4096
    """Hidden width of the feed-forward network."""
    activation: Activation = "silu"
    """Activation of the gate in the feed-forward network, and after the convolutions."""
    norm_eps: float = 1e-5
    """Epsilon of the RMS norms."""
    embedding_multiplier: float = 12.0
    """Factor of the token embeddings."""
    residual_multiplier: float = 0.22
    """Factor of what each sub-layer adds to the residual stream."""
    logit_multiplier: float = 0.125
    """Factor of the logits."""
    dropout: float = 0.0
    """Dropout on the weights of attention, during training."""
    tie_embeddings: bool = True
    """Whether the head shares the token embedding."""
    bos_token_id: int | None = None
    """Token that begins a text."""
    eos_token_id: int | tuple[int, ...] | None = None
    """Tokens that end a text."""
    pad_token_id: int | None = None
    """Token that pads shorter texts; the mask excludes it."""

    def __post_init__(self) -> None:
        self.require_positive(
            "vocab_size", "max_seq_len", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "rope_theta",
            "attention_scale", "state_num_heads", "state_head_dim", "state_size", "num_groups", "max_step",
            "intermediate_size", "norm_eps", "embedding_multiplier", "residual_multiplier", "logit_multiplier",
        )  # fmt: skip
        self.require_probability("dropout")
        self.require_divisible("num_heads", "num_kv_heads")
        self.require_divisible("hidden_size", "num_heads")
        self.require_divisible("state_num_heads", "num_groups")
        if self.rotary and self.head_dim % 2:
            raise ValueError(f"heads must have an even width for rotary positions, got {self.head_dim}")
        if self.kernel_size < 2:
            raise ValueError(f"kernel_size must be 2 or more, got {self.kernel_size}")
        if not 0 <= self.min_step <= (self.min_step if self.max_step is None else self.max_step):
            raise ValueError(f"min_step must lie between 0 and max_step {self.max_step}, got {self.min_step}")
        layers = repeated(self.state_layers, self.num_layers)
        if all(layers):
            what = f"got {self.state_layers} for num_layers {self.num_layers}"
            raise ValueError(f"state_layers must have a False within the layers, {what}")
        object.__setattr__(self, "state_layers", shortest_period(layers))

    @property
    def head_dim(self) -> int:
        """Width of one head of attention."""
        return self.hidden_size // self.num_heads

    @property
    def state_width(self) -> int:
        """Width of a state-space layer, over all heads."""
        return self.state_num_heads * self.state_head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: those of all heads, and the two projections of each group's state."""
        return self.state_width + 2 * self.num_groups * self.state_size

    def has_states(self, layer: int) -> bool:
        """Whether this layer is a state-space layer, not attention."""
        return self.state_layers[layer % len(self.state_layers)]

    @property
    def num_states(self) -> int:
        """Number of state-space layers."""
        return sum(map(self.has_states, range(self.num_layers)))

    @property
    def num_attentions(self) -> int:
        """Number of layers with attention."""
        return self.num_layers - self.num_states

    def graphs(self) -> tuple[Graph, ...]:
        """Declare one graph, whose past has keys and values of attention and the states of state-space layers."""
        graph = hybrid_graph(
            vocab_size=self.vocab_size,
            num_attentions=self.num_attentions,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            num_states=self.num_states,
            states=(
                floats("convolution", "batch", self.channels, self.kernel_size - 1),
                floats("recurrence", "batch", self.state_num_heads, self.state_size, self.state_head_dim),
            ),
        )
        return (graph,)

    def cost(self) -> Cost:
        """Return the closed-form cost. The FLOPs of state-space layers are those of the recurrence step by step."""
        attention = cost.attention(
            self.hidden_size,
            self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            context=self.max_seq_len,
            bias=self.attention_bias,
        )
        states = cost.state_space(
            self.hidden_size,
            self.state_width,
            head_dim=self.state_head_dim,
            state_size=self.state_size,
            num_groups=self.num_groups,
            kernel_size=self.kernel_size,
            bias=self.projection_bias,
            convolution_bias=self.convolution_bias,
        )
        norm = cost.rms_norm(self.hidden_size)
        return (
            cost.embedding(self.vocab_size, self.hidden_size)
            + self.num_attentions * attention
            + self.num_states * states
            + self.num_layers * (2 * norm + cost.gated_feed_forward(self.hidden_size, self.intermediate_size))
            + norm
            + cost.head(self.hidden_size, self.vocab_size, tied=self.tie_embeddings)
        )
