"""Configuration, graph and cost of ESM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from zoo import Cost, EmbeddingConfig, Graph, attentions, cost, floats, mask, token_ids

_BASE = ("feature-extraction", "sentence-embedding")
"""Tasks without a head."""


@dataclass(frozen=True, kw_only=True)
class ESMConfig(EmbeddingConfig):
    """Configuration of ESM-2 and ESM-1b. The defaults are ESM-2 with 8 million parameters."""

    head_fields: ClassVar[tuple[str, ...]] = (*EmbeddingConfig.head_fields, "pooler")
    task: Literal[
        "feature-extraction",
        "sentence-embedding",
        "fill-mask",
        "text-classification",
        "token-classification",
    ] = "feature-extraction"
    """Task, which determines the head on the encoder."""
    vocab_size: int = 33
    """Size of the vocabulary: amino acids and special tokens."""
    max_seq_len: int = 1024
    """Maximum input length, in tokens."""
    positions: Literal["rotary", "learned"] = "rotary"
    """Positions: rotations of queries and keys (ESM-2), or a learned embedding, which skips padding as in RoBERTa:
    the n-th token other than ``pad_token_id`` uses row ``pad_token_id`` + n (ESM-1b)."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_float16: bool = False
    """Whether the rotary frequencies are rounded to float16, as in models that were trained in that precision."""
    hidden_size: int = 320
    """Width of the encoder."""
    num_layers: int = 6
    """Number of blocks."""
    num_heads: int = 20
    """Heads per block."""
    intermediate_size: int | None = None
    """Hidden width of the feed-forward network; 4 x ``hidden_size`` by default."""
    norm_eps: float = 1e-5
    """Added to the variance in LayerNorm."""
    embedding_norm: bool = False
    """Whether the embeddings are normalised (ESM-1b)."""
    dropped_token_id: int | None = None
    """Token that has no embedding: the mask token of models trained with token dropout. The embeddings of the others
    are scaled by (1 - 0.12) / (1 - m), where m is this token's share of the text; 0.12 is that of training. None for no
    such token."""
    dropout: float = 0.0
    """Dropout on attention weights and residuals, during training."""
    pooler: bool | None = None
    """Whether the encoder has a pooler, a dense layer and tanh on its first token, which classifiers of texts read; by
    default only for these."""
    pooling: Literal["cls", "mean", "max", "last", "mean_sqrt_len", "weighted_mean"] = "mean"
    """Pooling of sentence embeddings: see :func:`zoo.nn.pool`."""
    tie_embeddings: bool = True
    """Whether the masked-language-model head shares the token embedding."""
    mask_token_id: int | None = None
    """The mask token, to be filled in."""
    pad_token_id: int | None = None
    """Token that pads shorter inputs of a batch; 0 if unset."""

    def __post_init__(self) -> None:
        self.default("intermediate_size", 4 * self.hidden_size)
        self.default("pooler", self.task == "text-classification")
        self.require_positive(
            "vocab_size", "max_seq_len", "hidden_size", "num_layers", "num_heads", "intermediate_size", "norm_eps",
            "rope_theta",
        )  # fmt: skip
        self.require_probability("dropout")
        self.require_divisible("hidden_size", "num_heads")
        if self.positions == "rotary" and self.head_dim % 2:
            raise ValueError(f"hidden_size / num_heads must be even for rotary positions, got {self.head_dim}")
        if self.positions == "learned" and self.pad_token_id is None:
            raise ValueError("learned positions skip padding and need a pad_token_id, got None")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(f"pad_token_id {self.pad_token_id} lies outside vocab_size {self.vocab_size}")
        if self.dropped_token_id is not None and not 0 <= self.dropped_token_id < self.vocab_size:
            raise ValueError(f"dropped_token_id {self.dropped_token_id} lies outside vocab_size {self.vocab_size}")
        if self.rope_float16 and self.positions != "rotary":
            raise ValueError(f"rope_float16 is for rotary positions, but positions is {self.positions!r}")
        if self.task == "text-classification" and not self.pooler:
            raise ValueError(f"task {self.task!r} reads the pooler, but pooler is {self.pooler}")
        self.check_classes(head=self.task in ("text-classification", "token-classification"))
        self.check_embedding()

    def with_task(self, task: str, values: Mapping[str, Any] | None = None, where: object = None) -> Self:
        """Return this configuration for a task; see :meth:`zoo.Config.with_task`.

        Like the original classes, models for text-classification get a pooler, and others with a head lose theirs.
        """
        changes = dict(values or {})
        if task != self.task:
            changes.setdefault("pooler", self.pooler if task in _BASE else None)
        return super().with_task(task, changes, where)

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads

    @property
    def position_rows(self) -> int:
        """Rows of the position embedding; 0 if positions are rotary."""
        return 0 if self.positions == "rotary" else self.max_seq_len + (self.pad_token_id or 0) + 1

    def graphs(self) -> tuple[Graph, ...]:
        """Declare one graph; its outputs depend on the task. The first token must be real: padding is on the right."""
        hidden = floats("last_hidden_state", "batch", "sequence", self.hidden_size)
        pooled = floats("pooler_output", "batch", self.hidden_size)
        vector = floats("sentence_embedding", "batch", self.vector_size(self.hidden_size))
        outputs = {
            "feature-extraction": (hidden, pooled) if self.pooler else (hidden,),
            "sentence-embedding": (vector, hidden),
            "fill-mask": (floats("logits", "batch", "sequence", self.vocab_size),),
            "text-classification": (floats("logits", "batch", self.num_classes),),
            "token-classification": (floats("logits", "batch", "sequence", self.num_classes),),
        }
        inputs = (token_ids("input_ids", self.vocab_size), mask("attention_mask", padding="right"))
        weights = attentions(self.num_layers, self.num_heads)
        return (Graph(inputs=inputs, outputs=outputs[self.task], attentions=weights, causal=False),)

    def cost(self) -> Cost:
        """Return the closed-form cost. FLOPs per token exclude the pooler and its classifier, which run once."""
        hidden = self.hidden_size
        block = (
            2 * cost.layer_norm(hidden)
            + cost.attention(hidden, self.num_heads, head_dim=self.head_dim, context=self.max_seq_len)
            + cost.feed_forward(hidden, self.intermediate_size or 0)
        )
        norms = 2 if self.embedding_norm else 1
        total = cost.embedding(self.vocab_size + self.position_rows, hidden) + norms * cost.layer_norm(hidden)
        total += self.num_layers * block + self.projection_cost(hidden)
        if self.pooler:
            total += Cost(cost.linear(hidden, hidden).parameters)
        match self.task:
            case "fill-mask":
                total += cost.linear(hidden, hidden) + cost.layer_norm(hidden)
                total += cost.head(hidden, self.vocab_size, tied=self.tie_embeddings) + Cost(self.vocab_size)
            case "text-classification":
                total += Cost(cost.linear(hidden, self.num_classes).parameters)
            case "token-classification":
                total += cost.linear(hidden, self.num_classes)
        return total
