"""Mixtral, OLMoE and Qwen3-MoE checkpoints in the hub's layout, which holds each expert's matrices by themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, Rule
from zoo_plugins.llama.hub_rope import ROPE_KEYS, read_common, write_rope
from zoo_plugins.llama.hub_shared import (
    ATTENTION_RULES,
    BLOCK_RULES,
    COMMON,
    MLP_RULES,
    NO_TOKENS,
    classes_of,
    fields_of,
    read_expert_layers,
    write_expert_layers,
)
from zoo_plugins.mixtral.config import MixtralConfig

__all__ = ["MIXTRAL", "OLMOE", "QWEN3_MOE"]


def _rules(experts: str, *, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Return the rules of a family, given its names of the module with the experts and of their matrices."""
    home, ours = f"model.layers.*.{experts}", "blocks.*.mlp"
    return (
        *BLOCK_RULES,
        *ATTENTION_RULES,
        *MLP_RULES,
        Rule("blocks.*.norm_2", "model.layers.*.post_attention_layernorm"),
        Rule(f"{ours}.router.scores", f"{home}.gate"),
        Rule(f"{ours}.experts.gate", f"{home}.experts.#.{gate}.weight"),
        Rule(f"{ours}.experts.up", f"{home}.experts.#.{up}.weight"),
        Rule(f"{ours}.experts.down", f"{home}.experts.#.{down}.weight"),
    )


_MLP_RULES = _rules("mlp", gate="gate_proj", up="up_proj", down="down_proj")
_IGNORED = (*ROPE_KEYS, "output_router_logits")


def _fields(*, eps: float, loss: float) -> tuple[Field, ...]:
    """Return the fields that all three families share, with the defaults of one."""
    return (
        *fields_of(eps=eps),
        Field("hidden_act", "activation", default="silu", values=ACTIVATIONS),
        Field("tie_word_embeddings", "tie_embeddings", default=False),
        Field("router_aux_loss_coef", "router_aux_loss", default=loss),
    )


def _derive_mixtral(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    window = checkpoint.config.get("sliding_window")
    return {"sliding_windows": (window or 0,), **read_common(checkpoint, values, theta=1000000.0)}


def _restore_mixtral(c: MixtralConfig) -> Mapping[str, Any]:
    return {"sliding_window": c.window(0), **write_rope(c)}


def _derive_olmoe(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    norms = {"qk_norm": True, "joint_qk_norm": True}
    return {**norms, "attention_output_bias": values["attention_bias"], **read_common(checkpoint, values)}


def _derive_qwen3(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    """Read the layers with experts, and their number, which transformers 5 writes under another name."""
    hub, where = checkpoint.config, checkpoint.config_file
    count = MixtralConfig.check_field("num_layers", values["num_layers"], where)
    window = hub.get("sliding_window", 4096) if hub.get("use_sliding_window", False) else None
    return {
        "qk_norm": True,
        "attention_output_bias": values["attention_bias"],
        "num_experts": hub.get("num_experts", hub.get("num_local_experts", 128)),
        "expert_layers": read_expert_layers(checkpoint, count),
        "sliding_windows": (window or 0,),
        **read_common(checkpoint, values),
    }


def _restore_qwen3(c: MixtralConfig) -> Mapping[str, Any]:
    return {
        **write_rope(c),
        "num_experts": c.num_experts,
        **write_expert_layers([c.has_experts(layer) for layer in range(c.num_layers)]),
        "use_sliding_window": c.window(0) is not None,
        "sliding_window": c.window(0),
    }


MIXTRAL = Layout(
    classes=classes_of("Mixtral"),
    fields=(
        *_fields(eps=1e-5, loss=0.001),
        Field("max_position_embeddings", "max_seq_len", default=131072),
        Field("num_key_value_heads", "num_kv_heads", default=8),
        Field("head_dim", default=None),
        Field("num_local_experts", "num_experts", default=8),
        Field("num_experts_per_tok", "experts_per_token", default=2),
    ),
    rules=_rules("block_sparse_moe", gate="w1", up="w3", down="w2"),
    ignored_keys=(*_IGNORED, "sliding_window", "router_jitter_noise"),
    read_extra=_derive_mixtral,
    write_extra=_restore_mixtral,
    constant={"model_type": "mixtral", **NO_TOKENS},
    tokenizer="TokenizersBackend",
    **COMMON,
)
"""``model_type`` mixtral."""

OLMOE = Layout(
    classes={"OlmoeForCausalLM": "text-generation", "OlmoeModel": "sentence-embedding"},
    fields=(
        *_fields(eps=1e-5, loss=0.01),
        Field("max_position_embeddings", "max_seq_len", default=4096),
        Field("num_key_value_heads", "num_kv_heads", default=None),
        Field("attention_bias", default=False),
        Field("num_experts", default=64),
        Field("num_experts_per_tok", "experts_per_token", default=8),
        Field("norm_topk_prob", "normalize_routing", default=False),
    ),
    rules=_MLP_RULES,
    required_values={"clip_qkv": None},
    ignored_keys=_IGNORED,
    read_extra=_derive_olmoe,
    write_extra=write_rope,
    constant={"model_type": "olmoe", "pad_token_id": None, **NO_TOKENS},
    tokenizer="GPTNeoXTokenizer",
    **COMMON,
)
"""``model_type`` olmoe."""

QWEN3_MOE = Layout(
    classes=classes_of("Qwen3Moe"),
    fields=(
        *_fields(eps=1e-6, loss=0.001),
        Field("max_position_embeddings", "max_seq_len", default=32768),
        Field("num_key_value_heads", "num_kv_heads", default=4),
        Field("head_dim", default=None),
        Field("attention_bias", default=False),
        Field("moe_intermediate_size", "expert_intermediate_size", default=768),
        Field("num_experts_per_tok", "experts_per_token", default=8),
        Field("norm_topk_prob", "normalize_routing", default=False),
    ),
    rules=_MLP_RULES,
    ignored_keys=(
        *_IGNORED, "num_experts", "num_local_experts", "decoder_sparse_step", "mlp_only_layers", "use_sliding_window",
        "sliding_window", "max_window_layers",
    ),
    read_extra=_derive_qwen3,
    write_extra=_restore_qwen3,
    constant={"model_type": "qwen3_moe", **NO_TOKENS},
    tokenizer="Qwen2Tokenizer",
    **COMMON,
)  # fmt: skip
"""``model_type`` qwen3_moe."""
