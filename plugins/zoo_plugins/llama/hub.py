"""Llama, Mistral and Qwen checkpoints in the hub's layout: one set of tensors, four kinds of config.json."""

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

__all__ = ["LLAMA", "MISTRAL", "QWEN2", "QWEN3"]

_RULES = (
    *BLOCK_RULES,
    *ATTENTION_RULES,
    *MLP_RULES,
    Rule("blocks.*.norm_2", "model.layers.*.post_attention_layernorm"),
)
_FIELDS = (
    *fields_of(),
    Field("hidden_act", "activation", default="silu", values=ACTIVATIONS),
    Field("tie_word_embeddings", "tie_embeddings", default=False),
)
_WINDOW_KEYS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")

# The exporter reads its config.json back, and rejects settings that this layout cannot express.


def _derive_llama(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    if checkpoint.config.get("rope_interleaved"):
        raise UsageError("rope_interleaved True is not supported", checkpoint.config_file)
    return {"attention_output_bias": values["attention_bias"], **read_common(checkpoint, values)}


def _derive_mistral(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    return {"sliding_windows": (checkpoint.config.get("sliding_window", 4096) or 0,), **read_common(checkpoint, values)}


def _restore_mistral(c: LlamaConfig) -> Mapping[str, Any]:
    return {"sliding_window": c.window(0), **write_rope(c)}


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
