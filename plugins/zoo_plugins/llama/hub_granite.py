"""Granite checkpoints in the hub's layout."""

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
    fields_of,
)

__all__ = ["GRANITE", "logit_divisor", "read_factor"]


def _derive(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    """Read the factor of the scores, which is 1 by default, and the divisor of the logits."""
    hub, where = checkpoint.config, checkpoint.config_file
    width, heads = (LlamaConfig.check_field(key, values[key], where) for key in ("hidden_size", "num_heads"))
    size = LlamaConfig.check_field("head_dim", values["head_dim"], where) or width // max(heads, 1)
    scale, divisor = (read_factor(hub, key, where) for key in ("attention_multiplier", "logits_scaling"))
    return {
        "attention_scale": None if scale == size**-0.5 else scale,
        "logit_multiplier": 1 / divisor,
        "attention_output_bias": values["attention_bias"],
        **read_common(checkpoint, values),
    }


def _restore(c: LlamaConfig) -> Mapping[str, Any]:
    return {
        **write_rope(c),
        "attention_multiplier": c.key_size**-0.5 if c.attention_scale is None else c.attention_scale,
        "logits_scaling": logit_divisor(c.logit_multiplier),
    }


def read_factor(hub: Mapping[str, Any], key: str, where: object) -> float:
    """Return a factor, 1 by default. Raises :class:`UsageError` unless it is positive."""
    value: Any = hub.get(key, 1.0)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise UsageError(f"{key} must be positive, got {value!r}", where)
    return value


def logit_divisor(factor: float) -> float:
    """Return the number of which ``factor`` is the inverse in float64: the one with few digits, if there is one."""
    short = round(1 / factor, 9)
    return short if short and 1 / short == factor else 1 / factor


GRANITE = Layout(
    classes={"GraniteForCausalLM": "text-generation", "GraniteModel": "sentence-embedding"},
    fields=(
        *fields_of(),
        Field("hidden_act", "activation", default="silu", values=ACTIVATIONS),
        Field("max_position_embeddings", "max_seq_len", default=2048),
        Field("num_key_value_heads", "num_kv_heads", default=None),
        Field("head_dim", default=None),
        Field("attention_bias", default=False),
        Field("mlp_bias", default=False),
        Field("tie_word_embeddings", "tie_embeddings", default=False),
        Field("embedding_multiplier", default=1.0),
        Field("residual_multiplier", default=1.0),
    ),
    rules=(
        *BLOCK_RULES,
        *ATTENTION_RULES,
        *MLP_RULES,
        Rule("blocks.*.norm_2", "model.layers.*.post_attention_layernorm"),
    ),
    ignored_keys=(*ROPE_KEYS, "attention_multiplier", "logits_scaling"),
    read_extra=_derive,
    write_extra=_restore,
    constant={"model_type": "granite", **NO_TOKENS},
    tokenizer="TokenizersBackend",
    **COMMON,
)
"""``model_type`` granite, of the dense models up to Granite 3.3."""
