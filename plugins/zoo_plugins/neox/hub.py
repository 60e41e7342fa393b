"""GPT-NeoX, Phi, StableLM and StarCoder 2 checkpoints in the hub's layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, Rule
from zoo_plugins.bert.sentence import PROJECTIONS
from zoo_plugins.llama.hub_rope import ROPE_KEYS, read_common, write_partial_rotation, write_rope
from zoo_plugins.llama.hub_shared import (
    ATTENTION_RULES,
    BLOCK_RULES,
    COMMON,
    MLP_RULES,
    NO_TOKENS,
    classes_of,
)
from zoo_plugins.neox.config import NeoXConfig
from zoo_plugins.neox.hub_shared import NORM_2, QKV, SIZES, read_rotation, refuse_other

__all__ = ["GPT_NEOX", "PHI", "STABLELM", "STARCODER2"]

# The exporter reads its config.json back, and rejects settings that these layouts cannot express.


def _derive_gpt_neox(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    """transformers 4 has names of its own for the settings of rotary positions."""
    hub = checkpoint.config
    rotation = read_rotation(
        checkpoint, values, part=hub.get("rotary_pct", 0.25), theta=hub.get("rotary_emb_base", 10000.0)
    )
    return {"attention_output_bias": values["attention_bias"], **rotation}


def _restore_gpt_neox(c: NeoXConfig) -> Mapping[str, Any]:
    written = write_partial_rotation(c)
    return {
        "rope_parameters": written["rope_parameters"],
        "rope_scaling": written["rope_scaling"],
        "rotary_emb_base": written["rope_theta"],
        "rotary_pct": written["partial_rotary_factor"],
    }


GPT_NEOX = Layout(
    classes=classes_of("GPTNeoX"),
    fields=(
        *SIZES,
        Field("max_position_embeddings", "max_seq_len", default=2048),
        Field("hidden_act", "activation", default="gelu", values=ACTIVATIONS),
        Field("layer_norm_eps", "norm_eps", default=1e-5),
        Field("use_parallel_residual", "parallel", default=True),
        Field("attention_bias", default=True),
        Field("hidden_dropout", "residual_dropout", default=0.0),
        Field("tie_word_embeddings", "tie_embeddings", default=False),
    ),
    rules=lambda c: (
        Rule("token_embedding", "gpt_neox.embed_in"),
        Rule("blocks.*.norm_1", "gpt_neox.layers.*.input_layernorm"),
        Rule(QKV, "gpt_neox.layers.*.attention.query_key_value", interleaved=c.num_heads),
        Rule("blocks.*.attention.output", "gpt_neox.layers.*.attention.dense"),
        Rule("blocks.*.norm_2", "gpt_neox.layers.*.post_attention_layernorm"),
        Rule("blocks.*.mlp.up", "gpt_neox.layers.*.mlp.dense_h_to_4h"),
        Rule("blocks.*.mlp.down", "gpt_neox.layers.*.mlp.dense_4h_to_h"),
        Rule("norm", "gpt_neox.final_layer_norm"),
        Rule("head", "embed_out"),
        Rule("head", "lm_head"),
        Rule("classifier", "score"),
        PROJECTIONS,
    ),
    ignored_keys=(*ROPE_KEYS, "partial_rotary_factor", "rotary_pct", "rotary_emb_base"),
    read_extra=_derive_gpt_neox,
    write_extra=_restore_gpt_neox,
    constant={"model_type": "gpt_neox", **NO_TOKENS},
    tokenizer="GPTNeoXTokenizer",
    **{
        **COMMON,
        "prefix": "gpt_neox.",
        "ignored_tensors": (r".*\.rotary_emb\.inv_freq", r".*\.attention\.(masked_)?bias"),
    },
)
"""``model_type`` gpt_neox, also used by Pythia and Dolly."""


def _derive_phi(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    refuse_other(checkpoint, tie_word_embeddings=False)
    return {"shared_norm": True, "head_bias": True, **read_rotation(checkpoint, values, part=0.5)}


def _restore_phi(c: NeoXConfig) -> Mapping[str, Any]:
    return {**write_partial_rotation(c), "embd_pdrop": c.residual_dropout, "tie_word_embeddings": c.tie_embeddings}


PHI = Layout(
    classes=classes_of("Phi"),
    fields=(
        *SIZES,
        Field("max_position_embeddings", "max_seq_len", default=2048),
        Field("num_key_value_heads", "num_kv_heads", default=None),
        Field("hidden_act", "activation", default="gelu_new", values=ACTIVATIONS),
        Field("layer_norm_eps", "norm_eps", default=1e-5),
        Field("qk_layernorm", "qk_norm", default=False),
        Field("resid_pdrop", "residual_dropout", default=0.0),
    ),
    rules=(
        *ATTENTION_RULES,
        Rule("blocks.*.attention.output", "model.layers.*.self_attn.dense"),
        Rule("blocks.*.attention.query_norm", "model.layers.*.self_attn.q_layernorm"),
        Rule("blocks.*.attention.key_norm", "model.layers.*.self_attn.k_layernorm"),
        Rule("blocks.*.mlp.up", "model.layers.*.mlp.fc1"),
        Rule("blocks.*.mlp.down", "model.layers.*.mlp.fc2"),
        Rule("norm", "model.final_layernorm"),
        *BLOCK_RULES,
    ),
    ignored_keys=(*ROPE_KEYS, "partial_rotary_factor", "tie_word_embeddings"),
    read_extra=_derive_phi,
    write_extra=_restore_phi,
    constant={"model_type": "phi", **NO_TOKENS},
    tokenizer="GPT2Tokenizer",
    **COMMON,
)
"""``model_type`` phi: Phi-1, 1.5 and 2."""


def _derive_stablelm(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    refuse_other(checkpoint, qk_layernorm=False)
    return {
        "gated": True,
        "mlp_bias": False,
        "attention_output_bias": False,
        "shared_norm": values["parallel"],
        **read_rotation(checkpoint, values, part=0.25),
    }


STABLELM = Layout(
    classes=classes_of("StableLm"),
    fields=(
        *SIZES,
        Field("max_position_embeddings", "max_seq_len", default=4096),
        Field("num_key_value_heads", "num_kv_heads", default=32),
        Field("hidden_act", "activation", default="silu", values=ACTIVATIONS),
        Field("layer_norm_eps", "norm_eps", default=1e-5),
        Field("use_qkv_bias", "attention_bias", default=False),
        Field("use_parallel_residual", "parallel", default=False),
        Field("hidden_dropout", "residual_dropout", default=0.0),
        Field("tie_word_embeddings", "tie_embeddings", default=False),
    ),
    rules=(*BLOCK_RULES, *ATTENTION_RULES, *MLP_RULES, NORM_2),
    ignored_keys=(*ROPE_KEYS, "partial_rotary_factor", "qk_layernorm"),
    read_extra=_derive_stablelm,
    write_extra=write_partial_rotation,
    constant={"model_type": "stablelm", **NO_TOKENS},
    tokenizer="TokenizersBackend",
    **COMMON,
)
"""``model_type`` stablelm."""


def _derive_starcoder2(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    refuse_other(checkpoint, mlp_type="default", norm_type="layer_norm", scale_attn_weights=True)
    bias = values["attention_bias"]
    return {
        "parallel": False,
        "attention_output_bias": bias,
        "mlp_bias": bias,
        "sliding_windows": (checkpoint.config.get("sliding_window") or 0,),
        **read_common(checkpoint, values),
    }


def _restore_starcoder2(c: NeoXConfig) -> Mapping[str, Any]:
    return {**write_rope(c), "sliding_window": c.window(0), "embedding_dropout": c.residual_dropout}


STARCODER2 = Layout(
    classes=classes_of("Starcoder2"),
    fields=(
        *SIZES,
        Field("max_position_embeddings", "max_seq_len", default=4096),
        Field("num_key_value_heads", "num_kv_heads", default=2),
        Field("hidden_act", "activation", default="gelu_pytorch_tanh", values=ACTIVATIONS),
        Field("norm_epsilon", "norm_eps", default=1e-5),
        Field("use_bias", "attention_bias", default=True),
        Field("residual_dropout", default=0.0),
        Field("tie_word_embeddings", "tie_embeddings", default=True),
    ),
    rules=(
        Rule("blocks.*.mlp.up", "model.layers.*.mlp.c_fc"),
        Rule("blocks.*.mlp.down", "model.layers.*.mlp.c_proj"),
        NORM_2,
        *ATTENTION_RULES,
        *BLOCK_RULES,
    ),
    # Published files also have the keys after sliding_window; transformers reads hidden_act and norm_epsilon instead of
    # activation_function and layer_norm_epsilon.
    ignored_keys=(
        *ROPE_KEYS,
        "sliding_window",
        "activation_function",
        "attention_softmax_in_fp32",
        "mlp_type",
        "norm_type",
        "scale_attention_softmax_in_fp32",
        "scale_attn_weights",
        "layer_norm_epsilon",
    ),
    read_extra=_derive_starcoder2,
    write_extra=_restore_starcoder2,
    constant={"model_type": "starcoder2", **NO_TOKENS},
    tokenizer="GPT2Tokenizer",
    **COMMON,
)
"""``model_type`` starcoder2."""
