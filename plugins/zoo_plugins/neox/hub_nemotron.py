"""Nemotron and Persimmon checkpoints in the hub's layout: decoders with squared relu."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, Rule
from zoo_plugins.llama.hub_rope import ROPE_KEYS, write_partial_rotation
from zoo_plugins.llama.hub_shared import ATTENTION_RULES, BLOCK_RULES, COMMON, MLP_RULES, NO_TOKENS, classes_of
from zoo_plugins.neox.hub_shared import NORM_2, QKV, SIZES, read_rotation

__all__ = ["NEMOTRON", "PERSIMMON"]

_ACTIVATION = Field("hidden_act", "activation", default="relu2", values=ACTIVATIONS)
_TIED = Field("tie_word_embeddings", "tie_embeddings", default=False)


def _derive_nemotron(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    return {
        "attention_output_bias": values["attention_bias"],
        "norm_offset": True,
        "parallel": False,
        **read_rotation(checkpoint, values, part=0.5),
    }


NEMOTRON = Layout(
    classes=classes_of("Nemotron"),
    fields=(
        *SIZES,
        Field("max_position_embeddings", "max_seq_len", default=4096),
        Field("num_key_value_heads", "num_kv_heads", default=None),
        Field("head_dim", default=None),
        _ACTIVATION,
        Field("norm_eps", default=1e-5),
        Field("attention_bias", default=False),
        Field("mlp_bias", default=False),
        _TIED,
    ),
    rules=(*BLOCK_RULES, *ATTENTION_RULES, *MLP_RULES, NORM_2),
    ignored_keys=(*ROPE_KEYS, "partial_rotary_factor"),
    read_extra=_derive_nemotron,
    write_extra=write_partial_rotation,
    constant={"model_type": "nemotron", **NO_TOKENS},
    tokenizer="TokenizersBackend",
    overrides_tokenizer=True,
    **COMMON,
)
"""``model_type`` nemotron: Nemotron-4 and Minitron."""


def _derive_persimmon(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    return {"parallel": False, **read_rotation(checkpoint, values, part=0.5)}


PERSIMMON = Layout(
    classes=classes_of("Persimmon"),
    fields=(
        *SIZES,
        Field("max_position_embeddings", "max_seq_len", default=16384),
        _ACTIVATION,
        Field("layer_norm_eps", "norm_eps", default=1e-5),
        Field("qk_layernorm", "qk_norm", default=True),
        Field("hidden_dropout", "residual_dropout", default=0.0),
        _TIED,
    ),
    rules=lambda c: (
        Rule(QKV, "model.layers.*.self_attn.query_key_value", interleaved=c.num_heads),
        Rule("blocks.*.attention.output", "model.layers.*.self_attn.dense"),
        Rule("blocks.*.attention.query_norm", "model.layers.*.self_attn.q_layernorm"),
        Rule("blocks.*.attention.key_norm", "model.layers.*.self_attn.k_layernorm"),
        Rule("blocks.*.mlp.up", "model.layers.*.mlp.dense_h_to_4h"),
        Rule("blocks.*.mlp.down", "model.layers.*.mlp.dense_4h_to_h"),
        Rule("norm", "model.final_layernorm"),
        *BLOCK_RULES,
        NORM_2,
    ),
    ignored_keys=(*ROPE_KEYS, "partial_rotary_factor"),
    read_extra=_derive_persimmon,
    write_extra=write_partial_rotation,
    constant={"model_type": "persimmon", **NO_TOKENS},
    tokenizer="TokenizersBackend",
    **COMMON,
)
"""``model_type`` persimmon."""
