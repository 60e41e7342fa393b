"""Configuration, graphs and cost of recurrent encoder-decoders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zoo import Config, Cost, Graph, KeyValues, TensorSpec, attentions, cost, mask, real, token_ids

_GATES = {"gru": 3, "lstm": 4}
"""Of each cell, the products of inputs and states that it needs."""


@dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig(Config):
    """RNNsearch by default. LSTMs in one direction, without attention, are the model of Sutskever et al. 2014."""

    task: Literal["text2text-generation"] = "text2text-generation"
    """Sequence to sequence."""
    cell: Literal["gru", "lstm"] = "gru"
    """Cho et al. 2014, or Hochreiter and Schmidhuber 1997."""
    attention: Literal["additive", "dot", "none"] = "additive"
    """How the decoder scores the source at each step: Bahdanau et al. 2015; the product of Luong et al. 2015 with a
    matrix between, which they call general; or not at all: then it knows the source by its first state alone."""
    bidirectional: bool = True
    """Whether each layer of the encoder also reads from the end."""
    vocab_size: int = 30000
    """Tokens known, in source and target."""
    target_vocab_size: int | None = None
    """Tokens known in the target; ``vocab_size`` by default."""
    max_seq_len: int = 50
    """Longest source or target. Nothing in the model is this long: it says what the model was trained for."""
    embedding_size: int = 620
    """Width of an embedding, the paper's m."""
    hidden_size: int = 1000
    """Width of a state, in each direction of the encoder and in the decoder: the paper's n."""
    num_layers: int = 1
    """Layers of the encoder, and of the decoder."""
    attention_size: int | None = None
    """Width in which additive attention compares, the paper's n'; ``hidden_size`` by default."""
    bridge: bool | None = None
    """Whether a dense layer and tanh lead from the encoder's last states to the decoder's first; where there are two
    directions, by default. Without it the states are handed on as they are."""
    maxout_size: int | None = None
    """The paper's l: the logits read the larger of each two of 2 l numbers, made of state, token before and context;
    by default they read state and context themselves."""
    dropout: float = 0.0
    """On embeddings, between layers and before the logits, in training."""
    decoder_start_token_id: int | None = 0
    """First token of every target."""
    eos_token_id: int | tuple[int, ...] | None = None
    """Token, or tokens, that end a target."""
    pad_token_id: int | None = None
    """Token that fills up a batch. Where the mask is 0 no output depends on it."""

    def __post_init__(self) -> None:
        self.default("target_vocab_size", self.vocab_size)
        self.default("attention_size", self.hidden_size)
        self.default("bridge", self.bidirectional)
        self.require_positive(
            "vocab_size", "target_vocab_size", "max_seq_len", "embedding_size", "hidden_size", "num_layers",
            "attention_size", "maxout_size",
        )  # fmt: skip
        self.require_probability("dropout")
        if self.state_size < 2:
            raise ValueError(f"the state of a {self.cell} needs a hidden_size of 2 or more, got {self.hidden_size}")
        if self.bidirectional and not self.bridge:
            raise ValueError(f"bidirectional {self.bidirectional} needs a bridge, got bridge {self.bridge}")
        start, target = self.decoder_start_token_id, self.target_vocab_size
        if start is not None and not 0 <= start < (target or 0):
            raise ValueError(f"decoder_start_token_id {start} lies outside target_vocab_size {target}")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(f"pad_token_id {self.pad_token_id} lies outside vocab_size {self.vocab_size}")

    @property
    def state_size(self) -> int:
        """Numbers that one layer of the decoder keeps: its state, and the cell of an LSTM."""
        return (2 if self.cell == "lstm" else 1) * self.hidden_size

    @property
    def memory_size(self) -> int:
        """What the encoder gives for each source token: a state of each direction."""
        return (2 if self.bidirectional else 1) * self.hidden_size

    @property
    def context_size(self) -> int:
        """What attention gives the decoder at each step."""
        return 0 if self.attention == "none" else self.memory_size

    @property
    def key_size(self) -> int:
        """Width in which attention compares."""
        return (self.attention_size or 0) if self.attention == "additive" else self.hidden_size

    def graphs(self) -> tuple[Graph, ...]:
        """An encoder, which also projects what attention compares with, and a decoder.

        What the decoder keeps is declared as keys and values of one head: halves of a layer's state, after every step
        so far. It reads the last alone, and keeps the others for the law of a past, by which it is checked and run.
        """
        source_mask = mask("attention_mask", length="encoder_sequence")
        state = real("state", "batch", self.num_layers, self.state_size)
        memory: tuple[TensorSpec, ...] = (
            real("last_hidden_state", "batch", "encoder_sequence", self.memory_size),
            real("attention_keys", "batch", "encoder_sequence", self.key_size),
        )
        attended = () if self.attention == "none" else memory
        encoder = Graph(
            name="encoder",
            method="encode",
            inputs=(token_ids("input_ids", self.vocab_size, length="encoder_sequence"), source_mask),
            outputs=(*attended, state),
            causal=not self.bidirectional if attended else None,
        )
        decoder = Graph(
            name="decoder",
            method="decode",
            inputs=(
                token_ids("decoder_input_ids", self.target_vocab_size or 0),
                state,
                *((source_mask, *attended) if attended else ()),
            ),
            outputs=(real("logits", "batch", "sequence", self.target_vocab_size or 0),),
            past=KeyValues(
                name="past_key_values",
                num_layers=self.num_layers,
                num_heads=1,
                head_dim=self.state_size - self.state_size // 2,
                value_head_dim=self.state_size // 2,
            ),
            attentions=attentions(1, 1, keys="encoder_sequence", name="cross_attentions") if attended else (),
        )
        return encoder, decoder

    def cost(self) -> Cost:
        """Closed form. FLOPs are those of one source token and one target token; the bridge runs once a source."""
        hidden, memory, context, gates = self.hidden_size, self.memory_size, self.context_size, _GATES[self.cell]
        target = self.target_vocab_size or 0
        total = cost.embedding(self.vocab_size + target, self.embedding_size)
        for layer in range(self.num_layers):
            ways, inputs = (2 if self.bidirectional else 1), memory if layer else self.embedding_size
            total += ways * cost.recurrent(inputs, hidden, gates=gates)
            total += cost.recurrent(hidden if layer else self.embedding_size + context, hidden, gates=gates)
        if self.bridge:
            total += self.num_layers * Cost(cost.linear(memory // hidden * self.state_size, self.state_size).parameters)
        if self.attention != "none":
            total += Cost(0, 2 * self.max_seq_len * memory)
        if self.attention == "additive":
            total += cost.linear(memory, self.key_size) + cost.linear(hidden, self.key_size, bias=False)
            total += Cost(self.key_size, 2 * self.max_seq_len * self.key_size)
        elif self.attention == "dot":
            total += cost.linear(memory, hidden, bias=False) + Cost(0, 2 * self.max_seq_len * hidden)
        if self.maxout_size is None:
            return total + cost.linear(hidden + context, target)
        deep = cost.linear(hidden + self.embedding_size + context, 2 * self.maxout_size)
        return total + deep + cost.linear(self.maxout_size, target)
