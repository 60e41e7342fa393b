"""Configuration, graphs and cost of the encoder-decoder Transformer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Literal, Self

from zoo import (
    Activation,
    ClassifierConfig,
    Cost,
    Graph,
    Initializer,
    KeyValues,
    Norm,
    UsageError,
    attentions,
    cost,
    floats,
    mask,
    token_ids,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """Sizes of the encoder or of the decoder."""

    vocab_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    value_head_dim: int
    intermediate_size: int


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(ClassifierConfig):
    """Configuration of the Transformer. The defaults are the paper's base model with 37,000 tokens.

    It also covers BART, mBART, M2M100, Marian and models built with ``torch.nn.Transformer``.
    """

    head_fields: ClassVar[tuple[str, ...]] = (*ClassifierConfig.head_fields, "pooling", "normalize", "head_bias")

    task: Literal["text2text-generation", "text-classification", "sentence-embedding", "vector-feature-extraction"] = (
        "text2text-generation"
    )
    """Sequence-to-sequence generation; classes of a text, which the decoder reads as its target; one vector of the
    encoder alone; or the last states for sequences of vectors, without embeddings, positions and head, as
    ``torch.nn.Transformer`` computes them."""
    pooling: Literal["mean", "last", "cls"] = "mean"
    """Pooling of sentence embeddings."""
    normalize: bool = True
    """Whether sentence embeddings are scaled to unit length."""
    vocab_size: int = 37000
    """Vocabulary size of the source and, by default, of the target; 0 for vectors."""
    target_vocab_size: int | None = None
    """Vocabulary size of the target; ``vocab_size`` by default."""
    max_seq_len: int = 512
    """Longest source or target."""
    hidden_size: int = 512
    """The paper's d_model."""
    num_layers: int = 6
    """Encoder blocks."""
    num_decoder_layers: int | None = None
    """Decoder blocks; ``num_layers`` by default. With 0, a model of vectors is an encoder alone."""
    num_heads: int = 8
    """Heads of each attention, the paper's h."""
    num_decoder_heads: int | None = None
    """Heads of each attention in the decoder, ``num_heads`` by default. If the number differs from the encoder's, a
    head is ``hidden_size / num_decoder_heads`` wide."""
    head_dim: int | None = None
    """Width of a query or key, the paper's d_k; ``hidden_size / num_heads`` by default."""
    value_head_dim: int | None = None
    """Width of a value, the paper's d_v; ``hidden_size / num_heads`` by default."""
    intermediate_size: int | None = None
    """The paper's d_ff; 4 x ``hidden_size`` by default."""
    decoder_intermediate_size: int | None = None
    """The decoder's d_ff; ``intermediate_size`` by default."""
    activation: Activation = "relu"
    """Activation of the feed-forward network."""
    norm: Norm = "layer"
    """Kind of norm: LayerNorm, or that of The Annotated Transformer; see :func:`zoo.nn.build_norm`."""
    norm_eps: float = 1e-5
    """Added to the variance in LayerNorm, or to the deviation in the annotated norm."""
    norm_bias: bool = True
    """Whether norms have biases."""
    norm_first: bool = False
    """Whether to normalise before each sub-layer instead of after it."""
    final_norm: bool | None = None
    """Whether encoder and decoder end with a norm; same as ``norm_first`` by default."""
    embedding_norm: bool = False
    """Whether encoder and decoder begin with a norm."""
    attention_bias: bool | tuple[bool, ...] = False
    """Whether the query, key and value projections have biases: one boolean, or one for each of the three."""
    attention_output_bias: bool | None = None
    """Whether the output projections of attention have biases; by default, if the query projections have."""
    mlp_bias: bool = True
    """Whether the dense layers of the feed-forward networks have biases."""
    positions: Literal["learned", "sinusoidal", "sinusoidal-halves", "sinusoidal-tensor2tensor"] = "sinusoidal"
    """Kind of positions. With ``sinusoidal-halves`` all sines come before all cosines instead of alternating;
    ``sinusoidal-tensor2tensor`` also has other frequencies: see :class:`zoo.nn.TensorToTensorPositions`."""
    position_offset: int = 0
    """Number of the first position in a table of learned positions, whose earlier rows are unused, or in
    ``sinusoidal-tensor2tensor``."""
    scale_embeddings: bool = True
    """Whether token embeddings are multiplied by the square root of ``hidden_size`` (section 3.4)."""
    tie_embeddings: bool = True
    """Whether the target embedding and the head share their weights (section 3.4)."""
    share_embeddings: bool | None = None
    """Whether the source and target embeddings share their weights; by default same as ``tie_embeddings`` if there is
    one vocabulary."""
    head_bias: bool = False
    """Whether the projection to the vocabulary has a bias."""
    dropout: float = 0.1
    """Dropout on embeddings, attention weights and sub-layers, during training."""
    decoder_start_token_id: int | None = 0
    """First token of every target; None if it differs between targets, such as a language code."""
    eos_token_id: int | tuple[int, ...] | None = None
    """Tokens that end a target."""
    pad_token_id: int | None = None
    """Token that pads the rows of a batch. Outputs do not depend on masked tokens."""
    initializer: Initializer = "xavier_uniform"
    """Distribution of initial weights: see :func:`zoo.nn.initialize`."""

    def __post_init__(self) -> None:
        if self.head_dim is None or self.value_head_dim is None:
            self.require_positive("hidden_size", "num_heads")
            self.require_divisible("hidden_size", "num_heads")
            self.default("head_dim", self.hidden_size // self.num_heads)
            self.default("value_head_dim", self.hidden_size // self.num_heads)
        self.default("intermediate_size", 4 * self.hidden_size)
        self.default("final_norm", self.norm_first)
        for name, source in (
            ("target_vocab_size", "vocab_size"),
            ("num_decoder_layers", "num_layers"),
            ("num_decoder_heads", "num_heads"),
            ("decoder_intermediate_size", "intermediate_size"),
        ):
            self.default(name, getattr(self, source))
        self.require_biases("attention_bias")
        biases = self.attention_bias
        self.default("attention_output_bias", biases if isinstance(biases, bool) else biases[0])
        self.default("share_embeddings", self.tie_embeddings and self.target_vocab_size == self.vocab_size)
        self.require_positive(
            "max_seq_len", "hidden_size", "num_layers", "num_heads", "num_decoder_heads", "head_dim", "value_head_dim",
            "intermediate_size", "decoder_intermediate_size", "norm_eps",
        )  # fmt: skip
        self._check_vectors()
        if self.num_decoder_heads != self.num_heads:
            self.require_divisible("hidden_size", "num_decoder_heads")
        self.require_probability("dropout")
        self.check_classes(head=self.task == "text-classification")
        if self.positions != "learned" and self.hidden_size % 2:
            raise ValueError(f"sinusoidal positions need an even hidden_size, got {self.hidden_size}")
        if self.position_offset < 0:
            raise ValueError(f"position_offset must not be negative, got {self.position_offset}")
        if self.positions == "sinusoidal-tensor2tensor" and self.hidden_size < 4:
            raise ValueError(f"positions {self.positions!r} need a hidden_size of at least 4, got {self.hidden_size}")
        if self.position_offset and self.positions in ("sinusoidal", "sinusoidal-halves"):
            raise ValueError(f"position_offset {self.position_offset} is for learned positions, not {self.positions}")
        target, start = self.decoder.vocab_size, self.decoder_start_token_id
        if self.share_embeddings and target != self.vocab_size:
            raise ValueError(
                f"share_embeddings needs one vocabulary, got vocab_size {self.vocab_size} and"
                f" target_vocab_size {target}"
            )
        if not self.reads_vectors and start is not None and not 0 <= start < target:
            name = "vocab_size" if target == self.vocab_size else "target_vocab_size"
            raise ValueError(f"decoder_start_token_id {start} lies outside {name} {target}")

    def _check_vectors(self) -> None:
        """Require a vocabulary and a decoder, unless the model reads vectors."""
        if not self.reads_vectors:
            self.require_positive("vocab_size", "target_vocab_size", "num_decoder_layers")
        elif self.vocab_size or self.target_vocab_size:
            raise ValueError(f"task {self.task!r} has no vocabulary, but vocab_size is {self.vocab_size}: set it to 0")
        elif (self.num_decoder_layers or 0) < 0:
            raise ValueError(f"num_decoder_layers must not be negative, got {self.num_decoder_layers}")

    @property
    def reads_vectors(self) -> bool:
        """Whether the inputs are vectors, not tokens."""
        return self.task == "vector-feature-extraction"

    @property
    def has_decoder(self) -> bool:
        """Whether the model has a decoder."""
        return self.task != "sentence-embedding" and self.num_decoder_layers != 0

    def with_task(self, task: str, values: Mapping[str, Any] | None = None, where: object = None) -> Self:
        """Return this configuration for a task; see :meth:`zoo.Config.with_task`.

        Raises :class:`zoo.UsageError` also if the task needs a decoder and the model has none.
        """
        if self.reads_vectors != (task == "vector-feature-extraction"):
            raise UsageError(f"a model for {self.task} cannot become one for {task}: only one has embeddings", where)
        if task in ("text2text-generation", "text-classification") and not self.has_decoder:
            raise UsageError(f"a model for {self.task} has no decoder, which {task} needs", where)
        changes = dict(values or {})
        if task != self.task:
            changes.setdefault("head_bias", False)
        return super().with_task(task, changes, where)

    @property
    def encoder(self) -> Stack:
        """Sizes of the encoder."""
        return Stack(
            vocab_size=self.vocab_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            head_dim=self.head_dim or 0,
            value_head_dim=self.value_head_dim or 0,
            intermediate_size=self.intermediate_size or 0,
        )

    @property
    def decoder(self) -> Stack:
        """Sizes of the decoder."""
        heads = self.num_decoder_heads or 0
        width = None if heads == self.num_heads else self.hidden_size // heads
        return Stack(
            vocab_size=self.target_vocab_size or 0,
            num_layers=self.num_decoder_layers or 0,
            num_heads=heads,
            head_dim=width or self.head_dim or 0,
            value_head_dim=width or self.value_head_dim or 0,
            intermediate_size=self.decoder_intermediate_size or 0,
        )

    @property
    def position_rows(self) -> int:
        """Rows of each table of positions."""
        return self.max_seq_len + self.position_offset if self.positions == "learned" else 0

    def _key_values(self, name: str, length: str) -> KeyValues:
        decoder = self.decoder
        return KeyValues(
            name=name,
            num_layers=decoder.num_layers,
            num_heads=decoder.num_heads,
            head_dim=decoder.head_dim,
            value_head_dim=decoder.value_head_dim,
            length=length,
        )

    def graphs(self) -> tuple[Graph, ...]:
        """Declare one graph or, for generation, an encoder that also projects the keys and values for cross-attention,
        and a decoder."""
        if self.reads_vectors:
            return (self._vector_graph(),)
        if self.task != "text2text-generation":
            return (self._whole_graph(),)
        cross = self._key_values("cross_key_values", "encoder_sequence")
        source_mask = mask("attention_mask", length="encoder_sequence")
        encoder = Graph(
            name="encoder",
            method="encode",
            inputs=(token_ids("input_ids", self.vocab_size, length="encoder_sequence"), source_mask),
            outputs=(floats("last_hidden_state", "batch", "encoder_sequence", self.hidden_size), cross),
            attentions=attentions(
                self.encoder.num_layers, self.encoder.num_heads, queries="encoder_sequence", keys="encoder_sequence"
            ),
            causal=False,
        )
        layers, heads = self.decoder.num_layers, self.decoder.num_heads
        self_attentions = attentions(layers, heads, keys="past_sequence + sequence")
        crossing = attentions(layers, heads, keys="encoder_sequence", name="cross_attentions")
        decoder = Graph(
            name="decoder",
            method="decode",
            inputs=(
                token_ids("decoder_input_ids", self.decoder.vocab_size),
                mask("decoder_attention_mask", length="past_sequence + sequence"),
                source_mask,
                cross,
            ),
            outputs=(floats("logits", "batch", "sequence", self.decoder.vocab_size),),
            past=self._key_values("past_key_values", "past_sequence"),
            attentions=tuple(chain.from_iterable(zip(self_attentions, crossing, strict=True))),
        )
        return encoder, decoder

    def _vector_graph(self) -> Graph:
        """Declare the graph of a model that reads vectors."""
        source = "encoder_sequence" if self.has_decoder else "sequence"
        encoder, decoder = self.encoder, self.decoder
        inputs = [floats("inputs_embeds", "batch", source, self.hidden_size), mask("attention_mask", length=source)]
        weights = attentions(encoder.num_layers, encoder.num_heads, queries=source, keys=source)
        if self.has_decoder:
            vectors = floats("decoder_inputs_embeds", "batch", "sequence", self.hidden_size)
            inputs += [vectors, mask("decoder_attention_mask")]
            layers, heads = decoder.num_layers, decoder.num_heads
            self_attentions = attentions(layers, heads, name="decoder_attentions")
            crossing = attentions(layers, heads, keys=source, name="cross_attentions")
            weights += tuple(chain.from_iterable(zip(self_attentions, crossing, strict=True)))
        return Graph(
            method="transform",
            inputs=tuple(inputs),
            outputs=(floats("last_hidden_state", "batch", "sequence", self.hidden_size),),
            attentions=weights,
            causal=self.has_decoder,
        )

    def _whole_graph(self) -> Graph:
        """Declare the graph of a task that reads a text as a whole."""
        ids = token_ids("input_ids", self.vocab_size)
        if self.task == "text-classification":
            logits = floats("logits", "batch", self.num_classes)
            return Graph(inputs=(ids, mask("attention_mask", padding="right")), outputs=(logits,), causal=False)
        return Graph(
            method="encode",
            inputs=(ids, mask("attention_mask")),
            outputs=(
                floats("sentence_embedding", "batch", self.hidden_size),
                floats("last_hidden_state", "batch", "sequence", self.hidden_size),
            ),
            attentions=attentions(self.encoder.num_layers, self.encoder.num_heads),
            causal=False,
        )

    def cost(self) -> Cost:
        """Return the closed-form cost; FLOPs are for one source token and one target token."""
        hidden, source, target = self.hidden_size, self.encoder, self.decoder
        norm, positions = cost.layer_norm(hidden, bias=self.norm_bias), cost.embedding(self.position_rows, hidden)
        words, target_words = (cost.embedding(stack.vocab_size, hidden) for stack in (source, target))
        total = source.num_layers * (self._attention(source) + self._feed_forward(source) + 2 * norm)
        decoder = target.num_layers * (2 * self._attention(target) + self._feed_forward(target) + 3 * norm)
        if self.reads_vectors:
            norms = (2 if self.has_decoder else 1) if self.final_norm else 0
            return total + decoder + norms * norm
        if not self.has_decoder:
            norms = self.embedding_norm + bool(self.final_norm)
            return total + positions + words + norms * norm
        total += decoder
        generates = self.task == "text2text-generation"
        if generates:
            total += cost.tied_linear(hidden, target.vocab_size)
        else:  # once per text
            total += Cost((cost.linear(hidden, hidden) + cost.linear(hidden, self.num_classes)).parameters)
        total += 2 * positions + words
        for present, extra in (
            (self.embedding_norm, 2 * norm),
            (self.final_norm, 2 * norm),
            (not self.share_embeddings, target_words),
            (generates and not self.tie_embeddings, target_words),
            (generates and self.head_bias, Cost(target.vocab_size)),
        ):
            total += extra if present else Cost()
        return total

    def _attention(self, stack: Stack) -> Cost:
        return cost.attention(
            self.hidden_size,
            stack.num_heads,
            head_dim=stack.head_dim,
            value_head_dim=stack.value_head_dim,
            context=self.max_seq_len,
            bias=self.attention_bias,
            output_bias=self.attention_output_bias,
        )

    def _feed_forward(self, stack: Stack) -> Cost:
        return cost.feed_forward(self.hidden_size, stack.intermediate_size, bias=self.mlp_bias)
