"""Configuration, graphs and cost of recurrent encoder-decoders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zoo import Config, Cost, Graph, States, TensorSpec, attentions, cost, floats, mask, token_ids

_GATES = {"gru": 3, "lstm": 4}
"""Gates per cell, each with a product of input and state."""


@dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig(Config):
    """Configuration of recurrent encoder-decoders. The defaults are RNNsearch (Bahdanau et al. 2015).

    Unidirectional LSTMs without attention give the model of Sutskever et al. 2014.
    """

    task: Literal["text2text-generation"] = "text2text-generation"
    """Sequence-to-sequence generation."""
    cell: Literal["gru", "lstm"] = "gru"
    """GRU (Cho et al. 2014) or LSTM (Hochreiter and Schmidhuber 1997)."""
    attention: Literal["additive", "dot", "none"] = "additive"
    """Attention to the source: ``additive`` (Bahdanau et al. 2015); ``dot``, the "general" score of Luong et al. 2015;
    or ``none``, where the source reaches the decoder only through its initial state."""
    bidirectional: bool = True
    """Whether each encoder layer also reads backwards."""
    vocab_size: int = 30000
    """Vocabulary size of the source and, by default, of the target."""
    target_vocab_size: int | None = None
    """Vocabulary size of the target; ``vocab_size`` by default."""
    max_seq_len: int = 50
    """Longest source or target that the model is trained for. No parameter depends on it."""
    embedding_size: int = 620
    """Width of an embedding, the paper's m."""
    hidden_size: int = 1000
    """Width of the decoder's state and of each direction of the encoder's: the paper's n."""
    num_layers: int = 1
    """Layers of the encoder and of the decoder."""
    attention_size: int | None = None
    """Width of the comparison in additive attention, the paper's n'; ``hidden_size`` by default."""
    bridge: bool | None = None
    """Whether a dense layer with tanh maps the encoder's last states to the decoder's initial ones; otherwise they are
    passed unchanged. ``bidirectional`` by default."""
    maxout_size: int | None = None
    """The paper's l: width of a maxout layer over state, previous token and context before the logits. By default the
    logits are computed from state and context directly."""
    dropout: float = 0.0
    """Dropout on embeddings, between layers and before the logits, during training."""
    decoder_start_token_id: int | None = 0
    """First token of every target."""
    eos_token_id: int | tuple[int, ...] | None = None
    """Tokens that end a target."""
    pad_token_id: int | None = None
    """Token that pads the rows of a batch. Outputs do not depend on masked tokens."""

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
            raise ValueError(
                f"the state of cell {self.cell!r} needs a hidden_size of 2 or more, got {self.hidden_size}"
            )
        if self.bidirectional and not self.bridge:
            raise ValueError(f"bidirectional {self.bidirectional} needs a bridge, got bridge {self.bridge}")
        start, target = self.decoder_start_token_id, self.target_vocab_size
        if start is not None and not 0 <= start < (target or 0):
            raise ValueError(f"decoder_start_token_id {start} lies outside target_vocab_size {target}")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(f"pad_token_id {self.pad_token_id} lies outside vocab_size {self.vocab_size}")

    @property
    def state_size(self) -> int:
        """Width of a decoder layer's recurrent state: hidden state, plus the cell state of an LSTM."""
        return (2 if self.cell == "lstm" else 1) * self.hidden_size

    @property
    def memory_size(self) -> int:
        """Width of the encoder's output per source token: one hidden state per direction."""
        return (2 if self.bidirectional else 1) * self.hidden_size

    @property
    def context_size(self) -> int:
        """Width of the context that attention returns at each step; 0 without attention."""
        return 0 if self.attention == "none" else self.memory_size

    @property
    def key_size(self) -> int:
        """Width of the projected memory that attention compares with."""
        return (self.attention_size or 0) if self.attention == "additive" else self.hidden_size

    def graphs(self) -> tuple[Graph, ...]:
        """Declare an encoder, which also projects the attention keys, and a decoder.

        The decoder's past is its recurrent state. At the start of a text, when ``started`` is 0, it is the ``state``
        that the encoder returns.
        """
        source_mask = mask("attention_mask", length="encoder_sequence")
        state = floats("state", "batch", self.num_layers, self.state_size)
        memory: tuple[TensorSpec, ...] = (
            floats("last_hidden_state", "batch", "encoder_sequence", self.memory_size),
            floats("attention_keys", "batch", "encoder_sequence", self.key_size),
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
            outputs=(floats("logits", "batch", "sequence", self.target_vocab_size or 0),),
            past=States(
                num_layers=self.num_layers,
                states=(
                    floats("hidden", "batch", self.state_size),
                    TensorSpec(name="started", dims=("batch", 1), dtype="int64", upper=2),
                ),
            ),
            attentions=attentions(1, 1, keys="encoder_sequence", name="cross_attentions") if attended else (),
        )
        return encoder, decoder

    def cost(self) -> Cost:
        """Return the closed-form cost; FLOPs are for one source and one target token, without the bridge."""
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
