"""Llama, Mistral and Qwen checkpoints in the hub's layout: one set of tensors, four kinds of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo import UsageError
from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, Rule
from zoo_plugins.bert.sentence import sentence_encoder, sentence_files
from zoo_plugins.gpt.hub import OUTPUTS
from zoo_plugins.llama.config import LlamaConfig

__all__ = ["LLAMA", "MISTRAL", "QWEN2", "QWEN3"]

_RULES = (
    Rule("token_embedding", "model.embed_tokens"),
    Rule("blocks.*.norm_1", "model.layers.*.input_layernorm"),
    Rule("blocks.*.attention.query", "model.layers.*.self_attn.q_proj"),
    Rule("blocks.*.attention.key", "model.layers.*.self_attn.k_proj"),
    Rule("blocks.*.attention.value", "model.layers.*.self_attn.v_proj"),
    Rule("blocks.*.attention.output", "model.layers.*.self_attn.o_proj"),
    Rule("blocks.*.attention.query_norm", "model.layers.*.self_attn.q_norm"),
    Rule("blocks.*.attention.key_norm", "model.layers.*.self_attn.k_norm"),
    Rule("blocks.*.norm_2", "model.layers.*.post_attention_layernorm"),
    Rule("blocks.*.mlp.gate", "model.layers.*.mlp.gate_proj"),
    Rule("blocks.*.mlp.up", "model.layers.*.mlp.up_proj"),
    Rule("blocks.*.mlp.down", "model.layers.*.mlp.down_proj"),
    Rule("norm", "model.norm"),
    Rule("head", "lm_head"),
    Rule("classifier", "score"),
)
_FIELDS = (
    Field("vocab_size"),
    Field("hidden_size"),
    Field("num_hidden_layers", "num_layers"),
    Field("num_attention_heads", "num_heads"),
    Field("intermediate_size"),
    Field("hidden_act", "activation", default="silu", values=ACTIVATIONS),
    Field("rms_norm_eps", "norm_eps", default=1e-6),
    Field("attention_dropout", "dropout", default=0.0),
    Field("tie_word_embeddings", "tie_embeddings", default=False),
)
_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta")
_WINDOW_KEYS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
_ROPE_TYPES = {"default": "none", "linear": "linear", "llama3": "llama3"}
"""``rope_type`` in config.json, and zoo's ``rope_scaling``."""
_ROPE_FIELDS = {
    "rope_theta": "rope_theta",
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_length",
}
_SCALED_BY = {
    "none": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Parameters of each kind of scaling."""
_FULL, _LOCAL = "full_attention", "sliding_attention"


def _read_rope(checkpoint: Checkpoint) -> dict[str, Any]:
    """Read rotary positions. transformers 5 keeps everything in one mapping, earlier versions the base outside it."""
    hub, where = checkpoint.config, checkpoint.config_file
    said = hub.get("rope_scaling") or hub.get("rope_parameters") or {}
    if not isinstance(said, dict):
        raise UsageError(f"rope_parameters must be a mapping, got {said!r}", where)
    kind = said.get("rope_type", said.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_TYPES:
        raise UsageError(f"rope_type {kind!r} is not supported", where, f"known: {', '.join(_ROPE_TYPES)}")
    unknown = said.keys() - _ROPE_FIELDS.keys() - {"rope_type", "type"}
    if said.get("partial_rotary_factor") == 1:
        unknown -= {"partial_rotary_factor"}
    if unknown:
        raise UsageError(f"unsupported rope_parameters: {', '.join(sorted(unknown))}", where)
    ours = _ROPE_TYPES[kind]
    missing = set(_SCALED_BY[ours]) - said.keys() - {"original_max_position_embeddings"}
    if missing:
        raise UsageError(f"rope_type {kind!r} needs {', '.join(sorted(missing))}", where)
    told = {key: said[key] for key in _SCALED_BY[ours] if key in said}
    told["rope_theta"] = said.get("rope_theta", hub.get("rope_theta", 10000.0))
    return {"rope_scaling": ours, **{_ROPE_FIELDS[key]: value for key, value in told.items()}}


def _write_rope(c: LlamaConfig) -> dict[str, Any]:
    """Write both the keys of transformers 5 and those of earlier versions, which other programs read."""
    kind = next(theirs for theirs, ours in _ROPE_TYPES.items() if ours == c.rope_scaling)
    scaling = {"rope_type": kind} | {key: getattr(c, _ROPE_FIELDS[key]) for key in _SCALED_BY[c.rope_scaling]}
    return {
        "rope_parameters": {**scaling, "rope_theta": c.rope_theta},
        "rope_theta": c.rope_theta,
        "rope_scaling": scaling if kind != "default" else None,
    }


def _read_windows(checkpoint: Checkpoint, values: Mapping[str, Any]) -> dict[str, Any]:
    """Read Qwen's sliding window, which applies to the listed layers, or to all from ``max_window_layers`` on."""
    hub, where = checkpoint.config, checkpoint.config_file
    count = LlamaConfig.check_field("num_layers", values["num_layers"], where)
    window = hub.get("sliding_window", 4096) if hub.get("use_sliding_window", False) else None
    first = hub.get("max_window_layers", 28)
    if not isinstance(first, int):
        raise UsageError(f"max_window_layers must be int, got {first!r}", where)
    default = [_LOCAL if window is not None and layer >= first else _FULL for layer in range(count)]
    kinds = hub.get("layer_types") or default
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in (_FULL, _LOCAL) for kind in kinds):
        raise UsageError(f"layer_types must name {count} layers, each {_FULL} or {_LOCAL}, got {kinds!r}", where)
    if window is None and _LOCAL in kinds:
        raise UsageError(f"layer_types has {_LOCAL}, but there is no sliding_window", where)
    return {"sliding_windows": tuple(window if kind == _LOCAL else 0 for kind in kinds)}


def _write_windows(c: LlamaConfig) -> dict[str, Any]:
    windows = [c.window(layer) for layer in range(c.num_layers)]
    local = [window is not None for window in windows]
    return {
        "use_sliding_window": any(local),
        "sliding_window": max(filter(None, windows), default=None),
        "max_window_layers": local.index(True) if any(local) else c.num_layers,
        "layer_types": [_LOCAL if item else _FULL for item in local],
    }


# The exporter reads its config.json back, and rejects settings that this layout cannot express.


def _derive_common(checkpoint: Checkpoint) -> dict[str, Any]:
    return {**_read_rope(checkpoint), **sentence_encoder(checkpoint)}


def _derive_llama(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    return {"attention_output_bias": values["attention_bias"], **_derive_common(checkpoint)}


def _derive_mistral(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    return {"sliding_windows": (checkpoint.config.get("sliding_window", 4096) or 0,), **_derive_common(checkpoint)}


def _restore_mistral(c: LlamaConfig) -> Mapping[str, Any]:
    return {"sliding_window": c.window(0), **_write_rope(c)}


def _derive_qwen2(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    return {"attention_bias": True, **_derive_common(checkpoint), **_read_windows(checkpoint, values)}


def _derive_qwen3(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    return {"qk_norm": True, **_derive_llama(checkpoint, values), **_read_windows(checkpoint, values)}


def _restore_qwen(c: LlamaConfig) -> Mapping[str, Any]:
    return {**_write_rope(c), **_write_windows(c)}


def _classes(name: str) -> dict[str, str]:
    return {
        f"{name}ForCausalLM": "text-generation",
        f"{name}ForSequenceClassification": "text-classification",
        f"{name}Model": "sentence-embedding",
    }


_COMMON: dict[str, Any] = {
    "rules": _RULES,
    "prefix": "model.",
    "headless_tasks": ("sentence-embedding",),
    "outputs": OUTPUTS,
    "files": sentence_files,
    "ignored_tensors": (r".*\.rotary_emb\.inv_freq",),
}
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}
"""Always written, because the original classes have other defaults."""

LLAMA = Layout(
    classes=_classes("Llama"),
    fields=(
        *_FIELDS,
        Field("max_position_embeddings", "max_seq_len", default=2048),
        Field("num_key_value_heads", "num_kv_heads", default=None),
        Field("head_dim", default=None),
        Field("attention_bias", default=False),
        Field("mlp_bias", default=False),
    ),
    ignored_keys=(*_ROPE_KEYS, "pretraining_tp"),
    read_extra=_derive_llama,
    write_extra=_write_rope,
    constant={"model_type": "llama", **_NO_TOKENS},
    **_COMMON,
)
"""``model_type`` llama."""

MISTRAL = Layout(
    classes=_classes("Mistral"),
    fields=(
        *_FIELDS,
        Field("max_position_embeddings", "max_seq_len", default=131072),
        Field("num_key_value_heads", "num_kv_heads", default=8),
        Field("head_dim", default=None),
    ),
    ignored_keys=(*_ROPE_KEYS, "sliding_window"),
    read_extra=_derive_mistral,
    write_extra=_restore_mistral,
    constant={"model_type": "mistral", **_NO_TOKENS},
    **_COMMON,
)
"""``model_type`` mistral."""

QWEN2 = Layout(
    classes=_classes("Qwen2"),
    fields=(
        *_FIELDS,
        Field("max_position_embeddings", "max_seq_len", default=32768),
        Field("num_key_value_heads", "num_kv_heads", default=32),
        Field("head_dim", default=None),
    ),
    ignored_keys=(*_ROPE_KEYS, *_WINDOW_KEYS),
    read_extra=_derive_qwen2,
    write_extra=_restore_qwen,
    constant={"model_type": "qwen2", **_NO_TOKENS},
    **_COMMON,
)
"""``model_type`` qwen2, also used by Qwen 1.5 and 2.5."""

QWEN3 = Layout(
    classes=_classes("Qwen3"),
    fields=(
        *_FIELDS,
        Field("max_position_embeddings", "max_seq_len", default=32768),
        Field("num_key_value_heads", "num_kv_heads", default=32),
        Field("head_dim", default=128),
        Field("attention_bias", default=False),
    ),
    ignored_keys=(*_ROPE_KEYS, *_WINDOW_KEYS),
    read_extra=_derive_qwen3,
    write_extra=_restore_qwen,
    constant={"model_type": "qwen3", **_NO_TOKENS},
    **_COMMON,
)
"""``model_type`` qwen3."""
