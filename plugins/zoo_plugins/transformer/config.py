"""Configuration, graphs and cost of the encoder-decoder Transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zoo import Activation, Config, Cost, Graph, KeyValues, cost, mask, real, token_ids


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(Config):
    """The base model of the paper by default, at 37,000 tokens."""

    task: Literal["text2text-generation"] = "text2text-generation"
    """Sequence to sequence."""
    vocab_size: int = 37000
    """Tokens known, shared by source and target."""
    max_seq_len: int = 512
    """Longest source or target."""
    hidden_size: int = 512
    """The paper's d_model."""
    num_layers: int = 6
    """Encoder blocks, and as many decoder blocks."""
    num_heads: int = 8
    """Heads of each attention, the paper's h."""
    head_dim: int | None = None
    """Width of a query or key, the paper's d_k; ``hidden_size / num_heads`` by default."""
    value_head_dim: int | None = None
    """Width of a value, the paper's d_v; ``hidden_size / num_heads`` by default."""
    intermediate_size: int | None = None
    """The paper's d_ff; 4 x ``hidden_size`` by default."""
    activation: Activation = "relu"
    """Of the feed-forward network."""
    norm_eps: float = 1e-5
    """Added to the variance in LayerNorm."""
    norm_first: bool = False
    """Normalise before each sub-layer, and once more at the end, instead of after it."""
    attention_bias: bool = False
    """Whether the projections of attention have a bias."""
    positions: Literal["learned", "sinusoidal"] = "sinusoidal"
    """How a token knows where it is."""
    tie_embeddings: bool = True
    """Whether source embedding, target embedding and head are one matrix (section 3.4)."""
    dropout: float = 0.1
    """On embeddings, attention weights and sub-layers, in training."""
    decoder_start_token_id: int = 0
    """First token of every target."""
    eos_token_id: int | None = None
    """Token that ends a target."""

    def __post_init__(self) -> None:
        if self.head_dim is None or self.value_head_dim is None:
            self.require_positive("hidden_size", "num_heads")
            self.require_divisible("hidden_size", "num_heads")
            self.default("head_dim", self.hidden_size // self.num_heads)
            self.default("value_head_dim", self.hidden_size // self.num_heads)
        self.default("intermediate_size", 4 * self.hidden_size)
        self.require_positive(
            "vocab_size", "max_seq_len", "hidden_size", "num_layers", "num_heads", "head_dim", "value_head_dim",
            "intermediate_size", "norm_eps",
        )  # fmt: skip
        self.require_probability("dropout")
        if self.positions == "sinusoidal" and self.hidden_size % 2:
            raise ValueError(f"sinusoidal positions need an even hidden_size, got {self.hidden_size}")
        if not 0 <= self.decoder_start_token_id < self.vocab_size:
            raise ValueError(
                f"decoder_start_token_id {self.decoder_start_token_id} lies outside vocab_size {self.vocab_size}"
            )

    def _key_values(self, name: str, length: str) -> KeyValues:
        return KeyValues(
            name=name,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            head_dim=self.head_dim or 0,
            value_head_dim=self.value_head_dim,
            length=length,
        )

    def graphs(self) -> tuple[Graph, ...]:
        """An encoder, which also projects the keys and values that every decoding step attends to, and a decoder."""
        cross = self._key_values("cross_key_values", "encoder_sequence")
        source_mask = mask("attention_mask", length="encoder_sequence")
        encoder = Graph(
            name="encoder",
            method="encode",
            inputs=(token_ids("input_ids", self.vocab_size, length="encoder_sequence"), source_mask),
            outputs=(real("last_hidden_state", "batch", "encoder_sequence", self.hidden_size), cross),
        )
        decoder = Graph(
            name="decoder",
            method="decode",
            inputs=(
                token_ids("decoder_input_ids", self.vocab_size),
                mask("decoder_attention_mask", length="past_sequence + sequence"),
                source_mask,
                cross,
            ),
            outputs=(real("logits", "batch", "sequence", self.vocab_size),),
            past=self._key_values("past_key_values", "past_sequence"),
        )
        return encoder, decoder

    def cost(self) -> Cost:
        """Closed form. FLOPs are those of one source token and one target token."""
        hidden = self.hidden_size
        norm = cost.layer_norm(hidden)
        attention = cost.attention(
            hidden,
            self.num_heads,
            head_dim=self.head_dim or 0,
            value_head_dim=self.value_head_dim,
            context=self.max_seq_len,
            bias=self.attention_bias,
        )
        mlp = cost.feed_forward(hidden, self.intermediate_size or 0)
        total = self.num_layers * ((attention + mlp + 2 * norm) + (2 * attention + mlp + 3 * norm))
        if self.norm_first:
            total += 2 * norm
        if self.positions == "learned":
            total += 2 * cost.embedding(self.max_seq_len, hidden)
        total += cost.embedding(self.vocab_size, hidden) + cost.tied_linear(hidden, self.vocab_size)
        return total if self.tie_embeddings else total + 2 * cost.embedding(self.vocab_size, hidden)
