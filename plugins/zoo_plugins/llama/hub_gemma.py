"""Gemma, Gemma 2, Gemma 3 (text) and VaultGemma checkpoints in the hub's layout."""

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
    read_rope_by_kind,
    read_windows,
    write_rope_by_kind,
    write_windows,
)

__all__ = ["GEMMA", "GEMMA2", "GEMMA3", "VAULTGEMMA"]

_VAULT_RULES = (
    *BLOCK_RULES,
    *ATTENTION_RULES,
    *MLP_RULES,
    Rule("blocks.*.norm_2", "model.layers.*.pre_feedforward_layernorm"),
)
_RULES = (
    *_VAULT_RULES,
    Rule("blocks.*.post_norm_1", "model.layers.*.post_attention_layernorm"),
    Rule("blocks.*.post_norm_2", "model.layers.*.post_feedforward_layernorm"),
)
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", **ACTIVATIONS}
_FIELDS = (
    *fields_of(),
    Field("head_dim", default=256),
    Field("attention_bias", default=False),
    Field("tie_word_embeddings", "tie_embeddings", default=True),
    Field("pad_token_id", default=0),
)
_NEWER = (
    Field("num_key_value_heads", "num_kv_heads", default=4),
    Field("hidden_activation", "activation", default="gelu_pytorch_tanh", values=_ACTIVATIONS),
)
_CAPPED = (
    *_FIELDS,
    *_NEWER,
    Field("max_position_embeddings", "max_seq_len", default=8192),
    Field("attn_logit_softcapping", "attention_softcap", default=50.0),
    Field("final_logit_softcapping", "logit_softcap", default=30.0),
)
_IGNORED = (*ROPE_KEYS, "hidden_act", "hidden_activation", "cache_implementation", "use_bidirectional_attention")
_WINDOW_KEYS = ("sliding_window", "sliding_window_pattern", "_sliding_window_pattern", "layer_types")


def _derive(checkpoint: Checkpoint, values: dict[str, Any]) -> dict[str, Any]:
    """Read what all generations have in common."""
    if checkpoint.config.get("use_bidirectional_attention"):
        raise UsageError("use_bidirectional_attention True is not supported", checkpoint.config_file)
    return {"norm_offset": True, "scale_embeddings": True, "attention_output_bias": values["attention_bias"]}


def _derive_gemma(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    return {**_derive(checkpoint, values), **read_common(checkpoint, values)}


def _derive_newer(checkpoint: Checkpoint, values: dict[str, Any], *, period: int) -> dict[str, Any]:
    """Read windows, of which by default all but every ``period``-th layer has one, and the scale."""
    hub, where = checkpoint.config, checkpoint.config_file
    count = LlamaConfig.check_field("num_layers", values["num_layers"], where)
    default = kinds_of_layers([bool((layer + 1) % period) for layer in range(count)])
    scalar = hub.get("query_pre_attn_scalar", 256)
    if not isinstance(scalar, int | float) or scalar <= 0:
        raise UsageError(f"query_pre_attn_scalar must be positive, got {scalar!r}", where)
    return {
        **_derive(checkpoint, values),
        **read_windows(hub.get("layer_types") or default, hub.get("sliding_window", 4096), values, where),
        "post_norms": True,
        "attention_scale": None if scalar == values["head_dim"] else scalar**-0.5,
    }


def _derive_gemma2(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    return {**_derive_newer(checkpoint, values, period=2), **read_common(checkpoint, values)}


def _derive_vault(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    return {**_derive_gemma2(checkpoint, values), "post_norms": False}


def _derive_gemma3(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    """Read the period of the windows, and the rotary positions of each kind of layer."""
    hub, where = checkpoint.config, checkpoint.config_file
    period = hub.get("sliding_window_pattern", 6)
    if not isinstance(period, int) or period < 1:
        raise UsageError(f"sliding_window_pattern must be positive, got {period!r}", where)
    local = hub.get("rope_local_base_freq", 10000.0)
    return {
        **_derive_newer(checkpoint, values, period=period),
        **read_rope_by_kind(checkpoint, values, theta=1000000.0, local_theta=local),
        "qk_norm": True,
    }


def _restore_newer(c: LlamaConfig) -> dict[str, Any]:
    scalar = c.key_size if c.attention_scale is None else round(c.attention_scale**-2)
    return {**write_windows(c), "query_pre_attn_scalar": scalar}


def _restore_gemma2(c: LlamaConfig) -> Mapping[str, Any]:
    return {**_restore_newer(c), **write_rope(c)}


def _restore_gemma3(c: LlamaConfig) -> Mapping[str, Any]:
    return {**_restore_newer(c), **write_rope_by_kind(c), "rope_local_base_freq": c.local_rope_theta}


GEMMA = Layout(
    classes=classes_of("Gemma"),
    fields=(
        *_FIELDS,
        Field("max_position_embeddings", "max_seq_len", default=8192),
        Field("num_key_value_heads", "num_kv_heads", default=16),
        # Published files say "gelu" for the tanh approximation.
        Field("hidden_act", "activation", default="gelu_pytorch_tanh", values={**_ACTIVATIONS, "gelu": "gelu_tanh"}),
    ),
    rules=(
        *BLOCK_RULES,
        *ATTENTION_RULES,
        *MLP_RULES,
        Rule("blocks.*.norm_2", "model.layers.*.post_attention_layernorm"),
    ),
    ignored_keys=_IGNORED,
    read_extra=_derive_gemma,
    write_extra=write_rope,
    constant={"model_type": "gemma", **NO_TOKENS},
    tokenizer="GemmaTokenizer",
    **COMMON,
)
"""``model_type`` gemma."""

GEMMA2 = Layout(
    classes=classes_of("Gemma2"),
    fields=_CAPPED,
    rules=_RULES,
    ignored_keys=(*_IGNORED, *_WINDOW_KEYS, "query_pre_attn_scalar", "sliding_window_size"),
    read_extra=_derive_gemma2,
    write_extra=_restore_gemma2,
    constant={"model_type": "gemma2", **NO_TOKENS},
    tokenizer="GemmaTokenizer",
    **COMMON,
)
"""``model_type`` gemma2."""

GEMMA3 = Layout(
    classes={
        "Gemma3ForCausalLM": "text-generation",
        "Gemma3TextForSequenceClassification": "text-classification",
        "Gemma3TextModel": "sentence-embedding",
    },
    fields=(
        *_FIELDS,
        *_NEWER,
        Field("max_position_embeddings", "max_seq_len", default=131072),
        Field("final_logit_softcapping", "logit_softcap", default=None),
    ),
    rules=_RULES,
    required_values={"attn_logit_softcapping": None},
    ignored_keys=(*_IGNORED, *_WINDOW_KEYS, "query_pre_attn_scalar", "rope_local_base_freq"),
    read_extra=_derive_gemma3,
    write_extra=_restore_gemma3,
    constant={"model_type": "gemma3_text", **NO_TOKENS},
    tokenizer="GemmaTokenizer",
    **COMMON,
)
"""``model_type`` gemma3_text, the decoder of Gemma 3 without its image encoder."""

VAULTGEMMA = Layout(
    classes={"VaultGemmaForCausalLM": "text-generation", "VaultGemmaModel": "sentence-embedding"},
    fields=_CAPPED,
    rules=_VAULT_RULES,
    ignored_keys=(*_IGNORED, *_WINDOW_KEYS, "query_pre_attn_scalar"),
    read_extra=_derive_vault,
    write_extra=_restore_gemma2,
    constant={"model_type": "vaultgemma", **NO_TOKENS},
    **COMMON,
)
"""``model_type`` vaultgemma, Gemma 2 without norms of outputs."""
