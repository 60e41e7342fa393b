"""The fields and graphs of models of transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from zoo import Cost, EmbeddingConfig, Graph, TensorSpec, attentions, causal_graph, floats, mask, token_ids

_CLASSIFIED = ("text-classification", "token-classification")
_GPT_NEOX = {
    "model_type": "gpt_neox", "vocab_size": 260, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 256, "max_position_embeddings": 128,
}  # fmt: skip
_COUNT = re.compile(r"(n_|num_)(\w+_)?(layers?|layer)|(n_layers?)|(\w+_)?layers")
"""Keys of original configurations that count layers."""


@dataclass(frozen=True, kw_only=True)
class ClassFields(EmbeddingConfig):
    """The content of an original config.json, the class, and what its graphs need.

    The defaults are a small GPT-NeoX.
    """

    head_fields: ClassVar[tuple[str, ...]] = (
        *EmbeddingConfig.head_fields, "model_class", "attention", "type_vocab_size", "counts_positions", "computed",
        "num_kv_heads", "head_dim", "value_head_dim", "num_parameters", "flops_per_token", "attention_layers",
        "num_heads",
    )  # fmt: skip
    task: Literal[
        "feature-extraction",
        "sentence-embedding",
        "fill-mask",
        "text-classification",
        "token-classification",
        "question-answering",
        "text-generation",
    ] = "text-generation"
    """Task, which determines the class."""
    model_class: str = "GPTNeoXForCausalLM"
    """The class in transformers."""
    original: dict[str, Any] = field(default_factory=lambda: dict(_GPT_NEOX), hash=False)
    """The original configuration, config.json, without what other fields hold."""
    attention: Literal["zoo", "eager"] = "zoo"
    """The implementation of attention: :func:`zoo.nn.scaled_dot_product_attention`, or the class's own if it has no
    interface for others."""
    vocab_size: int = 260
    """Size of the vocabulary."""
    type_vocab_size: int = 0
    """Number of segment types; 0 if the class takes none. With one type, graphs have no such input."""
    max_seq_len: int | None = 128
    """Maximum input length, in tokens; None for no limit."""
    hidden_size: int = 64
    """Width of the last hidden states."""
    counts_positions: bool = True
    """Whether the class gets positions, counted without padding; otherwise it computes them itself. In text generation
    alone: the padding of other tasks is on the right."""
    computed: tuple[str, ...] = ("gpt_neox.rotary_emb.inv_freq",)
    """Tensors that the class computes at construction and does not store in its checkpoints, such as the frequencies of
    rotary positions; ``*`` stands for the number of a layer."""
    num_layers: int = 2
    """Number of layers; in text generation, of those with keys and values."""
    num_kv_heads: int | None = 4
    """Their key-value heads, in text generation."""
    head_dim: int | None = 16
    """Width of a key, in text generation."""
    value_head_dim: int | None = None
    """Width of a value; ``head_dim`` by default."""
    num_parameters: int = 133_376
    """Number of parameters."""
    flops_per_token: int = 295_424
    """Forward FLOPs per token of a text of ``max_seq_len`` tokens."""
    attention_layers: int = 2
    """Number of layers whose attention weights can be recorded."""
    num_heads: int = 4
    """Heads of these layers."""
    bos_token_id: int | None = None
    """Token that begins a text."""
    eos_token_id: int | tuple[int, ...] | None = None
    """Tokens that end a text."""
    pad_token_id: int | None = None
    """Token that pads shorter texts; the mask excludes it."""
    mask_token_id: int | None = None
    """Token in the place of those to predict, in masked language modelling."""

    def __post_init__(self) -> None:
        self.check_classes(head=self.task in _CLASSIFIED)
        self.check_embedding()
        if self.task == "text-generation" and not (self.num_kv_heads and self.head_dim):
            raise ValueError("text generation needs num_kv_heads and head_dim")
        self.require_positive("vocab_size", "max_seq_len", "hidden_size", "num_layers", "num_kv_heads", "head_dim")
        if not isinstance(self.original.get("model_type"), str):
            raise ValueError("original has no model_type")
        for key, value in _counts(self.original):
            self.check_field("num_layers", value, f"original.{key}")

    def graphs(self) -> tuple[Graph, ...]:
        """Declare one graph: for prefill and decoding, or for a text as a whole."""
        recorded = attentions(self.attention_layers, self.num_heads) if self.attention_layers else ()
        if self.task == "text-generation":
            graph = causal_graph(
                vocab_size=self.vocab_size,
                num_layers=self.num_layers,
                num_kv_heads=self.num_kv_heads or 0,
                head_dim=self.head_dim or 0,
                value_head_dim=self.value_head_dim,
                num_heads=self.num_heads if self.attention_layers else None,
            )
            return (graph,)
        inputs = [token_ids("input_ids", self.vocab_size), mask("attention_mask", padding="right")]
        if self.type_vocab_size > 1:
            inputs.append(token_ids("token_type_ids", self.type_vocab_size))
        return (Graph(inputs=tuple(inputs), outputs=self._outputs(), attentions=recorded),)

    def cost(self) -> Cost:
        """Return what was counted when the class was inspected."""
        return Cost(self.num_parameters, self.flops_per_token)

    def _outputs(self) -> tuple[TensorSpec, ...]:
        states = floats("last_hidden_state", "batch", "sequence", self.hidden_size)
        match self.task:
            case "sentence-embedding":
                return (floats("sentence_embedding", "batch", self.vector_size(self.hidden_size)), states)
            case "fill-mask":
                return (floats("logits", "batch", "sequence", self.vocab_size),)
            case "text-classification":
                return (floats("logits", "batch", self.num_classes),)
            case "token-classification":
                return (floats("logits", "batch", "sequence", self.num_classes),)
            case "question-answering":
                return tuple(floats(name, "batch", "sequence") for name in ("start_logits", "end_logits"))
        return (states,)


def _counts(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield the numbers of layers in a configuration and its sections."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _counts(value, f"{prefix}{key}.")
        elif type(value) is int and _COUNT.fullmatch(key):
            yield f"{prefix}{key}", value
