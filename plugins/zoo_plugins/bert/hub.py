"""Checkpoints in the hub's layout: BERT, RoBERTa, DistilBERT, ALBERT and ELECTRA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zoo.checkpoints import ACTIVATIONS, FAIRSEQ_TOKENS, Checkpoint, Field, Layout, PieceTokens, Rule
from zoo_plugins.bert.config import BERTConfig
from zoo_plugins.bert.hub_shared import (
    BASE,
    OLD_NORMS,
    ONLY,
    OUTPUTS,
    POSITION_IDS,
    POSITIONS,
    block_rules,
    classes_of,
    classifier_rules,
    decoder_rules,
    embedding_rules,
    fields_of,
    has_tensor,
    require_types,
    skipped_positions,
    unread_bias,
)
from zoo_plugins.bert.sentence import sentence_encoder, sentence_files

__all__ = [
    "ALBERT",
    "BERT",
    "CAMEMBERT",
    "DISTILBERT",
    "ELECTRA",
    "ROBERTA",
    "XLM_ROBERTA",
    "derive_roberta",
    "roberta_rules",
]

# BERT.


def _derive_bert(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    require_types(checkpoint, values)
    pooler = values["task"] == "text-classification" or has_tensor(checkpoint, "pooler.dense.weight")
    fields: dict[str, Any] = {"pooler": pooler, **sentence_encoder(checkpoint)}
    if values["task"] == "fill-mask" and has_tensor(checkpoint, "cls.seq_relationship.weight"):
        fields["task"] = "pretraining"  # both heads are present, whichever class wrote the file
    return fields


def _bert_rules(c: BERTConfig) -> Sequence[Rule]:
    return (
        *embedding_rules("bert"),
        *block_rules("bert"),
        Rule("pooler", "bert.pooler.dense"),
        Rule("masked_lm.dense", "cls.predictions.transform.dense"),
        Rule("masked_lm.norm", "cls.predictions.transform.LayerNorm"),
        *decoder_rules(c, "cls.predictions"),
        Rule("next_sentence", "cls.seq_relationship"),
        Rule("classifier", "classifier"),
        Rule("span", "qa_outputs"),
    )


BERT = Layout(
    classes={**classes_of("Bert"), "BertForPreTraining": "pretraining"},
    fields=(*fields_of(), POSITIONS),
    rules=_bert_rules,
    prefix="bert.",
    headless_tasks=BASE,
    ignored_tensors=lambda c: (POSITION_IDS, *unread_bias(c, "cls.predictions")),
    renamed=OLD_NORMS,
    required_values=ONLY,
    ignored_keys=("pooler_*",),
    read_extra=_derive_bert,
    files=sentence_files,
    constant={"model_type": "bert"},
    tokenizer="BertTokenizer",
    outputs={**OUTPUTS, "next_sentence_logits": "seq_relationship_logits"},
)
"""``model_type`` bert."""


# RoBERTa, XLM-RoBERTa and CamemBERT, which share one architecture.


def derive_roberta(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    """Read what RoBERTa and families derived from it do not share with BERT."""
    require_types(checkpoint, values)
    return {
        **skipped_positions(checkpoint),
        "head_activation": "gelu",
        "pooler": values["task"] == "text-classification" or has_tensor(checkpoint, "pooler.dense.weight"),
        **sentence_encoder(checkpoint),
    }


def roberta_rules(c: BERTConfig, base: str = "roberta") -> Sequence[Rule]:
    """Return the rules of RoBERTa, and of families with another name of the base model."""
    return (
        *embedding_rules(base),
        *block_rules(base),
        *classifier_rules(c),
        *([] if c.task == "text-classification" else [Rule("pooler", f"{base}.pooler.dense")]),
        Rule("masked_lm.dense", "lm_head.dense"),
        Rule("masked_lm.norm", "lm_head.layer_norm"),
        *decoder_rules(c, "lm_head"),
        Rule("span", "qa_outputs"),
    )


ROBERTA = Layout(
    classes=classes_of("Roberta"),
    fields=fields_of(),
    rules=roberta_rules,
    prefix="roberta.",
    headless_tasks=BASE,
    # Old classifier checkpoints also contain the encoder's unused pooler.
    ignored_tensors=lambda c: (POSITION_IDS, r"roberta\.pooler\..*", *unread_bias(c, "lm_head")),
    renamed=OLD_NORMS,
    required_values=ONLY,
    ignored_keys=("max_position_embeddings",),
    read_extra=derive_roberta,
    write_extra=lambda c: {"max_position_embeddings": c.position_rows},
    files=sentence_files,
    constant={"model_type": "roberta"},
    tokenizer="RobertaTokenizer",
    outputs=OUTPUTS,
)
"""``model_type`` roberta."""
_PIECES = PieceTokens(**FAIRSEQ_TOKENS, last=("<mask>",), single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>")
XLM_ROBERTA = replace(
    ROBERTA,
    classes=classes_of("XLMRoberta"),
    sentencepiece={"XLMRobertaTokenizer": lambda _: _PIECES},
    constant={"model_type": "xlm-roberta"},
    tokenizer="XLMRobertaTokenizer",
)
"""``model_type`` xlm-roberta."""
_CAMEMBERT_FIRST = ("<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED")
CAMEMBERT = replace(
    ROBERTA,
    classes=classes_of("Camembert"),
    sentencepiece={"CamembertTokenizer": lambda _: replace(_PIECES, first=_CAMEMBERT_FIRST, replaced=1)},
    constant={"model_type": "camembert"},
    tokenizer="CamembertTokenizer",
)
"""``model_type`` camembert."""


# DistilBERT.


def _derive_distilbert(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    return {
        "type_vocab_size": 0,
        "norm_eps": 1e-12,
        "pooler": values["task"] == "text-classification",
        "pooler_activation": "relu",
        **sentence_encoder(checkpoint),
    }


DISTILBERT = Layout(
    classes=classes_of("DistilBert"),
    fields=(
        Field("vocab_size"),
        POSITIONS,
        Field("dim", "hidden_size"),
        Field("n_layers", "num_layers"),
        Field("n_heads", "num_heads"),
        Field("hidden_dim", "intermediate_size"),
        Field("activation", default="gelu", values=ACTIVATIONS),
        Field("dropout", default=0.1),
        Field("tie_word_embeddings", "tie_embeddings", default=True),
    ),
    rules=(
        *embedding_rules("distilbert"),
        Rule("blocks.*.attention.query", "distilbert.transformer.layer.*.attention.q_lin"),
        Rule("blocks.*.attention.key", "distilbert.transformer.layer.*.attention.k_lin"),
        Rule("blocks.*.attention.value", "distilbert.transformer.layer.*.attention.v_lin"),
        Rule("blocks.*.attention.output", "distilbert.transformer.layer.*.attention.out_lin"),
        Rule("blocks.*.norm_1", "distilbert.transformer.layer.*.sa_layer_norm"),
        Rule("blocks.*.mlp.up", "distilbert.transformer.layer.*.ffn.lin1"),
        Rule("blocks.*.mlp.down", "distilbert.transformer.layer.*.ffn.lin2"),
        Rule("blocks.*.norm_2", "distilbert.transformer.layer.*.output_layer_norm"),
        Rule("masked_lm.dense", "vocab_transform"),
        Rule("masked_lm.norm", "vocab_layer_norm"),
        Rule("masked_lm.decoder", "vocab_projector"),
        Rule("pooler", "pre_classifier"),
        Rule("classifier", "classifier"),
        Rule("span", "qa_outputs"),
    ),
    prefix="distilbert.",
    headless_tasks=BASE,
    ignored_tensors=(POSITION_IDS,),
    renamed=OLD_NORMS,
    ignored_keys=("attention_dropout", "qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds", "tie_weights_"),
    read_extra=_derive_distilbert,
    files=sentence_files,
    constant={"model_type": "distilbert"},
    tokenizer="BertTokenizer",
    outputs=OUTPUTS,
)
"""``model_type`` distilbert."""


# ALBERT.


def _derive_albert(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    require_types(checkpoint, values)
    fields = {
        "project_embeddings": True,
        "share_layers": True,
        "pooler": values["task"] == "text-classification" or has_tensor(checkpoint, "pooler.weight"),
        **sentence_encoder(checkpoint),
    }
    if values["task"] == "fill-mask" and has_tensor(checkpoint, "sop_classifier.classifier.weight"):
        fields["task"] = "pretraining"  # both heads are present, whichever class wrote the file
    return fields


def _albert_rules(c: BERTConfig) -> Sequence[Rule]:
    block = "albert.encoder.albert_layer_groups.0.albert_layers.0"
    return (
        *embedding_rules("albert"),
        Rule("embeddings.projection", "albert.encoder.embedding_hidden_mapping_in"),
        Rule("blocks.0.attention.query", f"{block}.attention.query"),
        Rule("blocks.0.attention.key", f"{block}.attention.key"),
        Rule("blocks.0.attention.value", f"{block}.attention.value"),
        Rule("blocks.0.attention.output", f"{block}.attention.dense"),
        Rule("blocks.0.norm_1", f"{block}.attention.LayerNorm"),
        Rule("blocks.0.mlp.up", f"{block}.ffn"),
        Rule("blocks.0.mlp.down", f"{block}.ffn_output"),
        Rule("blocks.0.norm_2", f"{block}.full_layer_layer_norm"),
        Rule("pooler", "albert.pooler"),
        Rule("masked_lm.dense", "predictions.dense"),
        Rule("masked_lm.norm", "predictions.LayerNorm"),
        *decoder_rules(c, "predictions"),
        Rule("next_sentence", "sop_classifier.classifier"),
        Rule("classifier", "classifier"),
        Rule("span", "qa_outputs"),
    )


ALBERT = Layout(
    classes={**classes_of("Albert"), "AlbertForPreTraining": "pretraining"},
    fields=(*fields_of(activation="gelu_new", dropout=0.0), POSITIONS, Field("embedding_size", default=128)),
    rules=_albert_rules,
    prefix="albert.",
    headless_tasks=BASE,
    ignored_tensors=lambda c: (POSITION_IDS, *unread_bias(c, "predictions")),
    renamed=OLD_NORMS,
    required_values={**ONLY, "num_hidden_groups": 1, "inner_group_num": 1},
    ignored_keys=("down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks"),
    read_extra=_derive_albert,
    files=sentence_files,
    constant={"model_type": "albert"},
    tokenizer="AlbertTokenizer",
    outputs={**OUTPUTS, "next_sentence_logits": "sop_logits"},
)
"""``model_type`` albert."""


# ELECTRA.


def _derive_electra(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    require_types(checkpoint, values)
    return {
        "head_activation": "gelu",
        "pooler": values["task"] == "text-classification",
        "pooler_activation": "gelu",
        **sentence_encoder(checkpoint),
    }


def _electra_rules(c: BERTConfig) -> Sequence[Rule]:
    return (
        *embedding_rules("electra"),
        Rule("embeddings.projection", "electra.embeddings_project"),
        *block_rules("electra"),
        *classifier_rules(c),
        Rule("masked_lm.dense", "generator_predictions.dense"),
        Rule("masked_lm.norm", "generator_predictions.LayerNorm"),
        Rule("masked_lm.decoder", "generator_lm_head"),
        Rule("replaced.dense", "discriminator_predictions.dense"),
        Rule("replaced.output", "discriminator_predictions.dense_prediction"),
        Rule("span", "qa_outputs"),
    )


ELECTRA = Layout(
    classes={**classes_of("Electra"), "ElectraForPreTraining": "replaced-token-detection"},
    fields=(*fields_of(), POSITIONS, Field("embedding_size", default=128)),
    rules=_electra_rules,
    prefix="electra.",
    headless_tasks=BASE,
    ignored_tensors=(POSITION_IDS,),
    renamed=OLD_NORMS,
    required_values=ONLY,
    read_extra=_derive_electra,
    files=sentence_files,
    constant={"model_type": "electra"},
    tokenizer="BertTokenizer",
    outputs=OUTPUTS,
)
"""``model_type`` electra."""
