"""Parts shared by the checkpoint layouts of the BERT family."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from zoo import UsageError
from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Rule
from zoo_plugins.bert.config import BERTConfig
from zoo_plugins.bert.sentence import PROJECTIONS

__all__ = [
    "BASE",
    "OLD_NORMS",
    "ONLY",
    "OUTPUTS",
    "POSITIONS",
    "POSITION_IDS",
    "block_rules",
    "classes_of",
    "classifier_rules",
    "decoder_rules",
    "embedding_rules",
    "fields_of",
    "has_tensor",
    "require_types",
    "skipped_positions",
    "unread_bias",
    "with_defaults",
]

BASE = ("feature-extraction", "sentence-embedding")
"""Tasks of a base model without a head."""
_HEADS = {
    "MaskedLM": "fill-mask",
    "SequenceClassification": "text-classification",
    "TokenClassification": "token-classification",
    "QuestionAnswering": "question-answering",
}
POSITIONS = Field("max_position_embeddings", "max_seq_len", default=512)
ONLY = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
OLD_NORMS = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))
POSITION_IDS = r".*position_ids"
OUTPUTS = {
    "logits": "prediction_logits",  # the original's name in its pretraining classes
    "sentence_embedding": "",  # no such output in the original
    "features": "",  # no such output in the original
}


def classes_of(name: str) -> dict[str, str | tuple[str, ...]]:
    """Return the original classes of a family and their tasks in zoo."""
    return {f"{name}Model": BASE, **{f"{name}For{head}": task for head, task in _HEADS.items()}}


def fields_of(*, activation: str = "gelu", dropout: float = 0.1) -> Sequence[Field]:
    """Return the fields of config.json, with the defaults of a family."""
    return (
        Field("vocab_size"),
        Field("type_vocab_size", default=2),
        Field("hidden_size"),
        Field("num_hidden_layers", "num_layers"),
        Field("num_attention_heads", "num_heads"),
        Field("intermediate_size"),
        Field("hidden_act", "activation", default=activation, values=ACTIVATIONS),
        Field("layer_norm_eps", "norm_eps", default=1e-12),
        Field("hidden_dropout_prob", "dropout", default=dropout),
        Field("tie_word_embeddings", "tie_embeddings", default=True),
    )


def with_defaults(fields: Sequence[Field], **defaults: Any) -> Sequence[Field]:
    """Return fields with these defaults, by the checkpoint's key."""
    return tuple(replace(item, default=defaults.get(item.theirs, item.default)) for item in fields)


def embedding_rules(base: str) -> Sequence[Rule]:
    """Return rules for the three embedding tables and their norm in a base model of this name, and for the dense layers
    of a sentence encoder."""
    return (
        Rule("embeddings.token", f"{base}.embeddings.word_embeddings"),
        Rule("embeddings.position", f"{base}.embeddings.position_embeddings"),
        Rule("embeddings.token_type", f"{base}.embeddings.token_type_embeddings"),
        Rule("embeddings.norm", f"{base}.embeddings.LayerNorm"),
        PROJECTIONS,
    )


def block_rules(base: str, row_order: tuple[int, ...] = ()) -> Sequence[Rule]:
    """Return rules for the blocks of a base model of this name; ``row_order`` is that of queries and keys."""
    layer = f"{base}.encoder.layer.*"
    return (
        Rule("blocks.*.attention.query", f"{layer}.attention.self.query", row_order=row_order),
        Rule("blocks.*.attention.key", f"{layer}.attention.self.key", row_order=row_order),
        Rule("blocks.*.attention.value", f"{layer}.attention.self.value"),
        Rule("blocks.*.attention.output", f"{layer}.attention.output.dense"),
        Rule("blocks.*.norm_1", f"{layer}.attention.output.LayerNorm"),
        Rule("blocks.*.mlp.up", f"{layer}.intermediate.dense"),
        Rule("blocks.*.mlp.down", f"{layer}.output.dense"),
        Rule("blocks.*.norm_2", f"{layer}.output.LayerNorm"),
    )


class _Tied(Protocol):
    """A configuration of a masked-language-model head."""

    @property
    def tie_embeddings(self) -> bool: ...


def decoder_rules(c: _Tied, head: str) -> Sequence[Rule]:
    """Return rules for the projection to the vocabulary. A tied head's bias has two names, an untied one's only
    ``decoder.bias``."""
    tied = [Rule("masked_lm.decoder.bias", f"{head}.bias")] if c.tie_embeddings else []
    return (*tied, Rule("masked_lm.decoder", f"{head}.decoder"))


def unread_bias(c: _Tied, head: str) -> Sequence[str]:
    """Return the pattern of an untied head's unused ``bias``."""
    return () if c.tie_embeddings else (re.escape(f"{head}.bias"),)


def classifier_rules(c: BERTConfig) -> Sequence[Rule]:
    """Return rules for a classifier. For texts, its first layer is the pooler; for tokens, it has a single layer."""
    if c.task == "text-classification":
        return Rule("pooler", "classifier.dense"), Rule("classifier", "classifier.out_proj")
    return (Rule("classifier", "classifier"),)


def has_tensor(checkpoint: Checkpoint, ending: str) -> bool:
    """Whether a file has a tensor of this name, with any prefix."""
    return any(f".{name}".endswith(f".{ending}") for name in checkpoint.tensors)


def require_types(checkpoint: Checkpoint, values: Mapping[str, Any]) -> None:
    """Raise :class:`UsageError` if there are no segment types: the original classes have at least one."""
    if values["type_vocab_size"] == 0:
        raise UsageError("type_vocab_size 0 is not supported", checkpoint.config_file)


def skipped_positions(checkpoint: Checkpoint, *, default_rows: int = 512) -> Mapping[str, Any]:
    """Return the fields of positions that skip padding; the table has ``default_rows`` rows if the file does not say.

    Raises :class:`UsageError` if padding takes all rows of the table.
    """
    pad = checkpoint.config.get("pad_token_id", 1)
    rows = checkpoint.config.get("max_position_embeddings", default_rows)
    if not isinstance(pad, int) or not isinstance(rows, int) or rows <= pad + 1:
        what = f"max_position_embeddings {rows!r} leaves no position after pad_token_id {pad!r}"
        raise UsageError(what, checkpoint.config_file)
    return {"skip_padding": True, "pad_token_id": pad, "max_seq_len": rows - pad - 1}
