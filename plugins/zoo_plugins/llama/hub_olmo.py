"""OLMo 2, OLMo 3 and EXAONE 4 checkpoints in the hub's layout: norms of the outputs of sub-layers alone."""

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
    LOCAL,
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

__all__ = ["EXAONE4", "OLMO2", "OLMO3"]

_RULES = (
    *BLOCK_RULES,
    *ATTENTION_RULES,
    *MLP_RULES,
    Rule("blocks.*.post_norm_1", "model.layers.*.post_attention_layernorm"),
    Rule("blocks.*.post_norm_2", "model.layers.*.post_feedforward_layernorm"),
)
_FIELDS = (
    *fields_of(eps=1e-5),
    Field("hidden_act", "activation", default="silu", values=ACTIVATIONS),
    Field("head_dim", default=None),
    Field("max_position_embeddings", "max_seq_len", default=2048),
    Field("tie_word_embeddings", "tie_embeddings", default=False),
)
_OLMO_FIELDS = (
    *_FIELDS,
    Field("num_key_value_heads", "num_kv_heads", default=None),
    Field("attention_bias", default=False),
    Field("pad_token_id", default=1),
)
_NORMS = {"pre_norms": False, "post_norms": True, "qk_norm": True}
_THETA = 500000.0
"""Base of OLMo 3's frequencies in both kinds of layers."""


def _derive_olmo(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what both generations have in common."""
    return {**_NORMS, "joint_qk_norm": True, "attention_output_bias": values["attention_bias"]}


def _derive_olmo2(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    return {**_derive_olmo(values), **read_common(checkpoint, values)}


def _derive_olmo3(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    """Read windows, and the frequencies of layers with and without one."""
    hub, where = checkpoint.config, checkpoint.config_file
    rope = read_rope_by_kind(checkpoint, values, theta=_THETA, local_theta=_THETA)
    if LOCAL not in (hub.get("rope_parameters") or {}) and hub.get("rope_theta", _THETA) != _THETA:
        # transformers 4 has it in all layers, transformers 5 only in those without a window.
        problem = f"rope_theta {hub['rope_theta']!r} may be that of all layers or of those without a window"
        raise UsageError(problem, where, f"add rope_parameters of {LOCAL}")
    return {**_derive_olmo(values), **rope, **_windows(checkpoint, values, 4)}


def _derive_exaone4(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    """Read windows; only layers with one rotate, unless no layer has one."""
    hub, where = checkpoint.config, checkpoint.config_file
    period = hub.get("sliding_window_pattern", 4) or 0
    if not hub.get("layer_types") and (type(period) is not int or period < 0):
        raise UsageError(f"sliding_window_pattern {period!r} needs layer_types", where)
    windows = _windows(checkpoint, values, period)
    turned = hub.get("sliding_window", 4096) is None
    return {
        **_NORMS,
        **windows,
        "rope_layers": tuple(turned or bool(window) for window in windows["sliding_windows"]),
        **read_common(checkpoint, values),
    }


def _windows(checkpoint: Checkpoint, values: Mapping[str, Any], period: int) -> dict[str, Any]:
    """Read windows, of which by default all but every ``period``-th layer has one; 0 for none."""
    hub, where = checkpoint.config, checkpoint.config_file
    count = LlamaConfig.check_field("num_layers", values["num_layers"], where)
    window = hub.get("sliding_window", 4096)
    periodic = window is not None and period
    default = kinds_of_layers([bool(periodic and (layer + 1) % period) for layer in range(count)])
    return read_windows(hub.get("layer_types") or default, window, values, where)


def _restore_olmo3(c: LlamaConfig) -> Mapping[str, Any]:
    return {**write_rope_by_kind(c), **write_windows(c)}


def _restore_exaone4(c: LlamaConfig) -> Mapping[str, Any]:
    return {**write_rope(c), **write_windows(c)}


OLMO2 = Layout(
    classes=classes_of("Olmo2"),
    fields=_OLMO_FIELDS,
    rules=_RULES,
    ignored_keys=ROPE_KEYS,
    read_extra=_derive_olmo2,
    write_extra=write_rope,
    constant={"model_type": "olmo2", **NO_TOKENS},
    tokenizer="TokenizersBackend",
    **COMMON,
)
"""``model_type`` olmo2."""

OLMO3 = Layout(
    classes=classes_of("Olmo3"),
    fields=_OLMO_FIELDS,
    rules=_RULES,
    ignored_keys=(*ROPE_KEYS, "sliding_window", "layer_types"),
    read_extra=_derive_olmo3,
    write_extra=_restore_olmo3,
    constant={"model_type": "olmo3", **NO_TOKENS},
    tokenizer="TokenizersBackend",
    **COMMON,
)
"""``model_type`` olmo3."""

EXAONE4 = Layout(
    classes=classes_of("Exaone4"),
    fields=(*_FIELDS, Field("num_key_value_heads", "num_kv_heads", default=32)),
    rules=_RULES,
    ignored_keys=(*ROPE_KEYS, "sliding_window", "sliding_window_pattern", "layer_types"),
    read_extra=_derive_exaone4,
    write_extra=_restore_exaone4,
    constant={"model_type": "exaone4", **NO_TOKENS},
    **COMMON,
)
"""``model_type`` exaone4."""
