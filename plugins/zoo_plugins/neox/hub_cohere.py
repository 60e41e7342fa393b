"""Command R, Aya and Command R7B checkpoints in the hub's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zoo import UsageError
from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, Rule
from zoo_plugins.llama.hub_rope import ROPE_KEYS, read_common, write_rope
from zoo_plugins.llama.hub_shared import (
    BLOCK_RULES,
    COMMON,
    MLP_RULES,
    NO_TOKENS,
    classes_of,
    kinds_of_layers,
    paired_rules,
    read_windows,
    write_windows,
)
from zoo_plugins.neox.config import NeoXConfig
from zoo_plugins.neox.hub_shared import refuse_other

__all__ = ["COHERE", "COHERE2"]

_FIELDS = (
    Field("vocab_size"),
    Field("hidden_size"),
    Field("num_hidden_layers", "num_layers"),
    Field("num_attention_heads", "num_heads"),
    Field("num_key_value_heads", "num_kv_heads", default=None),
    Field("intermediate_size"),
    Field("max_position_embeddings", "max_seq_len", default=8192),
    Field("hidden_act", "activation", default="silu", values=ACTIVATIONS),
    Field("layer_norm_eps", "norm_eps", default=1e-5),
    Field("logit_scale", "logit_multiplier", default=0.0625),
    Field("attention_bias", default=False),
    Field("attention_dropout", "dropout", default=0.0),
    Field("tie_word_embeddings", "tie_embeddings", default=True),
    Field("pad_token_id", default=0),
)
_SUPPORTED = {
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_qk_norm": False,
}
"""Keys of published files, and their values in all of them; Command R+, which normalises queries and keys with a weight
for each head, is not supported."""
_WINDOW = 4096
"""Default window of Cohere 2; the original needs one even if no layer has it."""
_INERT = (*_SUPPORTED, "layer_switch", "order_of_interleaved_layers", "use_embedding_sharing", "use_parallel_embedding")


def _derive(checkpoint: Checkpoint, values: dict[str, Any]) -> dict[str, Any]:
    refuse_other(checkpoint, **_SUPPORTED)
    return {
        "attention_output_bias": values["attention_bias"],
        "mlp_bias": False,
        "norm_bias": False,
        "gated": True,
        "shared_norm": True,
    }


def _derive_cohere(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    return {**_derive(checkpoint, values), **read_common(checkpoint, values, theta=500000.0)}


def _derive_cohere2(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    """Read the layers with a window, by default three of four; the others do not rotate."""
    hub, where = checkpoint.config, checkpoint.config_file
    count = NeoXConfig.check_field("num_layers", values["num_layers"], where)
    period = hub.get("sliding_window_pattern", 4)
    if not isinstance(period, int) or period < 1:
        raise UsageError(f"sliding_window_pattern must be positive, got {period!r}", where)
    default = kinds_of_layers([(layer + 1) % period != 0 for layer in range(count)])
    windows = read_windows(hub.get("layer_types") or default, hub.get("sliding_window", _WINDOW), values, where)
    return {
        **_derive(checkpoint, values),
        **windows,
        "rope_layers": tuple(window > 0 for window in windows["sliding_windows"]),
        **read_common(checkpoint, values),
    }


def _restore_cohere2(c: NeoXConfig) -> Mapping[str, Any]:
    windows = write_windows(c)
    return {**write_rope(c), **windows, "sliding_window": windows["sliding_window"] or _WINDOW}


def _rules(c: NeoXConfig) -> Sequence[Rule]:
    return (
        *BLOCK_RULES,
        *MLP_RULES,
        *paired_rules(c, "model.layers.*.self_attn"),
        Rule("blocks.*.attention.value", "model.layers.*.self_attn.v_proj"),
    )


COHERE = Layout(
    classes=classes_of("Cohere", classifier=False),
    fields=_FIELDS,
    rules=_rules,
    ignored_keys=(*ROPE_KEYS, *_INERT),
    read_extra=_derive_cohere,
    write_extra=write_rope,
    constant={"model_type": "cohere", **NO_TOKENS},
    tokenizer="CohereTokenizer",
    **COMMON,
)
"""``model_type`` cohere: Command R and Aya."""

COHERE2 = Layout(
    classes=classes_of("Cohere2", classifier=False),
    fields=(*_FIELDS, Field("head_dim", default=None)),
    rules=_rules,
    ignored_keys=(
        *ROPE_KEYS,
        *_INERT,
        "sliding_window",
        "sliding_window_pattern",
        "layer_types",
        "cache_implementation",
    ),
    read_extra=_derive_cohere2,
    write_extra=_restore_cohere2,
    constant={"model_type": "cohere2", **NO_TOKENS},
    tokenizer="CohereTokenizer",
    **COMMON,
)
"""``model_type`` cohere2: Command R7B and Command A."""
