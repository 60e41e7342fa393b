"""Configuration, graph and cost of ModernBERT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zoo import Activation, Cost, EmbeddingConfig, Graph, attentions, cost, floats, mask, shortest_period, token_ids

_WITH_HEAD = ("fill-mask", "text-classification", "token-classification", "question-answering")
"""Tasks whose output layer reads the dense layer of the head."""


@dataclass(frozen=True, kw_only=True)
class ModernBERTConfig(EmbeddingConfig):
    """Configuration of ModernBERT. The defaults are ModernBERT-base."""

    task: Literal[
        "feature-extraction",
        "sentence-embedding",
        "fill-mask",
        "text-classification",
        "token-classification",
        "question-answering",
    ] = "feature-extraction"
    """Task, which determines the head on the encoder."""
    vocab_size: int = 50368
    """Size of the vocabulary."""
    max_seq_len: int = 8192
    """Maximum input length, in tokens."""
    hidden_size: int = 768
    """Width of the encoder."""
    num_layers: int = 22
    """Number of blocks."""
    num_heads: int = 12
    """Heads per block."""
    intermediate_size: int = 1152
    """Hidden width of the gated feed-forward network."""
    activation: Activation = "gelu"
    """Activation of the gate in the feed-forward network."""
    head_activation: Activation | None = None
    """Activation of the head; ``activation`` by default."""
    norm_eps: float = 1e-5
    """Added to the variance in LayerNorm."""
    sliding_windows: tuple[int, ...] = (0, 128, 128)
    """Window of each layer in tokens, half on either side of the query; 0 for all tokens. The pattern repeats over the
    layers."""
    rope_theta: float = 160000.0
    """Base of the rotary frequencies in layers that see all tokens."""
    local_rope_theta: float = 10000.0
    """Base of the rotary frequencies in layers with a window."""
    norm_bias: bool = False
    """Whether norms have biases."""
    attention_bias: bool = False
    """Whether the four projections of attention have biases."""
    mlp_bias: bool = False
    """Whether the feed-forward network has biases."""
    head_bias: bool = False
    """Whether the dense layer of the head has a bias."""
    decoder_bias: bool = True
    """Whether the projection to the vocabulary has a bias."""
    dropout: float = 0.0
    """Dropout on embeddings, attention weights and sub-layers, during training."""
    pooling: Literal["cls", "mean"] = "cls"
    """Pooling of sentence embeddings and of classifiers of texts."""
    tie_embeddings: bool = True
    """Whether the masked-language-model head shares the token embedding."""
    mask_token_id: int | None = None
    """The mask token, to be filled in."""
    pad_token_id: int | None = None
    """Token that pads shorter inputs of a batch; 0 if unset."""

    def __post_init__(self) -> None:
        self.default("head_activation", self.activation)
        self.require_positive(
            "vocab_size", "max_seq_len", "hidden_size", "num_layers", "num_heads", "intermediate_size", "norm_eps",
            "rope_theta", "local_rope_theta",
        )  # fmt: skip
        self.require_probability("dropout")
        self.require_divisible("hidden_size", "num_heads")
        if self.head_dim % 2:
            raise ValueError(f"hidden_size / num_heads must be even for rotary positions, got {self.head_dim}")
        if not self.sliding_windows or any(window < 0 or window % 2 for window in self.sliding_windows):
            raise ValueError(f"sliding_windows must be one or more even numbers, got {self.sliding_windows}")
        windows = [self.sliding_windows[layer % len(self.sliding_windows)] for layer in range(self.num_layers)]
        object.__setattr__(self, "sliding_windows", shortest_period(windows))
        self.check_classes(head=self.task in ("text-classification", "token-classification"))
        self.check_embedding()

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads

    @property
    def has_head(self) -> bool:
        """Whether the task has the dense head."""
        return self.task in _WITH_HEAD

    def window(self, layer: int) -> int | None:
        """Return the window of a layer; None if it sees all tokens."""
        return self.sliding_windows[layer % len(self.sliding_windows)] or None

    def graphs(self) -> tuple[Graph, ...]:
        """Declare one graph; its outputs depend on the task. The first token must be real: padding is on the right."""
        hidden = floats("last_hidden_state", "batch", "sequence", self.hidden_size)
        outputs = {
            "feature-extraction": (hidden,),
            "sentence-embedding": (
                floats("sentence_embedding", "batch", self.vector_size(self.hidden_size)),
                hidden,
            ),
            "fill-mask": (floats("logits", "batch", "sequence", self.vocab_size),),
            "text-classification": (floats("logits", "batch", self.num_classes),),
            "token-classification": (floats("logits", "batch", "sequence", self.num_classes),),
            "question-answering": tuple(floats(f"{end}_logits", "batch", "sequence") for end in ("start", "end")),
        }
        inputs = (token_ids("input_ids", self.vocab_size), mask("attention_mask", padding="right"))
        weights = attentions(self.num_layers, self.num_heads)
        return (Graph(inputs=inputs, outputs=outputs[self.task], attentions=weights, causal=False),)

    def cost(self) -> Cost:
        """Return the closed-form cost. Windows save no work; FLOPs exclude classifiers of texts, which run once."""
        hidden = self.hidden_size
        norm = cost.layer_norm(hidden) if self.norm_bias else cost.rms_norm(hidden)
        block = (
            2 * norm
            + cost.attention(
                hidden, self.num_heads, head_dim=self.head_dim, context=self.max_seq_len, bias=self.attention_bias
            )
            + cost.gated_feed_forward(hidden, self.intermediate_size, bias=self.mlp_bias)
        )
        # The first block does not normalise, but the embeddings and the last states are normalised.
        total = cost.embedding(self.vocab_size, hidden) + self.num_layers * block + norm
        head = cost.linear(hidden, hidden, bias=self.head_bias) + norm
        total += self.projection_cost(hidden)
        match self.task:
            case "fill-mask":
                bias = Cost(self.vocab_size if self.decoder_bias else 0)
                total += head + cost.head(hidden, self.vocab_size, tied=self.tie_embeddings) + bias
            case "text-classification":
                total += Cost((head + cost.linear(hidden, self.num_classes)).parameters)
            case "token-classification":
                total += head + cost.linear(hidden, self.num_classes)
            case "question-answering":
                total += head + cost.linear(hidden, 2)
        return total
