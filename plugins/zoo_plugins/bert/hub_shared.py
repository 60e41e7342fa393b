"""Parts shared by the checkpoint layouts of the BERT family."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

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
    "unread_bias",
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


def block_rules(base: str) -> Sequence[Rule]:
    """Return rules for the blocks of a base model of this name."""
    layer = f"{base}.encoder.layer.*"
    return (
        Rule("blocks.*.attention.query", f"{layer}.attention.self.query"),
        Rule("blocks.*.attention.key", f"{layer}.attention.self.key"),
        Rule("blocks.*.attention.value", f"{layer}.attention.self.value"),
        Rule("blocks.*.attention.output", f"{layer}.attention.output.dense"),
        Rule("blocks.*.norm_1", f"{layer}.attention.output.LayerNorm"),
        Rule("blocks.*.mlp.up", f"{layer}.intermediate.dense"),
        Rule("blocks.*.mlp.down", f"{layer}.output.dense"),
        Rule("blocks.*.norm_2", f"{layer}.output.LayerNorm"),
    )


def decoder_rules(c: BERTConfig, head: str) -> Sequence[Rule]:
    """Return rules for the projection to the vocabulary. A tied head's bias has two names, an untied one's only
    ``decoder.bias``."""
    tied = [Rule("masked_lm.decoder.bias", f"{head}.bias")] if c.tie_embeddings else []
    return (*tied, Rule("masked_lm.decoder", f"{head}.decoder"))


def unread_bias(c: BERTConfig, head: str) -> Sequence[str]:
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
