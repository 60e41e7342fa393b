"""Configuration, graph and cost of Mamba-2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zoo import Activation, Config, Cost, Graph, States, cost, floats, mask, token_ids


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(Config):
    """Configuration of Mamba-2. The defaults are the smallest published model, with 130M parameters."""

    task: Literal["text-generation"] = "text-generation"
    """Logits of the next token."""
    vocab_size: int = 50288
    """Size of the vocabulary."""
    max_seq_len: int = 2048
    """Longest text that the model is trained for. No parameter depends on it, nor the size of the past."""
    hidden_size: int = 768
    """Width of the residual stream."""
    num_layers: int = 24
    """Number of blocks."""
    intermediate_size: int | None = None
    """Width of the state-space layer, over all heads; 2 x ``hidden_size`` by default."""
    head_dim: int = 64
    """Width of one head, the paper's P."""
    state_size: int = 128
    """Width of the state of each channel of a head, the paper's N."""
    num_groups: int = 1
    """Groups of heads that share the input and output projections of the state, and the groups of the gated norm."""
    kernel_size: int = 4
    """Tokens that the convolution of a block reads, the current one included."""
    activation: Activation = "silu"
    """Activation after the convolution. The gate's is always SiLU."""
    projection_bias: bool = False
    """Whether the dense layers of a block have biases."""
    convolution_bias: bool = True
    """Whether the convolution has a bias."""
    min_step: float = 0.0
    """Smallest step size of the recurrence."""
    max_step: float | None = None
    """Largest step size of the recurrence, if there is a limit."""
    norm_eps: float = 1e-5
    """Added to the mean of squares in norms."""
    tie_embeddings: bool = True
    """Whether the head shares the token embedding."""
    bos_token_id: int | None = None
    """Token that begins a text."""
    eos_token_id: int | tuple[int, ...] | None = None
    """Tokens that end a text."""
    pad_token_id: int | None = None
    """Token that pads shorter texts; the mask excludes it."""

    def __post_init__(self) -> None:
        self.default("intermediate_size", 2 * self.hidden_size)
        self.require_positive(
            "vocab_size", "max_seq_len", "hidden_size", "num_layers", "intermediate_size", "head_dim", "state_size",
            "num_groups", "max_step", "norm_eps",
        )  # fmt: skip
        self.require_divisible("intermediate_size", "head_dim")
        if self.num_heads % self.num_groups:
            raise ValueError(f"{self.num_heads} heads cannot be divided into num_groups {self.num_groups}")
        if self.kernel_size < 2:
            raise ValueError(f"kernel_size must be 2 or more, got {self.kernel_size}")
        if not 0 <= self.min_step <= (self.min_step if self.max_step is None else self.max_step):
            raise ValueError(f"min_step must lie between 0 and max_step {self.max_step}, got {self.min_step}")

    @property
    def width(self) -> int:
        """``intermediate_size``, set by ``__post_init__``."""
        return self.intermediate_size or 0

    @property
    def num_heads(self) -> int:
        """Number of heads."""
        return self.width // self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: those of all heads, and the two projections of each group's state."""
        return self.width + 2 * self.num_groups * self.state_size

    def graphs(self) -> tuple[Graph, ...]:
        """Declare one graph, whose past are the inputs of the convolutions and the states of the recurrences."""
        states = States(
            num_layers=self.num_layers,
            states=(
                floats("convolution", "batch", self.channels, self.kernel_size - 1),
                floats("recurrence", "batch", self.num_heads, self.state_size, self.head_dim),
            ),
        )
        graph = Graph(
            inputs=(token_ids("input_ids", self.vocab_size), mask("attention_mask", padding="left")),
            outputs=(floats("logits", "batch", "sequence", self.vocab_size),),
            past=states,
        )
        return (graph,)

    def cost(self) -> Cost:
        """Return the closed-form cost. The FLOPs are those of the dense layers, and of the recurrence step by step."""
        norm = cost.rms_norm(self.hidden_size)
        block = norm + cost.state_space(
            self.hidden_size,
            self.width,
            head_dim=self.head_dim,
            state_size=self.state_size,
            num_groups=self.num_groups,
            kernel_size=self.kernel_size,
            bias=self.projection_bias,
            convolution_bias=self.convolution_bias,
        )
        embedding = cost.embedding(self.vocab_size, self.hidden_size)
        head = cost.head(self.hidden_size, self.vocab_size, tied=self.tie_embeddings)
        return embedding + self.num_layers * block + norm + head
