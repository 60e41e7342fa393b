"""Phi-3 and SmolLM3 checkpoints in the hub's layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo import UsageError
from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, Rule
from zoo_plugins.bert.sentence import sentence_encoder
from zoo_plugins.llama.config import LlamaConfig
from zoo_plugins.llama.hub_rope import (
    ROPE_KEYS,
    read_common,
    read_partial_rotation,
    write_partial_rotation,
    write_rope,
)
from zoo_plugins.llama.hub_shared import (
    ATTENTION_RULES,
    BLOCK_RULES,
    COMMON,
    MLP_RULES,
    NO_TOKENS,
    classes_of,
    fields_of,
    kinds_of_layers,
    read_windows,
    write_windows,
)

__all__ = ["PHI3", "SMOLLM3"]

_NORM_2 = Rule("blocks.*.norm_2", "model.layers.*.post_attention_layernorm")
_JOINED = (
    Rule(
        ("blocks.*.attention.query", "blocks.*.attention.key", "blocks.*.attention.value"),
        "model.layers.*.self_attn.qkv_proj",
    ),
    Rule(("blocks.*.mlp.gate", "blocks.*.mlp.up"), "model.layers.*.mlp.gate_up_proj"),
)
_FIELDS = (
    Field("hidden_act", "activation", default="silu", values=ACTIVATIONS),
    Field("head_dim", default=None),
)


def _derive_phi3(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    """Read rotary positions; "su" and "yarn" are old names of longrope."""
    hub, where = checkpoint.config, checkpoint.config_file
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        if hub.get(key):
            raise UsageError(f"{key} {hub[key]!r} is not supported", where)
    width, heads = (LlamaConfig.check_field(key, values[key], where) for key in ("hidden_size", "num_heads"))
    return {
        **read_partial_rotation(
            hub,
            where,
            values["head_dim"] or width // max(heads, 1),
            kinds={"longrope": "longrope", "su": "longrope", "yarn": "longrope"},
            length=hub.get("max_position_embeddings", values["max_seq_len"]),
            original=hub.get("original_max_position_embeddings", 4096),
        ),
        **sentence_encoder(checkpoint),
        "sliding_windows": (hub.get("sliding_window") or 0,),
    }


def _restore_phi3(c: LlamaConfig) -> Mapping[str, Any]:
    return {**write_partial_rotation(c), "sliding_window": c.window(0)}


def _derive_smollm3(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    """Read the layers without rotation, by default every fourth; only those may have a window by default."""
    hub, where = checkpoint.config, checkpoint.config_file
    count = LlamaConfig.check_field("num_layers", values["num_layers"], where)
    period = hub.get("no_rope_layer_interval", 4)
    if not isinstance(period, int) or period < 1:
        raise UsageError(f"no_rope_layer_interval must be positive, got {period!r}", where)
    turned = hub.get("no_rope_layers") or [int((layer + 1) % period != 0) for layer in range(count)]
    if not isinstance(turned, list) or len(turned) < count or any(item not in (0, 1) for item in turned):
        raise UsageError(f"no_rope_layers must be a list of {count} layers, each 0 or 1, got {turned!r}", where)
    window = hub.get("sliding_window") if hub.get("use_sliding_window", False) else None
    default = kinds_of_layers([window is not None and not item for item in turned[:count]])
    return {
        "attention_output_bias": values["attention_bias"],
        "rope_layers": tuple(bool(item) for item in turned[:count]),
        **read_common(checkpoint, values, theta=2000000.0),
        **read_windows(hub.get("layer_types") or default, window, values, where),
    }


def _restore_smollm3(c: LlamaConfig) -> Mapping[str, Any]:
    return {
        **write_rope(c),
        **write_windows(c),
        "use_sliding_window": any(c.sliding_windows),
        "no_rope_layers": [int(c.rotates(layer)) for layer in range(c.num_layers)],
    }


PHI3 = Layout(
    classes=classes_of("Phi3"),
    fields=(
        *fields_of(eps=1e-5),
        *_FIELDS,
        Field("max_position_embeddings", "max_seq_len", default=4096),
        Field("num_key_value_heads", "num_kv_heads", default=None),
        Field("tie_word_embeddings", "tie_embeddings", default=False),
        Field("pad_token_id", default=32000),
    ),
    rules=(*BLOCK_RULES, *_JOINED, _NORM_2),
    ignored_keys=(
        *ROPE_KEYS,
        "partial_rotary_factor",
        "sliding_window",
        "attention_bias",
        "mlp_bias",
        "lm_head_bias",
    ),
    read_extra=_derive_phi3,
    write_extra=_restore_phi3,
    constant={"model_type": "phi3", **NO_TOKENS},
    tokenizer="TokenizersBackend",
    overrides_tokenizer=True,
    **COMMON,
)
"""``model_type`` phi3, also used by Phi-3.5 and Phi-4."""

SMOLLM3 = Layout(
    classes=classes_of("SmolLM3"),
    fields=(
        *fields_of(),
        *_FIELDS,
        Field("max_position_embeddings", "max_seq_len", default=32768),
        Field("num_key_value_heads", "num_kv_heads", default=4),
        Field("attention_bias", default=False),
        Field("mlp_bias", default=False),
        Field("tie_word_embeddings", "tie_embeddings", default=True),
        Field("pad_token_id", default=128004),
    ),
    rules=(*BLOCK_RULES, *ATTENTION_RULES, *MLP_RULES, _NORM_2),
    ignored_keys=(
        *ROPE_KEYS,
        "use_sliding_window",
        "sliding_window",
        "max_window_layers",
        "layer_types",
        "no_rope_layers",
        "no_rope_layer_interval",
    ),
    read_extra=_derive_smollm3,
    write_extra=_restore_smollm3,
    constant={"model_type": "smollm3", **NO_TOKENS},
    **COMMON,
)
"""``model_type`` smollm3. SmolLM and SmolLM2 are of ``model_type`` llama."""
