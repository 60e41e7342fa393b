"""BERT checkpoints in the hub's layout, and sentence encoders in that of sentence-transformers."""

from __future__ import annotations

from typing import Any

from zoo.errors import ArtifactError, UsageError
from zoo.importing import Checkpoint, Rules
from zoo.tokenizer import find_tokenizer, load_tokenizer

_FIELDS = {
    "vocab_size": "vocab_size",
    "type_vocab_size": "type_vocab_size",
    "max_position_embeddings": "max_seq_len",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "intermediate_size",
    "layer_norm_eps": "norm_eps",
    "hidden_dropout_prob": "dropout",
}
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}
_TASKS = {
    "BertModel": "feature-extraction",
    "BertForMaskedLM": "fill-mask",
    "BertForPreTraining": "pretraining",
    "BertForSequenceClassification": "text-classification",
}
_BIASES = ("cls.predictions.bias", "cls.predictions.decoder.bias")
"""One bias under two names where the head is tied; where it is not, only the second is added."""
_ONLY = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    hub, where = checkpoint.config, checkpoint.path / "config.json"
    for key, wanted in _ONLY.items():
        if hub.get(key, wanted) != wanted:
            raise UsageError(f"{key} {hub[key]!r} is not supported, only {wanted!r}", where)
    activation = hub.get("hidden_act", "gelu")
    if activation not in _ACTIVATIONS:
        raise UsageError(f"hidden_act {activation!r} is not supported", where, f"known: {', '.join(_ACTIVATIONS)}")
    values: dict[str, Any] = {ours: hub[theirs] for theirs, ours in _FIELDS.items() if theirs in hub}
    values["activation"] = _ACTIVATIONS[activation]
    names = set(checkpoint.tensors)
    values["pooler"] = any(name.endswith("pooler.dense.weight") for name in names)
    values |= _sentence_encoder(checkpoint) or {"task": _task(checkpoint, names)}
    if values["task"] in ("fill-mask", "pretraining"):
        values["tie_embeddings"] = hub.get("tie_word_embeddings", True)
        biases = [checkpoint.tensors[name] for name in _BIASES if name in names]
        if values["tie_embeddings"] and len(biases) > 1 and not biases[0].equal(biases[1]):
            raise ArtifactError(f"{' and '.join(_BIASES)} differ, though the head is tied", checkpoint.path)
        values["mask_token_id"] = _mask_token(checkpoint)
    if values["task"] == "text-classification":
        values["num_classes"] = len(hub["id2label"]) if "id2label" in hub else hub.get("num_labels", 2)
    return values


def _task(checkpoint: Checkpoint, names: set[str]) -> str:
    """By the class that wrote the checkpoint, unless its tensors show that it holds both pre-training heads."""
    written_by = (checkpoint.config.get("architectures") or ["BertModel"])[0]
    if written_by not in _TASKS:
        raise UsageError(
            f"{written_by} is not supported", checkpoint.path / "config.json", f"known: {', '.join(_TASKS)}"
        )
    task = _TASKS[written_by]
    return "pretraining" if task == "fill-mask" and "cls.seq_relationship.weight" in names else task


def _sentence_encoder(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Pooling and normalisation, when sentence-transformers wrote the directory."""
    pooling = checkpoint.json("1_Pooling/config.json")
    if not pooling:
        return None
    where = checkpoint.path / "1_Pooling/config.json"
    modes = [key for key, value in pooling.items() if key.startswith("pooling_mode_") and value is True]
    known = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
    if len(modes) != 1 or modes[0] not in known:
        raise UsageError(f"pooling {', '.join(modes)} is not supported", where, f"known: {', '.join(known)}")
    listed = (checkpoint.path / "modules.json").read_text(encoding="utf-8")
    return {
        "task": "sentence-embedding",
        "pooling": known[modes[0]],
        "normalize": "models.Normalize" in listed,
    }


def _mask_token(checkpoint: Checkpoint) -> int | None:
    token = (checkpoint.json("special_tokens_map.json") or checkpoint.json("tokenizer_config.json")).get(
        "mask_token", "[MASK]"
    )
    path = find_tokenizer(checkpoint.path)
    name = token["content"] if isinstance(token, dict) else token
    found: int | None = load_tokenizer(path).token_to_id(name) if path and name else None
    return found


RULES = Rules(
    config=_config,
    ignored=(r".*position_ids",),
    superseded=(_BIASES,),
    names=(
        (r"^bert\.", ""),
        (r"LayerNorm\.gamma$", "LayerNorm.weight"),
        (r"LayerNorm\.beta$", "LayerNorm.bias"),
        (r"^embeddings\.(word|position|token_type)_embeddings\.", r"embeddings.\1."),
        (r"^embeddings\.word\.", "embeddings.token."),
        (r"^embeddings\.LayerNorm\.", "embeddings.norm."),
        (r"^encoder\.layer\.(\d+)\.attention\.self\.", r"blocks.\1.attention."),
        (r"^encoder\.layer\.(\d+)\.attention\.output\.dense\.", r"blocks.\1.attention.output."),
        (r"^encoder\.layer\.(\d+)\.attention\.output\.LayerNorm\.", r"blocks.\1.norm_1."),
        (r"^encoder\.layer\.(\d+)\.intermediate\.dense\.", r"blocks.\1.mlp.up."),
        (r"^encoder\.layer\.(\d+)\.output\.dense\.", r"blocks.\1.mlp.down."),
        (r"^encoder\.layer\.(\d+)\.output\.LayerNorm\.", r"blocks.\1.norm_2."),
        (r"^pooler\.dense\.", "pooler."),
        (r"^cls\.predictions\.transform\.dense\.", "masked_lm.dense."),
        (r"^cls\.predictions\.transform\.LayerNorm\.", "masked_lm.norm."),
        (r"^cls\.predictions\.bias$", "masked_lm.decoder.bias"),
        (r"^cls\.predictions\.decoder\.", "masked_lm.decoder."),
        (r"^cls\.seq_relationship\.", "next_sentence."),
    ),
)
