"""The tasks of causal decoders, of GPT and of Llama: configuration, graph and cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from zoo import Cost, EmbeddingConfig, Graph, attentions, causal_graph, cost, floats, mask, token_ids

__all__ = ["TASKS", "DecoderConfig"]

TASKS = ("text-generation", "text-classification", "sentence-embedding")
"""Tasks of a causal decoder."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(EmbeddingConfig):
    """Base class of the configurations of causal decoders."""

    task: Literal["text-generation", "text-classification", "sentence-embedding"] = "text-generation"
    """Logits of the next token, of the classes of a text, or one vector for a text."""
    pooling: Literal["last", "mean"] = "last"
    """Pooling of sentence embeddings: the last token, which has seen all others, or the mean over all. Classifiers
    read the last token other than ``pad_token_id``."""

    @property
    def predicts_tokens(self) -> bool:
        """Whether the model has logits of the next token, rather than one answer for a text."""
        return self.task == "text-generation"

    def decoder_graph(
        self,
        *,
        vocab_size: int,
        hidden_size: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_seq_len: int,
        sliding_windows: Sequence[int],
        value_head_dim: int | None = None,
        sinks: bool = False,
    ) -> Graph:
        """Declare the graph of the task: one for prefill and decoding, or one without a past.

        ``sliding_windows`` has the window of each layer, 0 for none; the pattern repeats over the layers. A window of
        the whole text limits nothing, and one of a single key keeps no past, which a graph cannot declare. With
        ``sinks``, attention weights have one of a sink before those of the keys.
        """
        if self.predicts_tokens:
            return causal_graph(
                vocab_size=vocab_size,
                num_layers=num_layers,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                value_head_dim=value_head_dim,
                num_memories=int(sinks),
                windows=tuple(window if 1 < window < max_seq_len else None for window in sliding_windows),
            )
        outputs = {
            "text-classification": (floats("logits", "batch", self.num_classes),),
            "sentence-embedding": (
                floats("sentence_embedding", "batch", self.vector_size(hidden_size)),
                floats("last_hidden_state", "batch", "sequence", hidden_size),
            ),
        }
        return Graph(
            inputs=(token_ids("input_ids", vocab_size), mask("attention_mask")),
            outputs=outputs[self.task],
            attentions=attentions(num_layers, num_heads, keys="1 + sequence" if sinks else "sequence"),
        )

    def head_cost(self, hidden_size: int, vocab_size: int, *, tied: bool, bias: bool = False) -> Cost:
        """Return the cost of the head. That of a classifier, which runs once per sequence, has parameters only."""
        if self.predicts_tokens:
            return cost.head(hidden_size, vocab_size, tied=tied, bias=bias)
        classifier = cost.linear(hidden_size, self.num_classes, bias=False).parameters
        return self.projection_cost(hidden_size) + Cost(classifier if self.task == "text-classification" else 0)
