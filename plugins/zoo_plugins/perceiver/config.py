"""Configuration, graphs and cost of Perceiver IO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zoo import Activation, Config, Cost, Graph, attentions, cost, mask, real, token_ids


@dataclass(frozen=True, kw_only=True)
class PerceiverConfig(Config):
    """The language model on bytes of Perceiver IO by default."""

    task: Literal["fill-mask", "text-classification"] = "fill-mask"
    """What the decoder asks of the latents: each position's token, or the class of the text."""
    vocab_size: int = 262
    """Tokens known."""
    max_seq_len: int = 2048
    """Tokens in the longest input. Each position has a learned embedding, and a query of its own to fill masks."""
    positions: Literal["learned", "none"] = "learned"
    """Positions of the input. Without them it is a set: its order changes nothing."""
    embedding_size: int = 768
    """Width of the input, and of the queries that fill masks."""
    num_latents: int = 256
    """Latent vectors; they are as many however long the input is."""
    hidden_size: int = 1280
    """Width of the latents."""
    num_layers: int = 26
    """Self-attention blocks that have weights of their own."""
    num_repeats: int = 1
    """How often these blocks run, one after the other, with the same weights."""
    num_heads: int = 8
    """Heads of each self-attention."""
    head_dim: int = 32
    """Width of a query or key in self-attention."""
    value_head_dim: int | None = None
    """Width of a value in self-attention; ``hidden_size`` / ``num_heads`` by default."""
    intermediate_size: int | None = None
    """Width inside the feed-forward networks of the latents; ``hidden_size`` by default."""
    cross_num_heads: int = 8
    """Heads of the latents' attention to the input."""
    cross_head_dim: int = 32
    """Width of a query or key there."""
    cross_value_head_dim: int | None = None
    """Width of a value there; ``hidden_size`` / ``cross_num_heads`` by default."""
    cross_residual: bool = True
    """Whether the latents are added to what they make of the input."""
    decoder_num_heads: int | None = None
    """Heads of the queries' attention to the latents; 8 to fill masks and 1 to classify, by default."""
    decoder_head_dim: int | None = None
    """Width of a query, key or value there, but for values to fill masks, which share ``embedding_size``; 32 to fill
    masks and ``hidden_size`` to classify, by default."""
    activation: Activation = "gelu"
    """Of the feed-forward networks."""
    norm_eps: float = 1e-5
    """Added to the variance in LayerNorm."""
    dropout: float = 0.1
    """On attention weights, in training."""
    num_classes: int = 2
    """Classes of a text."""
    labels: tuple[str, ...] = ()
    """Names of the classes, where they have any."""
    mask_token_id: int | None = None
    """Token to fill in."""
    pad_token_id: int | None = None
    """Token that fills up shorter inputs of a batch; 0 where none is named."""

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
            "num_classes",
        )  # fmt: skip
        self.require_probability("dropout")
        if self.labels and len(self.labels) != self.num_classes:
            raise ValueError(f"{len(self.labels)} labels for num_classes {self.num_classes}")

    @property
    def query_size(self) -> int:
        """Width of the decoder's queries, which are of the input to fill masks, and of the latents to classify."""
        return self.embedding_size if self.task == "fill-mask" else self.hidden_size

    @property
    def num_queries(self) -> int:
        """How many queries the decoder has: one a position, or one."""
        return self.max_seq_len if self.task == "fill-mask" else 1

    @property
    def decoder_value_head_dim(self) -> int:
        """Width of a value in the decoder."""
        if self.task == "fill-mask":
            return self.embedding_size // (self.decoder_num_heads or 1)
        return self.decoder_head_dim or 0

    def graphs(self) -> tuple[Graph, ...]:
        """One graph; its output follows the task."""
        inputs = (token_ids("input_ids", self.vocab_size), mask("attention_mask", padding="right"))
        fills, latents = self.task == "fill-mask", self.num_latents
        output = (
            real("logits", "batch", "sequence", self.vocab_size) if fills else real("logits", "batch", self.num_classes)
        )
        thinking = self.num_repeats * self.num_layers
        answers, heads = "sequence" if fills else self.num_queries, self.decoder_num_heads or 0
        weights = (
            real("cross_attentions.0", "batch", self.cross_num_heads, latents, "sequence"),
            *attentions(thinking, self.num_heads, queries=latents, keys=latents),
            real("cross_attentions.1", "batch", heads, answers, latents),
        )
        return (Graph(inputs=inputs, outputs=(output,), attentions=weights),)

    def cost(self) -> Cost:
        """Closed form. The FLOPs are those of a whole pass over the longest input, divided by its tokens."""
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
        think_parameters = think.parameters - 2 * width  # one norm is of queries, keys and values alike
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
    """A block of so many queries of a width that attend to so many keys of another: FLOPs of all of them."""
    (num_queries, width), (num_keys, memory) = queries, keys
    key_values = cost.linear(memory, heads * head_dim) + cost.linear(memory, heads * value_head_dim)
    a_query = (
        cost.linear(width, heads * head_dim)
        + cost.linear(heads * value_head_dim, width)
        + cost.feed_forward(width, inner)
        + Cost(0, 2 * num_keys * heads * (head_dim + value_head_dim))
    )
    norms = 2 * cost.layer_norm(width) + cost.layer_norm(memory)
    return Cost(
        key_values.parameters + a_query.parameters + norms.parameters,
        num_keys * key_values.flops + num_queries * a_query.flops,
    )
