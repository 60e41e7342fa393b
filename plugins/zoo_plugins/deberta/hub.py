"""DeBERTa-v2 and DeBERTaV3 checkpoints in the hub's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zoo import UsageError
from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, PieceTokens, Rule
from zoo_plugins.bert.hub_shared import (
    BASE,
    OLD_NORMS,
    OUTPUTS,
    POSITION_IDS,
    POSITIONS,
    classes_of,
    decoder_rules,
    embedding_rules,
    fields_of,
    has_tensor,
    unread_bias,
    with_defaults,
)
from zoo_plugins.bert.sentence import sentence_encoder, sentence_files
from zoo_plugins.deberta.config import DeBERTaConfig

__all__ = ["DEBERTA_V2"]

_LAYER = "deberta.encoder.layer.*"
_TERMS = ("c2p", "p2c")
_NORMS = {"none": False, "layer_norm": True}


def _terms(checkpoint: Checkpoint) -> Sequence[str]:
    """Return the terms of positions in the scores, from a list or a text such as ``p2c|c2p``.

    Raises :class:`UsageError` for terms without embeddings of distances, which only change the scale of the scores, for
    embeddings without terms, and for unknown terms, all of which the original ignores.
    """
    hub, where = checkpoint.config, checkpoint.config_file
    stated = hub.get("pos_att_type") or []
    listed = [part.strip() for part in stated.lower().split("|")] if isinstance(stated, str) else stated
    if not isinstance(listed, list) or any(term not in _TERMS for term in listed):
        raise UsageError(f"pos_att_type {stated!r} is not supported", where, f"known: {', '.join(_TERMS)}")
    if bool(listed) != bool(hub.get("relative_attention", False)):
        values = f"relative_attention {hub.get('relative_attention', False)!r} with pos_att_type {stated!r}"
        raise UsageError(f"{values} is not supported", where)
    return [term for term in _TERMS if term in listed]


def _require_widths(checkpoint: Checkpoint, values: Mapping[str, Any]) -> None:
    """Raise :class:`UsageError` for widths of the pooler and of heads other than those that follow."""
    where = checkpoint.config_file
    hidden, heads = (DeBERTaConfig.check_field(name, values[name], where) for name in ("hidden_size", "num_heads"))
    for key, wanted in (("pooler_hidden_size", hidden), ("attention_head_size", hidden // max(heads, 1))):
        if checkpoint.config.get(key, wanted) != wanted:
            raise UsageError(f"{key} {checkpoint.config[key]!r} is not supported, only {wanted}", where)


def _derive(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    hub, where = checkpoint.config, checkpoint.config_file
    _require_widths(checkpoint, values)
    terms = _terms(checkpoint)
    distance = DeBERTaConfig.check_field("max_distance", hub.get("max_relative_positions", -1), where)
    buckets = DeBERTaConfig.check_field("distance_buckets", hub.get("position_buckets", -1), where)
    fields: dict[str, Any] = {"position_terms": terms, **sentence_encoder(checkpoint)}
    if hub.get("legacy", True) is False:  # whose head always shares the embedding
        fields["tie_embeddings"] = True
    elif values["task"] == "fill-mask" and has_tensor(checkpoint, "lm_predictions.lm_head.bias"):
        raise UsageError("lm_predictions.lm_head is the head of models with legacy false", where, "set it to false")
    if terms:
        fields["max_distance"] = distance if distance >= 1 else values["max_seq_len"]
        fields["distance_buckets"] = max(buckets, 0)
    else:
        fields |= {"distance_norm": False, "share_projections": False, "distance_buckets": 0}
    return fields


def _restore(c: DeBERTaConfig) -> Mapping[str, Any]:
    return {
        "relative_attention": bool(c.position_terms),
        "pos_att_type": list(c.position_terms),
        "max_relative_positions": c.max_distance,
        "position_buckets": c.distance_buckets or -1,
        "pooler_hidden_size": c.hidden_size,
        "legacy": True,
    }


def _rules(c: DeBERTaConfig) -> Sequence[Rule]:
    texts = c.task == "text-classification"
    return (
        *embedding_rules("deberta"),
        Rule("embeddings.projection", "deberta.embeddings.embed_proj"),
        Rule("distances.table", "deberta.encoder.rel_embeddings"),
        Rule("distances.norm", "deberta.encoder.LayerNorm"),
        *(Rule(f"blocks.*.attention.{part}", f"{_LAYER}.attention.self.{part}_proj") for part in ("query", "key")),
        Rule("blocks.*.attention.value", f"{_LAYER}.attention.self.value_proj"),
        Rule("blocks.*.attention.position_key", f"{_LAYER}.attention.self.pos_key_proj"),
        Rule("blocks.*.attention.position_query", f"{_LAYER}.attention.self.pos_query_proj"),
        Rule("blocks.*.attention.output", f"{_LAYER}.attention.output.dense"),
        Rule("blocks.*.norm_1", f"{_LAYER}.attention.output.LayerNorm"),
        Rule("blocks.*.mlp.up", f"{_LAYER}.intermediate.dense"),
        Rule("blocks.*.mlp.down", f"{_LAYER}.output.dense"),
        Rule("blocks.*.norm_2", f"{_LAYER}.output.LayerNorm"),
        Rule("masked_lm.dense", "cls.predictions.transform.dense"),
        Rule("masked_lm.norm", "cls.predictions.transform.LayerNorm"),
        *decoder_rules(c, "cls.predictions"),
        # the names of the head with legacy false
        Rule("masked_lm.dense", "lm_predictions.lm_head.dense"),
        Rule("masked_lm.norm", "lm_predictions.lm_head.LayerNorm"),
        Rule("masked_lm.decoder.bias", "lm_predictions.lm_head.bias"),
        *([Rule("pooler", "pooler.dense")] if texts else []),
        Rule("classifier", "classifier"),
        Rule("span", "qa_outputs"),
    )


def _ignored(c: DeBERTaConfig) -> Sequence[str]:
    """Parts that a model does not use: a table of positions, and a norm without distances."""
    unused = [] if c.absolute_positions else [r"(deberta\.)?embeddings\.position_embeddings\..*"]
    unused += [] if c.position_terms else [r"(deberta\.)?encoder\.LayerNorm\..*"]
    return (POSITION_IDS, *unused, *unread_bias(c, "cls.predictions"))


_SIZES = {
    "vocab_size": 128100, "type_vocab_size": 0, "hidden_size": 1536, "num_hidden_layers": 24,
    "num_attention_heads": 24, "intermediate_size": 6144, "layer_norm_eps": 1e-7,
}  # fmt: skip
_PIECES = PieceTokens(
    last=("[MASK]",),
    single="[CLS] $A [SEP]",
    pair="[CLS] $A [SEP] $B:1 [SEP]:1",
    roles={
        "bos": "[CLS]", "cls": "[CLS]", "eos": "[SEP]", "sep": "[SEP]", "unk": "[UNK]", "pad": "[PAD]",
        "mask": "[MASK]",
    },
    builder="DebertaV2Tokenizer",
)  # fmt: skip
DEBERTA_V2 = Layout(
    classes=classes_of("DebertaV2"),
    fields=(
        *with_defaults(fields_of(), **_SIZES),
        POSITIONS,
        Field("embedding_size", default=None),
        Field("position_biased_input", "absolute_positions", default=True),
        Field("share_att_key", "share_projections", default=False),
        Field("norm_rel_ebd", "distance_norm", default="none", values=_NORMS),
        Field("pooler_hidden_act", "pooler_activation", default="gelu", values=ACTIVATIONS),
    ),
    rules=_rules,
    prefix="deberta.",
    headless_tasks=BASE,
    ignored_tensors=_ignored,
    renamed=OLD_NORMS,
    left_out=("lm_predictions.*", "mask_predictions.*"),
    required_values={"conv_kernel_size": 0},
    ignored_keys=(
        "relative_attention",
        "pos_att_type",
        "max_relative_positions",
        "position_buckets",
        "pooler_hidden_size",
        "attention_head_size",
        "legacy",
        "*_dropout",
        "conv_act",  # of the convolution, which conv_kernel_size 0 leaves out
        "conv_groups",
    ),
    read_extra=_derive,
    write_extra=_restore,
    files=sentence_files,
    sentencepiece={"DebertaV2Tokenizer": lambda _: _PIECES},
    constant={"model_type": "deberta-v2"},
    tokenizer="DebertaV2Tokenizer",
    outputs=OUTPUTS,
)
"""``model_type`` deberta-v2, also of DeBERTaV3. The convolution of DeBERTa-v2-xlarge is refused.
The heads of pretraining in the files of deberta-v3-base, which name no class, are left out."""
