"""Configuration, graphs and cost of GPT."""

from __future__ import annotations

from dataclasses import dataclass

from zoo import Activation, Cost, Graph, Initializer, Norm, cost, shortest_period
from zoo_plugins.gpt.tasks import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class GPTConfig(DecoderConfig):
    """Configuration of GPT and OPT. The defaults are GPT-2 small."""

    vocab_size: int = 50257
    """Size of the vocabulary."""
    max_seq_len: int = 1024
    """Positions with a learned embedding."""
    position_offset: int = 0
    """Number of the first position in the table, whose earlier rows are unused (OPT)."""
    hidden_size: int = 768
    """Width of the residual stream."""
    embedding_size: int | None = None
    """Width of the token embeddings and of the heads; ``hidden_size`` by default. If they differ, dense layers without
    biases project from one to the other and back (OPT-350M)."""
    num_layers: int = 12
    """Number of blocks."""
    num_heads: int = 12
    """Query heads per block."""
    num_kv_heads: int | None = None
    """Key-value heads per block; ``num_heads`` by default, fewer for grouped-query attention."""
    head_dim: int | None = None
    """Width of one head; ``hidden_size`` / ``num_heads`` by default."""
    intermediate_size: int | None = None
    """Hidden width of the feed-forward network; 4 x ``hidden_size`` by default."""
    activation: Activation = "gelu_tanh"
    """Activation of the feed-forward network."""
    attention_bias: bool | tuple[bool, ...] = True
    """Whether the query, key and value projections have biases: one boolean, or one for each of the three."""
    attention_output_bias: bool = True
    """Whether the output projection of attention has a bias."""
    mlp_bias: bool = True
    """Whether the dense layers of the feed-forward network have biases."""
    attention_scale: float | None = None
    """Factor of the attention scores; 1 / sqrt(``head_dim``) by default."""
    sliding_windows: tuple[int, ...] = (0,)
    """Sliding-window size of each layer, in keys, the query's own included; 0 for no window. The pattern repeats over
    the layers."""
    norm: Norm = "layer"
    """Kind of norm: LayerNorm, or that of The Annotated Transformer; see :func:`zoo.nn.build_norm`."""
    norm_first: bool = True
    """Whether to normalise before each sub-layer and once at the end; otherwise after each one (GPT-1, OPT-350M)."""
    norm_eps: float = 1e-5
    """Added to the variance in LayerNorm, or to the deviation in the annotated norm."""
    norm_bias: bool = True
    """Whether norms have biases."""
    dropout: float = 0.1
    """Dropout on embeddings, attention weights and residuals, during training."""
    tie_embeddings: bool = True
    """Whether the head shares the token embedding."""
    bos_token_id: int | None = None
    """Token that begins a text."""
    eos_token_id: int | tuple[int, ...] | None = None
    """Tokens that end a text."""
    pad_token_id: int | None = None
    """Token that pads shorter texts; the mask excludes it."""
    initializer: Initializer = "normal"
    """Distribution of initial weights: see :func:`zoo.nn.initialize`."""

    def __post_init__(self) -> None:
        self.check_classes(head=self.task == "text-classification")
        self.check_embedding()
        self.default("num_kv_heads", self.num_heads)
        self.default("intermediate_size", 4 * self.hidden_size)
        self.default("embedding_size", self.hidden_size)
        if self.position_offset < 0:
            raise ValueError(f"position_offset must not be negative, got {self.position_offset}")
        self.require_positive(
            "vocab_size", "max_seq_len", "hidden_size", "embedding_size", "num_layers", "num_heads", "num_kv_heads",
            "head_dim", "intermediate_size", "norm_eps", "attention_scale",
        )  # fmt: skip
        self.require_probability("dropout")
        self.require_biases("attention_bias")
        self.require_divisible("num_heads", "num_kv_heads")
        if self.head_dim is None:
            self.require_divisible("hidden_size", "num_heads")
            self.default("head_dim", self.hidden_size // self.num_heads)
        if not self.sliding_windows or min(self.sliding_windows) < 0:
            raise ValueError(f"sliding_windows must be one or more non-negative numbers, got {self.sliding_windows}")
        windows = [self.sliding_windows[layer % len(self.sliding_windows)] for layer in range(self.num_layers)]
        object.__setattr__(self, "sliding_windows", shortest_period(windows))

    @property
    def key_size(self) -> int:
        """``head_dim``, set by ``__post_init__``."""
        return self.head_dim or 0

    @property
    def embedding_width(self) -> int:
        """``embedding_size``, set by ``__post_init__``."""
        return self.embedding_size or 0

    @property
    def position_rows(self) -> int:
        """Rows of the position embedding."""
        return self.max_seq_len + self.position_offset

    def window(self, layer: int) -> int | None:
        """Return the maximum number of keys per query in this layer; None for no limit."""
        return self.sliding_windows[layer % len(self.sliding_windows)] or None

    def graphs(self) -> tuple[Graph, ...]:
        """Declare one graph, for prefill and decoding or for a text as a whole."""
        graph = self.decoder_graph(
            vocab_size=self.vocab_size,
            hidden_size=self.embedding_width,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads or self.num_heads,
            head_dim=self.key_size,
            max_seq_len=self.max_seq_len,
            sliding_windows=self.sliding_windows,
        )
        return (graph,)

    def cost(self) -> Cost:
        """Return the closed-form cost, of one call. Windows save no work in it: scores are computed before masking."""
        norm = cost.layer_norm(self.hidden_size, bias=self.norm_bias)
        block = (
            2 * norm
            + cost.attention(
                self.hidden_size,
                self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.key_size,
                context=self.max_seq_len,
                bias=self.attention_bias,
                output_bias=self.attention_output_bias,
            )
            + cost.feed_forward(self.hidden_size, self.intermediate_size or 0, bias=self.mlp_bias)
        )
        width, hidden = self.embedding_width, self.hidden_size
        projections = 2 * cost.linear(width, hidden, bias=False) if width != hidden else Cost()
        return (
            cost.embedding(self.vocab_size, width)
            + cost.embedding(self.position_rows, hidden)
            + projections
            + self.num_layers * block
            + (norm if self.norm_first else Cost())
            + self.head_cost(width, self.vocab_size, tied=self.tie_embeddings)
        )
