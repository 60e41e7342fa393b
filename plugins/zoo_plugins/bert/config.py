"""Configuration, graphs and cost of BERT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zoo import Activation, Config, Cost, Graph, cost, mask, real, token_ids


@dataclass(frozen=True, kw_only=True)
class BERTConfig(Config):
    """BERT-base by default."""

    task: Literal["feature-extraction", "sentence-embedding", "fill-mask", "pretraining", "text-classification"] = (
        "feature-extraction"
    )
    """Which head sits on the encoder."""
    vocab_size: int = 30522
    """Tokens known."""
    type_vocab_size: int = 2
    """Segment types."""
    max_seq_len: int = 512
    """Positions with a learned embedding."""
    hidden_size: int = 768
    """Width of the encoder."""
    num_layers: int = 12
    """Blocks."""
    num_heads: int = 12
    """Heads a block."""
    intermediate_size: int | None = None
    """Width inside the feed-forward network; 4 x ``hidden_size`` by default."""
    activation: Activation = "gelu"
    """Of the feed-forward network and the masked-language-model head."""
    norm_eps: float = 1e-12
    """Added to the variance in LayerNorm."""
    dropout: float = 0.1
    """On embeddings, attention weights and residuals, in training."""
    pooler: bool = True
    """Whether the encoder has the tanh pooler on its first token."""
    pooling: Literal["cls", "mean"] = "mean"
    """How a sentence embedding pools the tokens."""
    normalize: bool = True
    """Whether a sentence embedding has unit length."""
    tie_embeddings: bool = True
    """Whether the masked-language-model head shares the token embedding."""
    num_classes: int = 2
    """Labels of the sequence classifier."""
    mask_token_id: int | None = None
    """Token to fill in."""

    def __post_init__(self) -> None:
        self.default("intermediate_size", 4 * self.hidden_size)
        self.require_positive(
            "vocab_size", "type_vocab_size", "max_seq_len", "hidden_size", "num_layers", "num_heads",
            "intermediate_size", "norm_eps", "num_classes",
        )  # fmt: skip
        self.require_probability("dropout")
        self.require_divisible("hidden_size", "num_heads")
        if self.task in ("pretraining", "text-classification") and not self.pooler:
            raise ValueError(f"task {self.task!r} reads the pooler, but pooler is {self.pooler}")

    def graphs(self) -> tuple[Graph, ...]:
        """One graph; its outputs follow the task."""
        hidden = real("last_hidden_state", "batch", "sequence", self.hidden_size)
        logits = real("logits", "batch", "sequence", self.vocab_size)
        outputs = {
            "feature-extraction": (
                (hidden, real("pooler_output", "batch", self.hidden_size)) if self.pooler else (hidden,)
            ),
            "sentence-embedding": (real("sentence_embedding", "batch", self.hidden_size), hidden),
            "fill-mask": (logits,),
            "pretraining": (logits, real("next_sentence_logits", "batch", 2)),
            "text-classification": (real("logits", "batch", self.num_classes),),
        }
        inputs = (
            token_ids("input_ids", self.vocab_size),
            mask("attention_mask"),
            token_ids("token_type_ids", self.type_vocab_size),
        )
        return (Graph(inputs=inputs, outputs=outputs[self.task]),)

    def cost(self) -> Cost:
        """Closed form. What runs once a sequence, the pooler and its classifiers, counts no FLOPs."""
        hidden = self.hidden_size
        block = (
            2 * cost.layer_norm(hidden)
            + cost.attention(hidden, self.num_heads, head_dim=hidden // self.num_heads, context=self.max_seq_len)
            + cost.feed_forward(hidden, self.intermediate_size or 0)
        )
        total = (
            cost.embedding(self.vocab_size + self.max_seq_len + self.type_vocab_size, hidden)
            + cost.layer_norm(hidden)
            + self.num_layers * block
        )
        if self.pooler:
            total += Cost(cost.linear(hidden, hidden).parameters)
        if self.task in ("fill-mask", "pretraining"):
            decoder = cost.tied_linear if self.tie_embeddings else lambda i, o: cost.linear(i, o, bias=False)
            total += cost.linear(hidden, hidden) + cost.layer_norm(hidden)
            total += decoder(hidden, self.vocab_size) + Cost(self.vocab_size)
        if self.task in ("pretraining", "text-classification"):
            total += Cost(cost.linear(hidden, 2 if self.task == "pretraining" else self.num_classes).parameters)
        return total
