"""MPNet checkpoints in the hub's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zoo.checkpoints import Checkpoint, Layout, Rule
from zoo_plugins.bert.config import BERTConfig
from zoo_plugins.bert.hub_shared import (
    BASE,
    OLD_NORMS,
    OUTPUTS,
    POSITION_IDS,
    classes_of,
    classifier_rules,
    decoder_rules,
    embedding_rules,
    fields_of,
    has_tensor,
    skipped_positions,
    unread_bias,
    with_defaults,
)
from zoo_plugins.bert.sentence import sentence_encoder, sentence_files

__all__ = ["MPNET"]

_LAYER = "mpnet.encoder.layer.*"
_BUCKETS = 32
"""Buckets of relative positions. The original sizes its table by config.json, but computes buckets for 32."""


def _derive(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    return {
        **skipped_positions(checkpoint),
        "type_vocab_size": 0,
        "relative_buckets": _BUCKETS,
        "head_activation": "gelu",
        "pooler": values["task"] == "text-classification" or has_tensor(checkpoint, "pooler.dense.weight"),
        **sentence_encoder(checkpoint),
    }


def _rules(c: BERTConfig) -> Sequence[Rule]:
    parts = {"query": "q", "key": "k", "value": "v", "output": "o"}
    return (
        *embedding_rules("mpnet"),
        Rule("relative.table", "mpnet.encoder.relative_attention_bias"),
        *(Rule(f"blocks.*.attention.{ours}", f"{_LAYER}.attention.attn.{theirs}") for ours, theirs in parts.items()),
        Rule("blocks.*.norm_1", f"{_LAYER}.attention.LayerNorm"),
        Rule("blocks.*.mlp.up", f"{_LAYER}.intermediate.dense"),
        Rule("blocks.*.mlp.down", f"{_LAYER}.output.dense"),
        Rule("blocks.*.norm_2", f"{_LAYER}.output.LayerNorm"),
        *classifier_rules(c),
        *([] if c.task == "text-classification" else [Rule("pooler", "mpnet.pooler.dense")]),
        Rule("masked_lm.dense", "lm_head.dense"),
        Rule("masked_lm.norm", "lm_head.layer_norm"),
        *decoder_rules(c, "lm_head"),
        Rule("span", "qa_outputs"),
    )


_SIZES = {
    "vocab_size": 30527, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072,
}  # fmt: skip
MPNET = Layout(
    classes=classes_of("MPNet"),
    fields=with_defaults([item for item in fields_of() if item.theirs != "type_vocab_size"], **_SIZES),
    rules=_rules,
    prefix="mpnet.",
    headless_tasks=BASE,
    # Published checkpoints with a head also contain the encoder's unused pooler.
    ignored_tensors=lambda c: (POSITION_IDS, r"mpnet\.pooler\..*", *unread_bias(c, "lm_head")),
    renamed=OLD_NORMS,
    required_values={"pad_token_id": 1, "relative_attention_num_buckets": _BUCKETS},
    ignored_keys=("max_position_embeddings",),
    read_extra=_derive,
    write_extra=lambda c: {"max_position_embeddings": c.position_rows},
    files=sentence_files,
    constant={"model_type": "mpnet"},
    tokenizer="MPNetTokenizer",
    outputs=OUTPUTS,
)
"""``model_type`` mpnet. Positions skip the token 1, whatever ``pad_token_id`` says, so others are refused."""
