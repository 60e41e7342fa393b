"""Configuration, graphs and cost of the BERT family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from zoo import Activation, Cost, EmbeddingConfig, Graph, Initializer, Norm, attentions, cost, floats, mask, token_ids
from zoo_plugins.bert.costs import attention_cost

_BASE = ("feature-extraction", "sentence-embedding")
"""Tasks without a head."""
_CLASSES_OF_TEXT = {"pretraining", "text-classification"}
"""Tasks with a classifier of whole texts."""
_CLASSIFIED = ("text-classification", "token-classification")
"""Tasks with a classification head."""
_MASKED = ("fill-mask", "pretraining")
"""Tasks with a masked-language-model head."""


@dataclass(frozen=True, kw_only=True)
class BERTConfig(EmbeddingConfig):
    """Configuration of BERT and its variants: RoBERTa, DistilBERT, ALBERT, ELECTRA, MPNet, Nomic BERT and RoFormer.

    The defaults are BERT-base.
    """

    head_fields: ClassVar[tuple[str, ...]] = (
        *EmbeddingConfig.head_fields, "pooler", "pooler_activation", "head_activation", "feature_layers",
        "feature_merge",
    )  # fmt: skip
    task: Literal[
        "feature-extraction",
        "sentence-embedding",
        "fill-mask",
        "pretraining",
        "text-classification",
        "token-classification",
        "question-answering",
        "replaced-token-detection",
    ] = "feature-extraction"
    """Task, which determines the head on the encoder."""
    vocab_size: int = 30522
    """Size of the vocabulary."""
    type_vocab_size: int = 2
    """Number of segment types; 0 for none (DistilBERT)."""
    max_seq_len: int = 512
    """Maximum input length, in tokens."""
    positions: Literal["learned", "rotary"] = "learned"
    """Positions: a learned embedding of each, or rotations of queries and keys (RoFormer, Nomic BERT)."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_table: bool = False
    """Whether rotary angles are computed in float64, with the base 10000, and sines and cosines rounded to float32
    (RoFormer). By default angles are float32."""
    relative_buckets: int = 0
    """Number of buckets of a learned bias on attention scores, which all blocks share (MPNet): see
    :class:`zoo.nn.RelativePositionBias`; 0 for none."""
    skip_padding: bool = False
    """Whether positions skip padding (RoBERTa): the n-th token other than ``pad_token_id`` uses row
    ``pad_token_id`` + n of the position table, and padding uses row ``pad_token_id``."""
    hidden_size: int = 768
    """Width of the encoder."""
    embedding_size: int | None = None
    """Width of the embeddings and of the masked-language-model head; ``hidden_size`` by default."""
    project_embeddings: bool | None = None
    """Whether a dense layer projects the embeddings to the encoder's width; by default only if the widths differ."""
    num_layers: int = 12
    """Number of blocks that run."""
    share_layers: bool = False
    """Whether all of them share one block's weights (ALBERT)."""
    num_heads: int = 12
    """Heads per block."""
    attention: Literal["full", "linformer", "performer", "longformer"] = "full"
    """Kind of attention. Linformer projects the tokens to ``attention_rank`` keys and values; Performer approximates
    the softmax with ``attention_rank`` random features; Longformer has a sliding window of ``attention_window``."""
    attention_rank: int | None = None
    """Number of keys and values in Linformer, half of ``max_seq_len`` by default, or of features in Performer, 256 by
    default. None for other kinds."""
    attention_window: int | None = None
    """Size of Longformer's window in tokens, half on either side; 512 by default. None for other kinds."""
    global_tokens: int = 0
    """Number of leading tokens that see all tokens and are seen by all in Longformer, at most half of
    ``attention_window``."""
    attention_bias: bool = True
    """Whether the four projections of attention have biases; they have none in Nomic BERT."""
    intermediate_size: int | None = None
    """Hidden width of the feed-forward network; 4 x ``hidden_size`` by default."""
    gated: bool = False
    """Whether the feed-forward network has a gate, which passes through the activation (Nomic BERT)."""
    mlp_bias: bool = True
    """Whether the feed-forward network has biases; it has none in Nomic BERT."""
    activation: Activation = "gelu"
    """Activation of the feed-forward network and of the replaced-token-detection head."""
    head_activation: Activation | None = None
    """Activation of the masked-language-model head; ``activation`` by default."""
    norm: Norm = "layer"
    """Kind of norm: LayerNorm, or that of The Annotated Transformer; see :func:`zoo.nn.build_norm`."""
    norm_eps: float = 1e-12
    """Added to the variance in LayerNorm, or to the deviation in the annotated norm."""
    dropout: float = 0.1
    """Dropout on embeddings, attention weights and residuals, during training."""
    pooler: bool = True
    """Whether the encoder has a pooler, a dense layer on its first token, which classifiers of texts read. Without one,
    they read the vector that ``pooling`` chooses."""
    pooler_activation: Literal["tanh"] | Activation = "tanh"
    """Activation of the pooler."""
    feature_layers: tuple[int, ...] = ()
    """Hidden states that are merged: 0 is the embeddings, ``num_layers`` or -1 the last block. They are the output
    ``features`` of feature-extraction, and what sentence-embedding pools. If empty, there is no such output, and
    the last states are pooled."""
    feature_merge: Literal["concat", "sum", "mean"] = "concat"
    """How ``feature_layers`` are merged: concatenated in their order, added, or averaged."""
    pooling: Literal["cls", "mean", "max", "last", "mean_sqrt_len", "weighted_mean"] = "mean"
    """Pooling of sentence embeddings, and of text-classification without a pooler: see :func:`zoo.nn.pool`."""
    tie_embeddings: bool = True
    """Whether the masked-language-model head shares the token embedding."""
    mask_token_id: int | None = None
    """The mask token, to be filled in."""
    pad_token_id: int | None = None
    """Token that pads shorter inputs of a batch; 0 if unset."""
    initializer: Initializer = "truncated_normal"
    """Distribution of initial weights: see :func:`zoo.nn.initialize`."""

    def __post_init__(self) -> None:
        self.default("intermediate_size", 4 * self.hidden_size)
        self.default("embedding_size", self.hidden_size)
        self.default("project_embeddings", self.embedding_size != self.hidden_size)
        self.default("head_activation", self.activation)
        self.require_positive(
            "vocab_size", "max_seq_len", "hidden_size", "embedding_size", "num_layers", "num_heads", "attention_rank",
            "attention_window", "intermediate_size", "norm_eps", "rope_theta",
        )  # fmt: skip
        self._check_attention()
        self._check_positions()
        self.require_probability("dropout")
        self.require_divisible("hidden_size", "num_heads")
        if self.type_vocab_size < 0:
            raise ValueError(f"type_vocab_size must not be negative, got {self.type_vocab_size}")
        if self.task == "pretraining" and not self.pooler:
            raise ValueError(f"task {self.task!r} reads the pooler, but pooler is {self.pooler}")
        self._check_features()
        if not self.project_embeddings and self.embedding_size != self.hidden_size:
            sizes = f"embedding_size {self.embedding_size} and hidden_size {self.hidden_size}"
            raise ValueError(f"{sizes} differ, but project_embeddings is {self.project_embeddings}")
        self.check_classes(head=self.task in _CLASSIFIED)
        self.check_embedding()
        if self.skip_padding and self.pad_token_id is None:
            raise ValueError("skip_padding needs a pad_token_id, got None")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(f"pad_token_id {self.pad_token_id} lies outside vocab_size {self.vocab_size}")

    def _check_attention(self) -> None:
        """Set defaults for the kind of attention, and reject settings that it does not use."""
        if self.attention == "linformer":
            self.default("attention_rank", max(1, self.max_seq_len // 2))
            if (self.attention_rank or 0) > self.max_seq_len:
                raise ValueError(f"attention_rank {self.attention_rank} exceeds max_seq_len {self.max_seq_len}")
        elif self.attention == "performer":
            self.default("attention_rank", 256)
        elif self.attention_rank is not None:
            raise ValueError(f"attention {self.attention!r} has no rank, but attention_rank is {self.attention_rank}")
        if self.attention == "longformer":
            self.default("attention_window", 512)
            window = self.attention_window or 0
            if window % 2:
                raise ValueError(f"attention_window must be even, half on either side, got {window}")
            if not 0 <= self.global_tokens <= window // 2:
                raise ValueError(f"global_tokens {self.global_tokens} lies outside 0 ... half of window {window}")
        elif self.attention_window is not None or self.global_tokens:
            values = f"attention_window is {self.attention_window} and global_tokens is {self.global_tokens}"
            raise ValueError(f"attention {self.attention!r} has no window, but {values}")

    def _check_positions(self) -> None:
        """Reject contradictions among positions, and settings that only full attention has."""
        if self.attention != "full":
            for name, value in (("positions", "learned"), ("relative_buckets", 0), ("attention_bias", True)):
                if (given := getattr(self, name)) != value:
                    raise ValueError(f"attention {self.attention!r} needs {name} {value!r}, got {given!r}")
        if self.positions == "rotary":
            if self.skip_padding:
                raise ValueError(f"skip_padding is for learned positions, but positions is {self.positions!r}")
            if self.hidden_size % (2 * self.num_heads):
                sizes = f"hidden_size {self.hidden_size} and num_heads {self.num_heads}"
                raise ValueError(f"rotary positions need heads of even width, got {sizes}")
        if self.rope_table and (self.positions != "rotary" or self.rope_theta != 10000):
            values = f"positions is {self.positions!r} and rope_theta is {self.rope_theta}"
            raise ValueError(f"rope_table is for rotary positions with the base 10000, but {values}")
        if self.relative_buckets and not 4 <= self.relative_buckets < 512:
            raise ValueError(f"relative_buckets must be 0, or from 4 to 511, got {self.relative_buckets}")

    def _check_features(self) -> None:
        if self.feature_layers and self.task not in _BASE:
            values = f"feature_layers is {self.feature_layers} and the task is {self.task!r}"
            raise ValueError(f"feature_layers is for the tasks {_BASE[0]!r} and {_BASE[1]!r}, but {values}")
        if self.feature_merge != "concat" and not self.feature_layers:
            raise ValueError(f"feature_merge is {self.feature_merge!r}, but feature_layers is empty")
        for layer in self.feature_layers:
            if not -self.num_layers - 1 <= layer <= self.num_layers:
                bounds = f"{-self.num_layers - 1} ... {self.num_layers} of num_layers {self.num_layers}"
                raise ValueError(f"feature_layers has {layer}, which lies outside {bounds}")

    def with_task(self, task: str, values: Mapping[str, Any] | None = None, where: object = None) -> Self:
        """Return this configuration for a task; see :meth:`zoo.Config.with_task`.

        Like the original classes, models for text-classification and pretraining get a pooler, and others with a head
        lose theirs. Those without a head keep it.
        """
        changes = dict(values or {})
        if task != self.task:
            changes.setdefault("feature_layers", self.feature_layers if task in _BASE else ())
            changes.setdefault("feature_merge", self.feature_merge if changes["feature_layers"] else "concat")
            changes.setdefault("pooler", self.pooler if task in _BASE else task in _CLASSES_OF_TEXT)
        return super().with_task(task, changes, where)

    @property
    def position_rows(self) -> int:
        """Rows of the position embedding; 0 if positions are rotary."""
        if self.positions == "rotary":
            return 0
        return self.max_seq_len + (self.pad_token_id + 1 if self.skip_padding and self.pad_token_id is not None else 0)

    @property
    def feature_size(self) -> int:
        """Width of the merged ``feature_layers``, or of the last states."""
        return self.hidden_size * (len(self.feature_layers) or 1 if self.feature_merge == "concat" else 1)

    def graphs(self) -> tuple[Graph, ...]:
        """Declare one graph; its outputs depend on the task. Positions count padding, so it must be on the right."""
        hidden = floats("last_hidden_state", "batch", "sequence", self.hidden_size)
        logits = floats("logits", "batch", "sequence", self.vocab_size)
        features = floats("features", "batch", "sequence", self.feature_size)
        vector = floats("sentence_embedding", "batch", self.vector_size(self.feature_size))
        pooled = floats("pooler_output", "batch", self.hidden_size)
        outputs = {
            "feature-extraction": (
                hidden,
                *((features,) if self.feature_layers else ()),
                *((pooled,) if self.pooler else ()),
            ),
            "sentence-embedding": (vector, hidden),
            "fill-mask": (logits,),
            "pretraining": (logits, floats("next_sentence_logits", "batch", 2)),
            "text-classification": (floats("logits", "batch", self.num_classes),),
            "token-classification": (floats("logits", "batch", "sequence", self.num_classes),),
            "question-answering": tuple(floats(f"{end}_logits", "batch", "sequence") for end in ("start", "end")),
            "replaced-token-detection": (floats("logits", "batch", "sequence"),),
        }
        types = (token_ids("token_type_ids", self.type_vocab_size),) if self.type_vocab_size else ()
        inputs = (token_ids("input_ids", self.vocab_size), mask("attention_mask", padding="right"), *types)
        keys = (self.attention_rank or 0) if self.attention == "linformer" else "sequence"
        weights = attentions(self.num_layers, self.num_heads, keys=keys)
        return (Graph(inputs=inputs, outputs=outputs[self.task], attentions=weights, causal=False),)

    def cost(self) -> Cost:
        """Return the closed-form cost.

        FLOPs per token exclude parts that run once per sequence: pooler, its classifiers, and queries of global tokens.
        """
        hidden, width = self.hidden_size, self.embedding_size or 0
        attention = attention_cost(
            self.attention,
            hidden_size=hidden,
            num_heads=self.num_heads,
            context=self.max_seq_len,
            rank=self.attention_rank or 0,
            window=self.attention_window or 0,
            global_tokens=self.global_tokens,
            bias=self.attention_bias,
        )
        feed_forward = cost.gated_feed_forward if self.gated else cost.feed_forward
        mlp = feed_forward(hidden, self.intermediate_size or 0, bias=self.mlp_bias)
        block = 2 * cost.layer_norm(hidden) + attention + mlp
        total = cost.embedding(self.vocab_size + self.position_rows + self.type_vocab_size, width)
        total += cost.layer_norm(width) + cost.embedding(self.relative_buckets, self.num_heads)
        if self.project_embeddings:
            total += cost.linear(width, hidden)
        total += Cost((1 if self.share_layers else self.num_layers) * block.parameters, self.num_layers * block.flops)
        if self.pooler:
            total += Cost(cost.linear(hidden, hidden).parameters)
        total += self.projection_cost(self.feature_size)
        if self.task in _MASKED:
            total += cost.linear(hidden, width) + cost.layer_norm(width)
            total += cost.head(width, self.vocab_size, tied=self.tie_embeddings) + Cost(self.vocab_size)
        if self.task in _CLASSES_OF_TEXT:
            total += Cost(cost.linear(hidden, 2 if self.task == "pretraining" else self.num_classes).parameters)
        if self.task == "token-classification":
            total += cost.linear(hidden, self.num_classes)
        if self.task == "question-answering":
            total += cost.linear(hidden, 2)
        if self.task == "replaced-token-detection":
            total += cost.linear(hidden, hidden) + cost.linear(hidden, 1)
        return total
