"""Configuration, graphs and cost of Perceiver IO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zoo import Activation, ClassifierConfig, Cost, Graph, attentions, cost, floats, mask, token_ids


@dataclass(frozen=True, kw_only=True)
class PerceiverConfig(ClassifierConfig):
    """Configuration of Perceiver IO. The defaults are its byte-level language model."""

    task: Literal["fill-mask", "text-classification"] = "fill-mask"
    """Output of the decoder: the token at each position, or the class of the text."""
    vocab_size: int = 262
    """Size of the vocabulary."""
    max_seq_len: int = 2048
    """Maximum input length. Each position has a learned embedding and, for fill-mask, a learned query."""
    positions: Literal["learned", "none"] = "learned"
    """Positions of the input. With ``none`` the model ignores the order of the tokens."""
    embedding_size: int = 768
    """Width of the input, and of the queries for fill-mask."""
    num_latents: int = 256
    """Number of latent vectors, independent of the input length."""
    hidden_size: int = 1280
    """Width of the latents."""
    num_layers: int = 26
    """Number of self-attention blocks."""
    num_repeats: int = 1
    """Number of times the sequence of blocks runs, with shared weights."""
    num_heads: int = 8
    """Heads of each self-attention."""
    head_dim: int = 32
    """Width of a query or key in self-attention."""
    value_head_dim: int | None = None
    """Width of a value in self-attention; ``hidden_size`` / ``num_heads`` by default."""
    intermediate_size: int | None = None
    """Hidden width of the feed-forward networks of the latents; ``hidden_size`` by default."""
    cross_num_heads: int = 8
    """Heads of the cross-attention from latents to the input."""
    cross_head_dim: int = 32
    """Width of a query or key in that cross-attention."""
    cross_value_head_dim: int | None = None
    """Width of a value in that cross-attention; ``hidden_size`` / ``cross_num_heads`` by default."""
    cross_residual: bool = True
    """Whether that cross-attention has a residual connection."""
    decoder_num_heads: int | None = None
    """Heads of the decoder's cross-attention to the latents; by default 8 for fill-mask and 1 for classification."""
    decoder_head_dim: int | None = None
    """Width of a query or key in the decoder and, for classification, of a value; by default 32 for fill-mask and
    ``hidden_size`` for classification. Values for fill-mask are ``embedding_size`` / ``decoder_num_heads`` wide."""
    activation: Activation = "gelu"
    """Activation of the feed-forward networks."""
    norm_eps: float = 1e-5
    """Added to the variance in LayerNorm."""
    dropout: float = 0.1
    """Dropout on attention weights, during training."""
    mask_token_id: int | None = None
    """Token to fill in."""
    pad_token_id: int | None = None
    """Token that pads shorter inputs of a batch; 0 if unset."""

    def __post_init__(self) -> None:
        fills = self.task == "fill-mask"
        self.require_positive("num_heads", "cross_num_heads", "decoder_num_heads", "embedding_size", "hidden_size")
        self.default("intermediate_size", self.hidden_size)
        self.default("decoder_num_heads", 8 if fills else 1)
        self.default("decoder_head_dim", 32 if fills else self.hidden_size)
        for width, heads, size in (
            ("hidden_size", "num_heads", "value_head_dim"),
            ("hidden_size", "cross_num_heads", "cross_value_head_dim"),
        ):
            if getattr(self, size) is None:
                self.require_divisible(width, heads)
                self.default(size, getattr(self, width) // getattr(self, heads))
        if fills:
            self.require_divisible("embedding_size", "decoder_num_heads")
        self.require_positive(
            "vocab_size", "max_seq_len", "num_latents", "num_layers", "num_repeats", "head_dim", "value_head_dim",
            "intermediate_size", "cross_head_dim", "cross_value_head_dim", "decoder_head_dim", "norm_eps",
        )  # fmt: skip
        self.require_probability("dropout")
        self.check_classes(head=not fills)

    @property
    def query_size(self) -> int:
        """Width of the decoder's queries: ``embedding_size`` for fill-mask, ``hidden_size`` for classification."""
        return self.embedding_size if self.task == "fill-mask" else self.hidden_size

    @property
    def num_queries(self) -> int:
        """Number of decoder queries: one per position for fill-mask, a single one for classification."""
        return self.max_seq_len if self.task == "fill-mask" else 1

    @property
    def decoder_value_head_dim(self) -> int:
        """Width of a value in the decoder."""
        if self.task == "fill-mask":
            return self.embedding_size // (self.decoder_num_heads or 1)
        return self.decoder_head_dim or 0

    def graphs(self) -> tuple[Graph, ...]:
        """Declare one graph; its output depends on the task."""
        inputs = (token_ids("input_ids", self.vocab_size), mask("attention_mask", padding="right"))
        fills, latents = self.task == "fill-mask", self.num_latents
        output = (
            floats("logits", "batch", "sequence", self.vocab_size)
            if fills
            else floats("logits", "batch", self.num_classes)
        )
        thinking = self.num_repeats * self.num_layers
        answers, heads = "sequence" if fills else self.num_queries, self.decoder_num_heads or 0
        weights = (
            floats("cross_attentions.0", "batch", self.cross_num_heads, latents, "sequence"),
            *attentions(thinking, self.num_heads, queries=latents, keys=latents),
            floats("cross_attentions.1", "batch", heads, answers, latents),
        )
        return (Graph(inputs=inputs, outputs=(output,), attentions=weights),)

    def cost(self) -> Cost:
        """Return the closed-form cost; FLOPs are per token of the longest input."""
        length, latents, width = self.max_seq_len, self.num_latents, self.hidden_size
        inner = self.intermediate_size or 0
        read = _block(
            (latents, width), (length, self.embedding_size), self.cross_num_heads, self.cross_head_dim,
            self.cross_value_head_dim or 0, inner,
        )  # fmt: skip
        think = _block(
            (latents, width), (latents, width), self.num_heads, self.head_dim, self.value_head_dim or 0, inner
        )
        answer = _block(
            (self.num_queries, self.query_size), (latents, width), self.decoder_num_heads or 0,
            self.decoder_head_dim or 0, self.decoder_value_head_dim, self.query_size,
        )  # fmt: skip
        think_parameters = think.parameters - 2 * width  # self-attention has no separate norm for keys and values
        blocks = Cost(self.num_layers * think_parameters, self.num_layers * self.num_repeats * think.flops)
        embedded = self.vocab_size + (length if self.positions == "learned" else 0)
        total = cost.embedding(embedded, self.embedding_size) + cost.embedding(latents, width)
        total += read + blocks + cost.embedding(self.num_queries, self.query_size) + answer
        if self.task == "fill-mask":
            head = cost.tied_linear(self.embedding_size, self.vocab_size)
            total += Cost(self.vocab_size, length * head.flops)
        else:
            total += cost.linear(width, self.num_classes)
        return Cost(total.parameters, total.flops // length)


def _block(
    queries: tuple[int, int], keys: tuple[int, int], heads: int, head_dim: int, value_head_dim: int, inner: int
) -> Cost:
    """Cost of a block, FLOPs of all its queries. ``queries`` and ``keys`` are pairs of number and width."""
    (num_queries, width), (num_keys, memory) = queries, keys
    key_values = cost.linear(memory, heads * head_dim) + cost.linear(memory, heads * value_head_dim)
    per_query = (
        cost.linear(width, heads * head_dim)
        + cost.linear(heads * value_head_dim, width)
        + cost.feed_forward(width, inner)
        + Cost(0, 2 * num_keys * heads * (head_dim + value_head_dim))
    )
    norms = 2 * cost.layer_norm(width) + cost.layer_norm(memory)
    return Cost(
        key_values.parameters + per_query.parameters + norms.parameters,
        num_keys * key_values.flops + num_queries * per_query.flops,
    )
