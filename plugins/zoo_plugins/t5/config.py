"""Configuration, graphs and cost of T5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, Self

from zoo import (
    Activation,
    Cost,
    EmbeddingConfig,
    Graph,
    KeyValues,
    UsageError,
    attentions,
    cost,
    floats,
    mask,
    token_ids,
)

_WITH_DECODER = ("text2text-generation", "text-classification")


@dataclass(frozen=True, kw_only=True)
class T5Config(EmbeddingConfig):
    """Configuration of T5. The defaults are T5-small."""

    task: Literal["text2text-generation", "feature-extraction", "sentence-embedding", "text-classification"] = (
        "text2text-generation"
    )
    """Sequence-to-sequence generation; the hidden states or one vector of the encoder alone; or classes of a text,
    which the decoder reads as its target."""
    pooling: Literal["mean", "last"] = "mean"
    """Pooling of sentence embeddings."""
    vocab_size: int = 32128
    """Size of the vocabulary, shared by source and target."""
    max_seq_len: int = 512
    """Longest source or target that the model is trained for. No parameter depends on it."""
    hidden_size: int = 512
    """Width of the residual stream."""
    num_layers: int = 6
    """Encoder blocks."""
    num_decoder_layers: int | None = None
    """Decoder blocks; ``num_layers`` by default."""
    num_heads: int = 8
    """Heads of each attention."""
    head_dim: int = 64
    """Width of a query, key or value, independent of ``hidden_size``."""
    intermediate_size: int = 2048
    """Hidden width of the feed-forward network."""
    activation: Activation = "relu"
    """Activation of the feed-forward network."""
    gated: bool = False
    """Whether the feed-forward network is a gated linear unit (Shazeer 2020), as in version 1.1 and later."""
    relative_buckets: int = 32
    """Buckets of query-key distances, each with a learned bias per head."""
    relative_max_distance: int = 128
    """Distance from which on all distances share the last bucket."""
    norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""
    dropout: float = 0.1
    """Dropout on embeddings, attention weights, sub-layers and the outputs of both stacks, during training."""
    tie_embeddings: bool = True
    """Whether the head shares the token embedding, as before version 1.1."""
    scale_head: bool | None = None
    """Whether the head's input is divided by the square root of ``hidden_size``; ``tie_embeddings`` by default."""
    pad_token_id: int | None = 0
    """Token that pads the rows of a batch."""
    decoder_start_token_id: int = 0
    """First token of every target."""
    eos_token_id: int | tuple[int, ...] | None = 1
    """Token that ends a target."""

    def __post_init__(self) -> None:
        self.default("num_decoder_layers", self.num_layers)
        self.default("scale_head", self.tie_embeddings)
        self.require_positive(
            "vocab_size", "max_seq_len", "hidden_size", "num_layers", "num_decoder_layers", "num_heads", "head_dim",
            "intermediate_size", "norm_eps",
        )  # fmt: skip
        self.require_probability("dropout")
        self.check_classes(head=self.task == "text-classification")
        self.check_embedding()
        if self.relative_buckets < 4 or self.relative_max_distance <= self.relative_buckets // 2:
            raise ValueError(
                f"relative_buckets {self.relative_buckets} must be 4 or more, and relative_max_distance "
                f"{self.relative_max_distance} more than half of them"
            )
        if not 0 <= self.decoder_start_token_id < self.vocab_size:
            raise ValueError(
                f"decoder_start_token_id {self.decoder_start_token_id} lies outside vocab_size {self.vocab_size}"
            )

    @property
    def has_decoder(self) -> bool:
        """Whether the model has a decoder."""
        return self.task in _WITH_DECODER

    def with_task(self, task: str, values: Mapping[str, Any] | None = None, where: object = None) -> Self:
        """Return this configuration for a task; see :meth:`zoo.Config.with_task`.

        Raises :class:`zoo.UsageError` also if the task needs a decoder and the model has none.
        """
        if task in _WITH_DECODER and not self.has_decoder:
            raise UsageError(f"a model for {self.task} has no decoder, which {task} needs", where)
        return super().with_task(task, values, where)

    def _key_values(self, name: str, length: str) -> KeyValues:
        return KeyValues(
            name=name,
            num_layers=self.num_decoder_layers or self.num_layers,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            length=length,
        )

    def graphs(self) -> tuple[Graph, ...]:
        """Declare one graph or, for generation, an encoder and a decoder whose cross-attention keys it projects."""
        if self.task == "text-classification":
            ids, right = token_ids("input_ids", self.vocab_size), mask("attention_mask", padding="right")
            logits = floats("logits", "batch", self.num_classes)
            return (Graph(inputs=(ids, right), outputs=(logits,), causal=False),)
        if not self.has_decoder:
            vector = floats("sentence_embedding", "batch", self.vector_size(self.hidden_size))
            return (
                Graph(
                    method="encode",
                    inputs=(token_ids("input_ids", self.vocab_size), mask("attention_mask")),
                    outputs=(
                        *((vector,) if self.task == "sentence-embedding" else ()),
                        floats("last_hidden_state", "batch", "sequence", self.hidden_size),
                    ),
                    attentions=attentions(self.num_layers, self.num_heads),
                    causal=False,
                ),
            )
        cross = self._key_values("cross_key_values", "encoder_sequence")
        source_mask = mask("attention_mask", length="encoder_sequence")
        encoder = Graph(
            name="encoder",
            method="encode",
            inputs=(token_ids("input_ids", self.vocab_size, length="encoder_sequence"), source_mask),
            outputs=(floats("last_hidden_state", "batch", "encoder_sequence", self.hidden_size), cross),
            attentions=attentions(self.num_layers, self.num_heads, queries="encoder_sequence", keys="encoder_sequence"),
            causal=False,
        )
        layers, heads = self.num_decoder_layers or self.num_layers, self.num_heads
        self_attentions = attentions(layers, heads, keys="past_sequence + sequence")
        crossing = attentions(layers, heads, keys="encoder_sequence", name="cross_attentions")
        decoder = Graph(
            name="decoder",
            method="decode",
            inputs=(
                token_ids("decoder_input_ids", self.vocab_size),
                mask("decoder_attention_mask", length="past_sequence + sequence"),
                source_mask,
                cross,
            ),
            outputs=(floats("logits", "batch", "sequence", self.vocab_size),),
            past=self._key_values("past_key_values", "past_sequence"),
            attentions=tuple(chain.from_iterable(zip(self_attentions, crossing, strict=True))),
        )
        return encoder, decoder

    def cost(self) -> Cost:
        """Return the closed-form cost; FLOPs are for one source token and one target token."""
        norm = cost.rms_norm(self.hidden_size)
        feed_forward = cost.gated_feed_forward if self.gated else cost.feed_forward
        mlp = feed_forward(self.hidden_size, self.intermediate_size, bias=False)
        attention = cost.attention(
            self.hidden_size, self.num_heads, head_dim=self.head_dim, context=self.max_seq_len, bias=False
        )
        bias = cost.embedding(self.relative_buckets, self.num_heads)
        total = cost.embedding(self.vocab_size, self.hidden_size)
        total += self.num_layers * (attention + mlp + 2 * norm) + bias + norm
        if not self.has_decoder:
            return total + self.projection_cost(self.hidden_size)
        layers = self.num_decoder_layers or self.num_layers
        head = cost.tied_linear(self.hidden_size, self.vocab_size)
        if self.task == "text-classification":  # once per text
            dense = cost.linear(self.hidden_size, self.hidden_size) + cost.linear(self.hidden_size, self.num_classes)
            head = Cost(dense.parameters)
        elif not self.tie_embeddings:
            head = cost.linear(self.hidden_size, self.vocab_size, bias=False)
        return total + layers * (2 * attention + mlp + 3 * norm) + bias + norm + head
