"""Configuration, graph and cost of DeBERTa."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from zoo import Activation, Cost, EmbeddingConfig, Graph, attentions, cost, floats, mask, token_ids

_CLASSIFIED = ("text-classification", "token-classification")
"""Tasks with a classifier."""


@dataclass(frozen=True, kw_only=True)
class DeBERTaConfig(EmbeddingConfig):
    """Configuration of DeBERTa-v2 and DeBERTaV3. The defaults are DeBERTaV3-base."""

    head_fields: ClassVar[tuple[str, ...]] = (*EmbeddingConfig.head_fields, "pooler_activation")
    task: Literal[
        "feature-extraction",
        "sentence-embedding",
        "fill-mask",
        "text-classification",
        "token-classification",
        "question-answering",
    ] = "feature-extraction"
    """Task, which determines the head on the encoder."""
    vocab_size: int = 128100
    """Size of the vocabulary."""
    type_vocab_size: int = 0
    """Number of segment types; 0 for none."""
    max_seq_len: int = 512
    """Maximum input length, in tokens."""
    absolute_positions: bool = False
    """Whether a learned embedding of each position is added to that of the token."""
    position_terms: tuple[Literal["c2p", "p2c"], ...] = ("c2p", "p2c")
    """Terms of positions in attention scores: from the content of the query to the position of the key, and from the
    position of the query to the content of the key; see :class:`zoo.nn.DisentangledAttention`. If empty, attention does
    not depend on distances."""
    max_distance: int = 512
    """Distance in tokens, on either side, beyond which all have one embedding."""
    distance_buckets: int = 256
    """Number of embeddings on either side, half of them for ranges of distances that grow logarithmically; see
    :func:`zoo.nn.distance_rows`. If 0, each distance below ``max_distance`` has one."""
    share_projections: bool = True
    """Whether the projections of queries and keys also project the embeddings of distances (DeBERTaV3)."""
    distance_norm: bool = True
    """Whether the embeddings of distances are normalised."""
    hidden_size: int = 768
    """Width of the encoder."""
    embedding_size: int | None = None
    """Width of the embeddings and of the masked-language-model head; ``hidden_size`` by default. If the two differ, a
    dense layer without bias projects the embeddings."""
    num_layers: int = 12
    """Number of blocks."""
    num_heads: int = 12
    """Heads per block."""
    intermediate_size: int | None = None
    """Hidden width of the feed-forward network; 4 x ``hidden_size`` by default."""
    activation: Activation = "gelu"
    """Activation of the feed-forward network and of the masked-language-model head."""
    pooler_activation: Activation = "gelu"
    """Activation of the dense layer on the first token, which classifiers of texts read."""
    norm_eps: float = 1e-7
    """Added to the variance in LayerNorm."""
    dropout: float = 0.1
    """Dropout on embeddings, attention weights and residuals, during training."""
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
        self.default("embedding_size", self.hidden_size)
        self.require_positive(
            "vocab_size", "max_seq_len", "max_distance", "hidden_size", "embedding_size", "num_layers", "num_heads",
            "intermediate_size", "norm_eps",
        )  # fmt: skip
        self.require_probability("dropout")
        self.require_divisible("hidden_size", "num_heads")
        for name in ("type_vocab_size", "distance_buckets"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        self._check_positions()
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(f"pad_token_id {self.pad_token_id} lies outside vocab_size {self.vocab_size}")
        self.check_classes(head=self.task in _CLASSIFIED)
        self.check_embedding()

    def _check_positions(self) -> None:
        """Reject repeated terms, and buckets that do not fit the distances."""
        if len(set(self.position_terms)) < len(self.position_terms):
            raise ValueError(f"position_terms must differ, got {self.position_terms}")
        buckets = self.distance_buckets
        if buckets and (buckets % 2 or buckets < 4):
            raise ValueError(f"distance_buckets must be even and at least 4, or 0 for none, got {buckets}")
        if buckets and self.max_distance <= buckets // 2 + 1:
            values = f"max_distance {self.max_distance} and distance_buckets {buckets}"
            raise ValueError(f"half of the buckets must lie below the last distance but one, got {values}")

    @property
    def position_rows(self) -> int:
        """Rows of the embedding of absolute positions; 0 if there is none."""
        return self.max_seq_len if self.absolute_positions else 0

    @property
    def distance_rows(self) -> int:
        """Rows of the embedding of distances; 0 if there is none."""
        return 2 * (self.distance_buckets or self.max_distance) if self.position_terms else 0

    def graphs(self) -> tuple[Graph, ...]:
        """Declare one graph; its outputs depend on the task. The first token must be real: padding is on the right."""
        hidden = floats("last_hidden_state", "batch", "sequence", self.hidden_size)
        vector = floats("sentence_embedding", "batch", self.vector_size(self.hidden_size))
        outputs = {
            "feature-extraction": (hidden,),
            "sentence-embedding": (vector, hidden),
            "fill-mask": (floats("logits", "batch", "sequence", self.vocab_size),),
            "text-classification": (floats("logits", "batch", self.num_classes),),
            "token-classification": (floats("logits", "batch", "sequence", self.num_classes),),
            "question-answering": tuple(floats(f"{end}_logits", "batch", "sequence") for end in ("start", "end")),
        }
        types = (token_ids("token_type_ids", self.type_vocab_size),) if self.type_vocab_size else ()
        inputs = (token_ids("input_ids", self.vocab_size), mask("attention_mask", padding="right"), *types)
        weights = attentions(self.num_layers, self.num_heads)
        return (Graph(inputs=inputs, outputs=outputs[self.task], attentions=weights, causal=False),)

    def cost(self) -> Cost:
        """Return the closed-form cost.

        FLOPs per token exclude what runs once per batch or text: projections of the embeddings of distances, and the
        classifier of texts with its pooler.
        """
        hidden, width = self.hidden_size, self.embedding_size or 0
        attention = cost.disentangled_attention(
            hidden,
            self.num_heads,
            context=self.max_seq_len,
            rows=self.distance_rows,
            num_terms=len(self.position_terms),
            shared=self.share_projections,
        )
        block = 2 * cost.layer_norm(hidden) + attention + cost.feed_forward(hidden, self.intermediate_size or 0)
        total = cost.embedding(self.vocab_size + self.position_rows + self.type_vocab_size, width)
        total += cost.layer_norm(hidden) + cost.embedding(self.distance_rows, hidden)
        if self.position_terms and self.distance_norm:
            total += cost.layer_norm(hidden)
        if width != hidden:
            total += cost.linear(width, hidden, bias=False)
        total += self.num_layers * block + self.projection_cost(hidden)
        match self.task:
            case "fill-mask":
                total += cost.linear(hidden, width) + cost.layer_norm(width)
                total += cost.head(width, self.vocab_size, tied=self.tie_embeddings) + Cost(self.vocab_size)
            case "text-classification":
                total += Cost(cost.linear(hidden, hidden).parameters + cost.linear(hidden, self.num_classes).parameters)
            case "token-classification":
                total += cost.linear(hidden, self.num_classes)
            case "question-answering":
                total += cost.linear(hidden, 2)
        return total
