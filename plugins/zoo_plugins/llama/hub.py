"""Llama, Mistral, Qwen, Seed-OSS and CWM checkpoints in the hub's layout.

They have one set of tensors and seven kinds of config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo import UsageError
from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, Rule
from zoo_plugins.llama.config import LlamaConfig
from zoo_plugins.llama.hub_rope import ROPE_KEYS, read_common, write_rope
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

__all__ = ["CWM", "LLAMA", "MINISTRAL", "MISTRAL", "QWEN2", "QWEN3", "SEED_OSS"]

_RULES = (
    *BLOCK_RULES,
    *ATTENTION_RULES,
    *MLP_RULES,
    Rule("blocks.*.norm_2", "model.layers.*.post_attention_layernorm"),
)
_COMMON_FIELDS = (
    Field("hidden_act", "activation", default="silu", values=ACTIVATIONS),
    Field("tie_word_embeddings", "tie_embeddings", default=False),
)
_FIELDS = (*fields_of(), *_COMMON_FIELDS)
_WINDOW_KEYS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")

_CWM_SCALING = {
    "rope_scaling": "llama3",
    "rope_factor": 16.0,
    "rope_low_freq_factor": 1.0,
    "rope_high_freq_factor": 4.0,
    "rope_original_length": 8192,
}
"""Default scaling of CWM."""

# The exporter reads its config.json back, and rejects settings that this layout cannot express.


def _derive_llama(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    if checkpoint.config.get("rope_interleaved"):
        raise UsageError("rope_interleaved True is not supported", checkpoint.config_file)
    return {"attention_output_bias": values["attention_bias"], **read_common(checkpoint, values)}


def _derive_mistral(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    return {"sliding_windows": (checkpoint.config.get("sliding_window", 4096) or 0,), **read_common(checkpoint, values)}


def _restore_mistral(c: LlamaConfig) -> Mapping[str, Any]:
    return {"sliding_window": c.window(0), **write_rope(c)}


def _derive_ministral(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    """Read windows, which by default all layers have."""
    hub, where = checkpoint.config, checkpoint.config_file
    count = LlamaConfig.check_field("num_layers", values["num_layers"], where)
    window = hub.get("sliding_window", 4096)
    default = kinds_of_layers([window is not None] * count)
    return {
        **read_common(checkpoint, values),
        **read_windows(hub.get("layer_types") or default, window, values, where),
    }


def _derive_cwm(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    """Read windows, which by default all but every fourth layer has, from the second on, and scaled frequencies."""
    hub, where = checkpoint.config, checkpoint.config_file
    count = LlamaConfig.check_field("num_layers", values["num_layers"], where)
    default = kinds_of_layers([layer % 4 != 0 for layer in range(count)])
    window = hub.get("sliding_window", 8192)
    rope = read_common(checkpoint, values, theta=1000000.0)
    if hub.get("rope_parameters") is None and hub.get("rope_scaling") is None:
        rope |= _CWM_SCALING
    return {**rope, **read_windows(hub.get("layer_types") or default, window or None, values, where)}


def _restore_windows(c: LlamaConfig) -> Mapping[str, Any]:
    return {**write_rope(c), **write_windows(c)}


def _qwen_windows(checkpoint: Checkpoint, values: Mapping[str, Any]) -> dict[str, Any]:
    """Read Qwen's sliding window, which applies to the listed layers, or to all from ``max_window_layers`` on."""
    hub, where = checkpoint.config, checkpoint.config_file
    count = LlamaConfig.check_field("num_layers", values["num_layers"], where)
    window = hub.get("sliding_window", 4096) if hub.get("use_sliding_window", False) else None
    first = hub.get("max_window_layers", 28)
    if not isinstance(first, int):
        raise UsageError(f"max_window_layers must be int, got {first!r}", where)
    default = kinds_of_layers([window is not None and layer >= first for layer in range(count)])
    return read_windows(hub.get("layer_types") or default, window, values, where)


def _derive_qwen2(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    return {"attention_bias": True, **read_common(checkpoint, values), **_qwen_windows(checkpoint, values)}


def _derive_qwen3(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    return {"qk_norm": True, **_derive_llama(checkpoint, values), **_qwen_windows(checkpoint, values)}


def _restore_qwen(c: LlamaConfig) -> Mapping[str, Any]:
    local = [c.window(layer) is not None for layer in range(c.num_layers)]
    return {
        **write_rope(c),
        **write_windows(c),
        "use_sliding_window": any(local),
        "max_window_layers": local.index(True) if any(local) else c.num_layers,
    }


LLAMA = Layout(
    classes=classes_of("Llama"),
    fields=(
        *_FIELDS,
        Field("max_position_embeddings", "max_seq_len", default=2048),
        Field("num_key_value_heads", "num_kv_heads", default=None),
        Field("head_dim", default=None),
        Field("attention_bias", default=False),
        Field("mlp_bias", default=False),
    ),
    rules=_RULES,
    ignored_keys=(*ROPE_KEYS, "rope_interleaved"),
    read_extra=_derive_llama,
    write_extra=write_rope,
    constant={"model_type": "llama", **NO_TOKENS},
    **COMMON,
)
"""``model_type`` llama."""

MISTRAL = Layout(
    classes=classes_of("Mistral"),
    fields=(
        *_FIELDS,
        Field("max_position_embeddings", "max_seq_len", default=131072),
        Field("num_key_value_heads", "num_kv_heads", default=8),
        Field("head_dim", default=None),
    ),
    rules=_RULES,
    ignored_keys=(*ROPE_KEYS, "sliding_window"),
    read_extra=_derive_mistral,
    write_extra=_restore_mistral,
    constant={"model_type": "mistral", **NO_TOKENS},
    tokenizer="TokenizersBackend",
    **COMMON,
)
"""``model_type`` mistral."""

QWEN2 = Layout(
    classes=classes_of("Qwen2"),
    fields=(
        *_FIELDS,
        Field("max_position_embeddings", "max_seq_len", default=32768),
        Field("num_key_value_heads", "num_kv_heads", default=32),
        Field("head_dim", default=None),
    ),
    rules=_RULES,
    ignored_keys=(*ROPE_KEYS, *_WINDOW_KEYS),
    read_extra=_derive_qwen2,
    write_extra=_restore_qwen,
    constant={"model_type": "qwen2", **NO_TOKENS},
    tokenizer="Qwen2Tokenizer",
    overrides_tokenizer=True,
    **COMMON,
)
"""``model_type`` qwen2, also used by Qwen 1.5 and 2.5."""

QWEN3 = Layout(
    classes=classes_of("Qwen3"),
    fields=(
        *_FIELDS,
        Field("max_position_embeddings", "max_seq_len", default=32768),
        Field("num_key_value_heads", "num_kv_heads", default=32),
        Field("head_dim", default=128),
        Field("attention_bias", default=False),
    ),
    rules=_RULES,
    ignored_keys=(*ROPE_KEYS, *_WINDOW_KEYS),
    read_extra=_derive_qwen3,
    write_extra=_restore_qwen,
    constant={"model_type": "qwen3", **NO_TOKENS},
    tokenizer="Qwen2Tokenizer",
    **COMMON,
)
"""``model_type`` qwen3."""

MINISTRAL = Layout(
    classes=classes_of("Ministral"),
    fields=(
        *_FIELDS,
        Field("max_position_embeddings", "max_seq_len", default=131072),
        Field("num_key_value_heads", "num_kv_heads", default=8),
        Field("head_dim", default=None),
    ),
    rules=_RULES,
    ignored_keys=(*ROPE_KEYS, "sliding_window", "layer_types"),
    read_extra=_derive_ministral,
    write_extra=_restore_windows,
    constant={"model_type": "ministral", **NO_TOKENS},
    tokenizer="TokenizersBackend",
    **COMMON,
)
"""``model_type`` ministral."""

SEED_OSS = Layout(
    classes=classes_of("SeedOss"),
    fields=(
        *fields_of(dropout=0.1),
        *_COMMON_FIELDS,
        Field("max_position_embeddings", "max_seq_len", default=524288),
        Field("num_key_value_heads", "num_kv_heads", default=8),
        Field("head_dim", default=128),
        Field("attention_bias", default=True),
        Field("attention_out_bias", "attention_output_bias", default=False),
        Field("mlp_bias", default=False),
        Field("pad_token_id", default=1),
    ),
    rules=_RULES,
    ignored_keys=ROPE_KEYS,
    read_extra=read_common,
    write_extra=write_rope,
    constant={"model_type": "seed_oss", **NO_TOKENS},
    **COMMON,
)
"""``model_type`` seed_oss."""

CWM = Layout(
    classes={"CwmForCausalLM": "text-generation", "CwmModel": "sentence-embedding"},
    fields=(
        *fields_of(eps=1e-5),
        *_COMMON_FIELDS,
        Field("max_position_embeddings", "max_seq_len", default=131072),
        Field("num_key_value_heads", "num_kv_heads", default=8),
        Field("head_dim", default=128),
        Field("mlp_bias", default=False),
    ),
    rules=_RULES,
    ignored_keys=(*ROPE_KEYS, "sliding_window", "layer_types"),
    read_extra=_derive_cwm,
    write_extra=_restore_windows,
    constant={"model_type": "cwm", "eos_token_id": None},
    **COMMON,
)
"""``model_type`` cwm."""
