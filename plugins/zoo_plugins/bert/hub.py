"""BERT checkpoints in the hub's layout, and sentence encoders in that of sentence-transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, Rule
from zoo.errors import UsageError
from zoo_plugins.bert.config import BERTConfig

__all__ = ["BERT"]

_POOLING = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}


def _derive(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    pooler = any(name.endswith("pooler.dense.weight") for name in checkpoint.tensors)
    found: dict[str, Any] = {"pooler": pooler, **_sentence_encoder(checkpoint)}
    if values["task"] == "fill-mask" and "cls.seq_relationship.weight" in checkpoint.tensors:
        found["task"] = "pretraining"  # whatever class wrote it, both heads are there
    return found


def _sentence_encoder(checkpoint: Checkpoint) -> dict[str, Any]:
    """Pooling and normalisation, when sentence-transformers wrote the directory."""
    pooling = checkpoint.json("1_Pooling/config.json")
    if not pooling:
        return {}
    where = checkpoint.path / "1_Pooling/config.json"
    modes = [key for key, value in pooling.items() if key.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in _POOLING:
        raise UsageError(f"pooling {', '.join(modes)} is not supported", where, f"known: {', '.join(_POOLING)}")
    listed = (checkpoint.path / "modules.json").read_text(encoding="utf-8")
    return {
        "task": "sentence-embedding",
        "pooling": _POOLING[modes[0]],
        "normalize": "models.Normalize" in listed,
    }


def _rules(c: BERTConfig) -> Sequence[Rule]:
    tied = [Rule("masked_lm.decoder.bias", "cls.predictions.bias")] if c.tie_embeddings else []
    return (
        Rule("embeddings.token", "bert.embeddings.word_embeddings"),
        Rule("embeddings.position", "bert.embeddings.position_embeddings"),
        Rule("embeddings.token_type", "bert.embeddings.token_type_embeddings"),
        Rule("embeddings.norm", "bert.embeddings.LayerNorm"),
        Rule("blocks.*.attention.query", "bert.encoder.layer.*.attention.self.query"),
        Rule("blocks.*.attention.key", "bert.encoder.layer.*.attention.self.key"),
        Rule("blocks.*.attention.value", "bert.encoder.layer.*.attention.self.value"),
        Rule("blocks.*.attention.output", "bert.encoder.layer.*.attention.output.dense"),
        Rule("blocks.*.norm_1", "bert.encoder.layer.*.attention.output.LayerNorm"),
        Rule("blocks.*.mlp.up", "bert.encoder.layer.*.intermediate.dense"),
        Rule("blocks.*.mlp.down", "bert.encoder.layer.*.output.dense"),
        Rule("blocks.*.norm_2", "bert.encoder.layer.*.output.LayerNorm"),
        Rule("pooler", "bert.pooler.dense"),
        Rule("masked_lm.dense", "cls.predictions.transform.dense"),
        Rule("masked_lm.norm", "cls.predictions.transform.LayerNorm"),
        *tied,
        Rule("masked_lm.decoder", "cls.predictions.decoder"),
        Rule("next_sentence", "cls.seq_relationship"),
        Rule("classifier", "classifier"),
    )


def _files(c: BERTConfig) -> Mapping[str, Any]:
    """The parts of a sentence encoder, as sentence-transformers lists them."""
    if c.task != "sentence-embedding":
        return {}
    parts = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if c.normalize else [])]
    return {
        "modules.json": [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
            for number, (path, name) in enumerate(parts)
        ],
        "1_Pooling/config.json": {
            "word_embedding_dimension": c.hidden_size,
            **{mode: c.pooling == ours for mode, ours in _POOLING.items()},
        },
    }


BERT = Layout(
    classes={
        "BertModel": ("feature-extraction", "sentence-embedding"),
        "BertForMaskedLM": "fill-mask",
        "BertForPreTraining": "pretraining",
        "BertForSequenceClassification": "text-classification",
    },
    fields=(
        Field("vocab_size"),
        Field("type_vocab_size", default=2),
        Field("max_position_embeddings", "max_seq_len", default=512),
        Field("hidden_size"),
        Field("num_hidden_layers", "num_layers"),
        Field("num_attention_heads", "num_heads"),
        Field("intermediate_size"),
        Field("hidden_act", "activation", default="gelu", values=ACTIVATIONS),
        Field("layer_norm_eps", "norm_eps", default=1e-12),
        Field("hidden_dropout_prob", "dropout", default=0.1),
        Field("tie_word_embeddings", "tie_embeddings", default=True),
    ),
    rules=_rules,
    prefix="bert.",
    bare=("feature-extraction", "sentence-embedding"),
    ignored=lambda c: (r".*position_ids", *(() if c.tie_embeddings else (r"cls\.predictions\.bias",))),
    renamed=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
    only={"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False},
    inert=("attention_probs_dropout_prob", "classifier_dropout", "directionality", "pooler_*"),
    derive=_derive,
    files=_files,
    constant={"model_type": "bert"},
    outputs={
        "logits": "prediction_logits",
        "next_sentence_logits": "seq_relationship_logits",
        "sentence_embedding": "",  # the encoder's task alone
    },
)
"""``model_type`` bert."""
