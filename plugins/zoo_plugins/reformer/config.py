"""Configuration, graphs and cost of the Reformer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from zoo import Activation, Config, Cost, Graph, attentions, cost, floats, mask, shortest_period, token_ids


@dataclass(frozen=True, kw_only=True)
class ReformerConfig(Config):
    """Configuration of the Reformer. The defaults are the paper's enwik8 model."""

    task: Literal["feature-extraction", "text-generation"] = "text-generation"
    """Hidden states, or logits of the next token. Generation has no cache, because hashing sorts the whole text."""
    vocab_size: int = 258
    """Size of the vocabulary."""
    max_seq_len: int = 65536
    """Maximum text length, in tokens."""
    hidden_size: int = 1024
    """Width of each of the two residual streams; the output concatenates both."""
    num_layers: int = 12
    """Number of layers."""
    attention_kinds: tuple[Literal["local", "lsh"], ...] = ("local", "local", "lsh", "local")
    """Kind of attention in each layer: to preceding tokens, or to tokens in the same hash bucket. The pattern repeats
    over the layers."""
    num_heads: int = 8
    """Heads per layer."""
    head_dim: int | None = None
    """Width of one head; ``hidden_size`` / ``num_heads`` by default."""
    intermediate_size: int | None = None
    """Hidden width of the feed-forward network; 4 x ``hidden_size`` by default."""
    local_chunk_length: int = 128
    """Tokens per chunk in local attention. A token sees its own chunk and the previous one."""
    lsh_chunk_length: int = 256
    """Tokens per chunk in LSH attention, after sorting by hash."""
    num_hashes: int = 4
    """Number of hash rounds. More rounds make it likelier that similar tokens share a bucket."""
    num_buckets: tuple[int, ...] = (512,)
    """Number of buckets, even, about twice the number of chunks in a text; several numbers give a combined hash."""
    wrap_rounds: bool = False
    """Whether the first chunk of a hash round sees the last chunk of the previous round, as in published
    implementations. The visible tokens then depend on padding."""
    positions: Literal["learned", "axial"] = "axial"
    """One vector per position, or the concatenation of a row vector and a column vector."""
    axial_shape: tuple[int, ...] = (128, 512)
    """Number of rows and of columns."""
    axial_sizes: tuple[int, ...] = (256, 768)
    """Widths of row and column vectors, which add up to ``hidden_size``."""
    activation: Activation = "relu"
    """Activation of the feed-forward network."""
    norm_eps: float = 1e-12
    """Added to the variance in LayerNorm."""
    dropout: float = 0.2
    """Dropout on embeddings, attention weights and residuals, during training."""
    eos_token_id: int | tuple[int, ...] | None = None
    """Tokens that end a text."""
    pad_token_id: int | None = None
    """Token that pads shorter texts; the mask excludes it."""

    def __post_init__(self) -> None:
        self.require_positive("hidden_size", "num_heads", "num_layers", "head_dim")
        if self.head_dim is None:
            self.require_divisible("hidden_size", "num_heads")
            self.default("head_dim", self.hidden_size // self.num_heads)
        self.default("intermediate_size", 4 * self.hidden_size)
        self.require_positive(
            "vocab_size", "max_seq_len", "intermediate_size", "local_chunk_length", "lsh_chunk_length", "num_hashes",
            "norm_eps",
        )  # fmt: skip
        self.require_probability("dropout")
        if not self.attention_kinds:
            raise ValueError("attention_kinds must be one or more of 'local' and 'lsh', got none")
        kinds = [self.attention_kinds[layer % len(self.attention_kinds)] for layer in range(self.num_layers)]
        object.__setattr__(self, "attention_kinds", shortest_period(kinds))
        if not self.num_buckets or any(number < 2 or number % 2 for number in self.num_buckets):
            raise ValueError(f"num_buckets must be even positive numbers, got {self.num_buckets}")
        if self.positions == "axial":
            if (
                len(self.axial_shape) != 2
                or len(self.axial_sizes) != 2
                or min(*self.axial_shape, *self.axial_sizes) < 1
            ):
                raise ValueError(
                    f"axial_shape {self.axial_shape} and axial_sizes {self.axial_sizes} must be two positive numbers "
                    "each"
                )
            if math.prod(self.axial_shape) < self.max_seq_len:
                raise ValueError(f"axial_shape {self.axial_shape} has no room for max_seq_len {self.max_seq_len}")
            if sum(self.axial_sizes) != self.hidden_size:
                raise ValueError(f"axial_sizes {self.axial_sizes} do not add up to hidden_size {self.hidden_size}")

    def kind(self, layer: int) -> Literal["local", "lsh"]:
        """Return the kind of attention in a layer."""
        return self.attention_kinds[layer % len(self.attention_kinds)]

    @property
    def multiple(self) -> int:
        """The model pads texts to a multiple of this length: whole chunks of every kind of attention."""
        lengths = {"local": self.local_chunk_length, "lsh": self.lsh_chunk_length}
        return math.lcm(*(lengths[kind] for kind in self.attention_kinds))

    def graphs(self) -> tuple[Graph, ...]:
        """Declare one graph. It is not causal with LSH layers: later tokens affect which earlier ones are seen."""
        output = floats("logits", "batch", "sequence", self.vocab_size)
        if self.task == "feature-extraction":
            output = floats("last_hidden_state", "batch", "sequence", 2 * self.hidden_size)
        inputs = (token_ids("input_ids", self.vocab_size), mask("attention_mask", padding="right"))
        weights = attentions(self.num_layers, self.num_heads)
        causal = None if "lsh" in self.attention_kinds else True
        return (Graph(inputs=inputs, outputs=(output,), attentions=weights, causal=causal),)

    def cost(self) -> Cost:
        """Return the closed-form cost; FLOPs are per token of the longest text, padded to whole chunks."""
        hidden, width = self.hidden_size, self.num_heads * (self.head_dim or 0)
        project = cost.linear(hidden, width, bias=False)
        pair = 2 * 2 * width  # query-key product, and weight-value product
        local = 3 * project + Cost(0, pair * 2 * self.local_chunk_length)
        rotations = 2 * width * (self.num_hashes * sum(self.num_buckets) // 2)
        lsh = 2 * project + Cost(0, rotations + self.num_hashes * pair * 2 * self.lsh_chunk_length)
        rest = (
            cost.linear(width, hidden, bias=False)
            + cost.feed_forward(hidden, self.intermediate_size or 0)
            + 2 * cost.layer_norm(hidden)
        )
        layers = Cost()
        for layer in range(self.num_layers):
            layers += (local if self.kind(layer) == "local" else lsh) + rest
        embedded = cost.embedding(self.vocab_size, hidden)
        if self.positions == "axial":
            for rows, size in zip(self.axial_shape, self.axial_sizes, strict=True):
                embedded += cost.embedding(rows, size)
        else:
            embedded += cost.embedding(self.max_seq_len, hidden)
        total = embedded + cost.layer_norm(2 * hidden)
        padded = -(-self.max_seq_len // self.multiple) * self.multiple
        total += Cost(layers.parameters, padded * layers.flops // self.max_seq_len)
        if self.task == "text-generation":
            total += cost.linear(2 * hidden, self.vocab_size, bias=False)
        return total
