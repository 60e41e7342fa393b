"""Configuration, graph and cost of LFM2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zoo import Config, Cost, Graph, cost, floats, shortest_period
from zoo_plugins.qwen3_next.graph import hybrid_graph, repeated


@dataclass(frozen=True, kw_only=True)
class Lfm2Config(Config):
    """Configuration of LFM2. The defaults are LFM2 1.2B."""

    task: Literal["text-generation"] = "text-generation"
    """Logits of the next token."""
    vocab_size: int = 65536
    """Size of the vocabulary."""
    max_seq_len: int = 128000
    """Maximum context length."""
    hidden_size: int = 2048
    """Width of the residual stream."""
    num_layers: int = 16
    """Number of blocks."""
    convolution_layers: tuple[bool, ...] = (
        True, True, False, True, True, False, True, True, False, True, False, True, False, True, False, True,
    )  # fmt: skip
    """Whether each layer has a short convolution, not attention. The pattern repeats over the layers, at least one of
    which must have attention."""
    kernel_size: int = 3
    """Tokens that a convolution reads, the current one included."""
    convolution_bias: bool = False
    """Whether the convolutions and the projections around them have biases."""
    num_heads: int = 32
    """Query heads of a layer with attention."""
    num_kv_heads: int = 8
    """Key-value heads of a layer with attention."""
    head_dim: int | None = None
    """Width of one head; ``hidden_size / num_heads`` by default."""
    rope_theta: float = 1000000.0
    """Base of the rotary frequencies."""
    intermediate_size: int = 8192
    """Hidden width of the feed-forward network, whose gate is SiLU."""
    norm_eps: float = 1e-5
    """Epsilon of the RMS norms."""
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
            "intermediate_size", "norm_eps",
        )  # fmt: skip
        self.require_divisible("num_heads", "num_kv_heads")
        if self.head_dim is None:
            self.require_divisible("hidden_size", "num_heads")
            self.default("head_dim", self.hidden_size // self.num_heads)
        if self.key_size < 1 or self.key_size % 2:
            raise ValueError(f"head_dim must be positive and even for rotary positions, got {self.head_dim}")
        if self.kernel_size < 2:
            raise ValueError(f"kernel_size must be 2 or more, got {self.kernel_size}")
        layers = repeated(self.convolution_layers, self.num_layers)
        if all(layers):
            what = f"got {self.convolution_layers} for num_layers {self.num_layers}"
            raise ValueError(f"convolution_layers must have a False within the layers, {what}")
        object.__setattr__(self, "convolution_layers", shortest_period(layers))

    @property
    def key_size(self) -> int:
        """``head_dim``, set by ``__post_init__``."""
        return self.head_dim or 0

    def has_convolution(self, layer: int) -> bool:
        """Whether this layer has a short convolution, not attention."""
        return self.convolution_layers[layer % len(self.convolution_layers)]

    @property
    def num_convolutions(self) -> int:
        """Number of layers with a short convolution."""
        return sum(map(self.has_convolution, range(self.num_layers)))

    @property
    def num_attentions(self) -> int:
        """Number of layers with attention."""
        return self.num_layers - self.num_convolutions

    def graphs(self) -> tuple[Graph, ...]:
        """Declare one graph, whose past has keys and values of attention and the states of the convolutions."""
        graph = hybrid_graph(
            vocab_size=self.vocab_size,
            num_attentions=self.num_attentions,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.key_size,
            num_states=self.num_convolutions,
            states=(floats("convolution", "batch", self.hidden_size, self.kernel_size - 1),),
        )
        return (graph,)

    def cost(self) -> Cost:
        """Return the closed-form cost."""
        attention = cost.attention(
            self.hidden_size,
            self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.key_size,
            context=self.max_seq_len,
            bias=False,
            qk_norm=True,
        )
        convolution = cost.short_convolution(self.hidden_size, kernel_size=self.kernel_size, bias=self.convolution_bias)
        norm = cost.rms_norm(self.hidden_size)
        return (
            cost.embedding(self.vocab_size, self.hidden_size)
            + self.num_attentions * attention
            + self.num_convolutions * convolution
            + self.num_layers * (2 * norm + cost.gated_feed_forward(self.hidden_size, self.intermediate_size))
            + norm
            + cost.head(self.hidden_size, self.vocab_size, tied=self.tie_embeddings)
        )
