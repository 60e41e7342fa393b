"""ModernBERT checkpoints in the hub's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zoo import UsageError
from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, Rule
from zoo_plugins.bert.hub_shared import BASE, OUTPUTS, classes_of
from zoo_plugins.bert.sentence import PROJECTIONS, sentence_encoder, sentence_files
from zoo_plugins.modernbert.config import ModernBERTConfig

__all__ = ["MODERNBERT"]

_FULL, _LOCAL = "full_attention", "sliding_attention"
_LAYER = "model.layers.*"


def _rules(c: ModernBERTConfig) -> Sequence[Rule]:
    return (
        Rule("token_embedding", "model.embeddings.tok_embeddings"),
        Rule("embedding_norm", "model.embeddings.norm"),
        Rule("blocks.*.norm_1", f"{_LAYER}.attn_norm"),
        Rule(("blocks.*.attention.query", "blocks.*.attention.key", "blocks.*.attention.value"), f"{_LAYER}.attn.Wqkv"),
        Rule("blocks.*.attention.output", f"{_LAYER}.attn.Wo"),
        Rule("blocks.*.norm_2", f"{_LAYER}.mlp_norm"),
        Rule(("blocks.*.mlp.gate", "blocks.*.mlp.up"), f"{_LAYER}.mlp.Wi"),
        Rule("blocks.*.mlp.down", f"{_LAYER}.mlp.Wo"),
        Rule("norm", "model.final_norm"),
        Rule("head", "head"),
        Rule("decoder", "decoder"),
        PROJECTIONS,
        Rule("span" if c.task == "question-answering" else "classifier", "classifier"),
    )


def _theta(checkpoint: Checkpoint, kind: str, old: str, default: float) -> Any:
    """Read the base of the rotary frequencies in one kind of layer, from the keys of transformers 5 or 4."""
    hub, where = checkpoint.config, checkpoint.config_file
    both = hub.get("rope_parameters") or {}
    said = (both.get(kind) or {}) if isinstance(both, dict) else both
    if not isinstance(said, dict) or said.get("rope_type", "default") != "default":
        raise UsageError(f"rope_parameters {both!r} are not supported", where, "known: rope_type default")
    return said.get("rope_theta", hub.get(old, default))


def _derive(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    """Read the kinds of layers: those listed, or by default every third layer sees all tokens."""
    hub, where = checkpoint.config, checkpoint.config_file
    count = ModernBERTConfig.check_field("num_layers", values["num_layers"], where)
    period, window = hub.get("global_attn_every_n_layers", 3), hub.get("local_attention", 128)
    for name, value, least in (("global_attn_every_n_layers", period, 1), ("local_attention", window, 2)):
        if not isinstance(value, int) or value < least:
            raise UsageError(f"{name} must be at least {least}, got {value!r}", where)
    kinds = hub.get("layer_types") or [_LOCAL if layer % period else _FULL for layer in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in (_FULL, _LOCAL) for kind in kinds):
        raise UsageError(f"layer_types must name {count} layers, each {_FULL} or {_LOCAL}, got {kinds!r}", where)
    return {
        "sliding_windows": tuple(window // 2 * 2 if kind == _LOCAL else 0 for kind in kinds),
        "rope_theta": _theta(checkpoint, _FULL, "global_rope_theta", 160000.0),
        "local_rope_theta": _theta(checkpoint, _LOCAL, "local_rope_theta", 10000.0),
        **sentence_encoder(checkpoint),
    }


def _restore(c: ModernBERTConfig) -> Mapping[str, Any]:
    windows = [c.window(layer) for layer in range(c.num_layers)]
    return {
        "layer_types": [_FULL if window is None else _LOCAL for window in windows],
        "local_attention": max(filter(None, windows), default=128),
        "global_rope_theta": c.rope_theta,
        "local_rope_theta": c.local_rope_theta,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta}
            for kind, theta in ((_FULL, c.rope_theta), (_LOCAL, c.local_rope_theta))
        },
        "embedding_dropout": c.dropout,
        "mlp_dropout": c.dropout,
        "classifier_dropout": c.dropout,
    }


MODERNBERT = Layout(
    classes=classes_of("ModernBert"),
    fields=(
        Field("vocab_size"),
        Field("max_position_embeddings", "max_seq_len", default=8192),
        Field("hidden_size"),
        Field("num_hidden_layers", "num_layers"),
        Field("num_attention_heads", "num_heads"),
        Field("intermediate_size", default=1152),
        Field("hidden_activation", "activation", default="gelu", values=ACTIVATIONS),
        Field("classifier_activation", "head_activation", default="gelu", values=ACTIVATIONS),
        Field("norm_eps", default=1e-5),
        Field("norm_bias", default=False),
        Field("attention_bias", default=False),
        Field("mlp_bias", default=False),
        Field("classifier_bias", "head_bias", default=False),
        Field("decoder_bias", default=True),
        Field("attention_dropout", "dropout", default=0.0),
        Field("classifier_pooling", "pooling", default="cls", values={"cls": "cls", "mean": "mean"}),
        Field("tie_word_embeddings", "tie_embeddings", default=True),
        Field("pad_token_id", default=50283),
    ),
    rules=_rules,
    prefix="model.",
    headless_tasks=BASE,
    ignored_keys=(
        "layer_types",
        "local_attention",
        "global_attn_every_n_layers",
        "rope_parameters",
        "global_rope_theta",
        "local_rope_theta",
        "*_dropout",
        "initializer_cutoff_factor",
        "deterministic_flash_attn",
        "sparse_*",
        "reference_compile",
        "repad_logits_with_grad",
        "position_embedding_type",
        "layer_norm_eps",  # in published files beside norm_eps, and not read by the original
    ),
    read_extra=_derive,
    write_extra=_restore,
    files=sentence_files,
    constant={"model_type": "modernbert"},
    tokenizer="TokenizersBackend",
    overrides_tokenizer=True,
    outputs=OUTPUTS,
)
"""``model_type`` modernbert."""
