"""Checkpoints whose rotated pairs are neighbours: GLM-4, ERNIE 4.5 and Helium in the hub's layout.

Their queries and keys are reordered, so that the pairs lie where zoo and Llama have them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, Rule
from zoo_plugins.llama.config import LlamaConfig
from zoo_plugins.llama.hub_rope import (
    ROPE_KEYS,
    SCALINGS,
    read_common,
    read_partial_common,
    write_partial_rotation,
    write_rope,
)
from zoo_plugins.llama.hub_shared import BLOCK_RULES, COMMON, MLP_RULES, NO_TOKENS, classes_of, fields_of, paired_rules

__all__ = ["ERNIE4_5", "GLM", "GLM4", "HELIUM"]

_NORM_2 = Rule("blocks.*.norm_2", "model.layers.*.post_attention_layernorm")
_GATE_UP = Rule(("blocks.*.mlp.gate", "blocks.*.mlp.up"), "model.layers.*.mlp.gate_up_proj")
_POST_NORMS = (
    Rule("blocks.*.post_norm_1", "model.layers.*.post_self_attn_layernorm"),
    Rule("blocks.*.post_norm_2", "model.layers.*.post_mlp_layernorm"),
)


def _rules(c: LlamaConfig, *, others: Sequence[Rule]) -> Sequence[Rule]:
    """Return the rules of a family, given those of its feed-forward network and second norms."""
    value = Rule("blocks.*.attention.value", "model.layers.*.self_attn.v_proj")
    return (*BLOCK_RULES, *paired_rules(c, "model.layers.*.self_attn"), value, _NORM_2, *others)


def _fields(*, eps: float, length: int, kv_heads: int, tied: bool = False) -> tuple[Field, ...]:
    """Return the fields that all families share, with the defaults of one."""
    return (
        *fields_of(eps=eps),
        Field("hidden_act", "activation", default="silu", values=ACTIVATIONS),
        Field("head_dim", default=128),
        Field("max_position_embeddings", "max_seq_len", default=length),
        Field("num_key_value_heads", "num_kv_heads", default=kv_heads),
        Field("tie_word_embeddings", "tie_embeddings", default=tied),
    )


_GLM_FIELDS = (
    *_fields(eps=1.5625e-07, length=131072, kv_heads=2),
    Field("attention_bias", default=True),
    Field("pad_token_id", default=151329),
)


def _derive_glm(checkpoint: Checkpoint, values: dict[str, Any], *, post_norms: bool) -> Mapping[str, Any]:
    """Read rotary positions, by default of half of each head."""
    return {**read_partial_common(checkpoint, values, part=0.5, kinds=SCALINGS), "post_norms": post_norms}


def _derive_ernie(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    biases = dict.fromkeys(("attention_output_bias", "mlp_bias"), values["attention_bias"])
    return {**biases, **read_common(checkpoint, values, theta=500000.0)}


GLM = Layout(
    classes=classes_of("Glm"),
    fields=_GLM_FIELDS,
    rules=partial(_rules, others=(_GATE_UP,)),
    ignored_keys=(*ROPE_KEYS, "partial_rotary_factor"),
    read_extra=partial(_derive_glm, post_norms=False),
    write_extra=write_partial_rotation,
    constant={"model_type": "glm", **NO_TOKENS},
    tokenizer="TokenizersBackend",
    **COMMON,
)
"""``model_type`` glm, of GLM-4 until 2025."""

GLM4 = Layout(
    classes=classes_of("Glm4"),
    fields=_GLM_FIELDS,
    rules=partial(_rules, others=(_GATE_UP, *_POST_NORMS)),
    ignored_keys=(*ROPE_KEYS, "partial_rotary_factor"),
    read_extra=partial(_derive_glm, post_norms=True),
    write_extra=write_partial_rotation,
    constant={"model_type": "glm4", **NO_TOKENS},
    tokenizer="TokenizersBackend",
    **COMMON,
)
"""``model_type`` glm4, of GLM-4-0414 and GLM-Z1, with norms of the outputs of sub-layers too."""

ERNIE4_5 = Layout(
    classes={"Ernie4_5ForCausalLM": "text-generation", "Ernie4_5Model": "sentence-embedding"},
    fields=(
        *_fields(eps=1e-5, length=131072, kv_heads=2, tied=True),
        Field("use_bias", "attention_bias", default=False),
        Field("pad_token_id", default=0),
    ),
    rules=partial(_rules, others=MLP_RULES),
    ignored_keys=ROPE_KEYS,
    read_extra=_derive_ernie,
    write_extra=write_rope,
    constant={"model_type": "ernie4_5", **NO_TOKENS},
    tokenizer="TokenizersBackend",
    overrides_tokenizer=True,
    **COMMON,
)
"""``model_type`` ernie4_5, of the dense models."""

HELIUM = Layout(
    classes=classes_of("Helium"),
    fields=(
        *_fields(eps=1e-8, length=4096, kv_heads=20),
        Field("attention_bias", default=False),
        Field("mlp_bias", default=False),
        Field("pad_token_id", default=3),
    ),
    rules=partial(_rules, others=MLP_RULES),
    ignored_keys=ROPE_KEYS,
    read_extra=partial(read_common, theta=100000.0),
    write_extra=write_rope,
    constant={"model_type": "helium", **NO_TOKENS},
    **COMMON,
)
"""``model_type`` helium."""
