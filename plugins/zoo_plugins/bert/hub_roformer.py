"""RoFormer checkpoints in the hub's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zoo.checkpoints import Checkpoint, Field, Layout, Rule, paired_rows
from zoo_plugins.bert.config import BERTConfig
from zoo_plugins.bert.hub_shared import (
    BASE,
    OLD_NORMS,
    ONLY,
    OUTPUTS,
    block_rules,
    classes_of,
    classifier_rules,
    decoder_rules,
    embedding_rules,
    fields_of,
    require_types,
    unread_bias,
    with_defaults,
)
from zoo_plugins.bert.sentence import sentence_encoder, sentence_files

__all__ = ["ROFORMER"]


def _derive(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    require_types(checkpoint, values)
    return {
        "positions": "rotary",
        "rope_table": True,
        "pooler": values["task"] == "text-classification",
        "pooler_activation": values["activation"],
        **sentence_encoder(checkpoint),
    }


def _rules(c: BERTConfig) -> Sequence[Rule]:
    size = c.hidden_size // c.num_heads
    return (
        *embedding_rules("roformer"),
        Rule("embeddings.projection", "roformer.embeddings_project"),
        *block_rules("roformer", paired_rows(c.num_heads, size, size)),
        *classifier_rules(c),
        Rule("masked_lm.dense", "cls.predictions.transform.dense"),
        Rule("masked_lm.norm", "cls.predictions.transform.LayerNorm"),
        *decoder_rules(c, "cls.predictions"),
        Rule("span", "qa_outputs"),
    )


_SIZES = {
    "vocab_size": 50000, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072,
}  # fmt: skip
ROFORMER = Layout(
    classes=classes_of("RoFormer"),
    fields=(
        *with_defaults(fields_of(), **_SIZES),
        Field("max_position_embeddings", "max_seq_len", default=1536),
        Field("embedding_size", default=None),
    ),
    rules=_rules,
    prefix="roformer.",
    headless_tasks=BASE,
    ignored_tensors=lambda c: (r".*encoder\.embed_positions\.weight", *unread_bias(c, "cls.predictions")),
    renamed=OLD_NORMS,
    required_values={**{key: ONLY[key] for key in ("is_decoder", "add_cross_attention")}, "rotary_value": False},
    read_extra=_derive,
    files=sentence_files,
    constant={"model_type": "roformer"},
    tokenizer="RoFormerTokenizer",
    outputs=OUTPUTS,
)
"""``model_type`` roformer. The table of sinusoids in files is not learned. Values are not rotated: ``rotary_value`` is
refused."""
