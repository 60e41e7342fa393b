"""Falcon checkpoints in the hub's layout: both decoder architectures, with rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo import UsageError
from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, Rule
from zoo_plugins.bert.sentence import PROJECTIONS
from zoo_plugins.llama.hub_rope import ROPE_KEYS, read_common, write_rope
from zoo_plugins.llama.hub_shared import COMMON, NO_TOKENS, classes_of
from zoo_plugins.neox.config import NeoXConfig
from zoo_plugins.neox.hub_shared import QKV, read_sizes, refuse_other

__all__ = ["FALCON"]

_OLD_NAMES = {"n_embed": "hidden_size", "n_layer": "num_layers", "n_head": "num_heads"}


def _derive(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    """Read the kind of block. Falcon 7B shares one key-value head and one norm; Falcon 40B has groups and two norms."""
    hub, where = checkpoint.config, checkpoint.config_file
    refuse_other(checkpoint, alibi=False)
    sizes = read_sizes(checkpoint, values, _OLD_NAMES)
    is_new, parallel = hub.get("new_decoder_architecture") or False, hub.get("parallel_attn", True)
    norms = hub.get("num_ln_in_parallel_attn") or (2 if is_new else 1)
    if is_new and not parallel:
        raise UsageError("new_decoder_architecture True needs parallel_attn True", where)
    if norms not in ((1, 2) if is_new else (1,)):
        raise UsageError(f"num_ln_in_parallel_attn {norms!r} is not supported here", where)
    groups = hub.get("num_kv_heads") if is_new else 1 if hub.get("multi_query", True) else None
    inner, bias = hub.get("ffn_hidden_size"), values["mlp_bias"]
    return {
        **sizes,
        "num_kv_heads": groups,
        "intermediate_size": 4 * sizes["hidden_size"] if inner is None else inner,
        "attention_bias": bias,
        "attention_output_bias": bias,
        "parallel": parallel,
        "shared_norm": parallel and norms == 1,
        **read_common(checkpoint, values),
    }


def _restore(c: NeoXConfig) -> Mapping[str, Any]:
    is_new = (c.parallel and not c.shared_norm) or c.num_kv_heads not in (1, c.num_heads)
    return {
        **write_rope(c),
        "new_decoder_architecture": is_new,
        "multi_query": is_new or c.num_kv_heads == 1,
        "parallel_attn": c.parallel,
        "num_kv_heads": c.num_kv_heads if is_new else c.num_heads,
        "num_ln_in_parallel_attn": (1 if c.shared_norm else 2) if is_new else None,
        "ffn_hidden_size": c.intermediate_size,
        "alibi": c.positions == "alibi",
    }


def _rules(c: NeoXConfig) -> tuple[Rule, ...]:
    two = c.parallel and not c.shared_norm
    return (
        Rule("token_embedding", "transformer.word_embeddings"),
        Rule("blocks.*.norm_1", f"transformer.h.*.{'ln_attn' if two else 'input_layernorm'}"),
        Rule("blocks.*.norm_2", f"transformer.h.*.{'ln_mlp' if two else 'post_attention_layernorm'}"),
        Rule(QKV, "transformer.h.*.self_attention.query_key_value", interleaved=c.num_kv_heads or c.num_heads),
        Rule("blocks.*.attention.output", "transformer.h.*.self_attention.dense"),
        Rule("blocks.*.mlp.up", "transformer.h.*.mlp.dense_h_to_4h"),
        Rule("blocks.*.mlp.down", "transformer.h.*.mlp.dense_4h_to_h"),
        Rule("norm", "transformer.ln_f"),
        Rule("head", "lm_head"),
        Rule("classifier", "score"),
        PROJECTIONS,
    )


FALCON = Layout(
    classes=classes_of("Falcon"),
    fields=(
        Field("vocab_size"),
        Field("hidden_size", default=4544),
        Field("num_hidden_layers", "num_layers", default=32),
        Field("num_attention_heads", "num_heads", default=71),
        Field("max_position_embeddings", "max_seq_len", default=2048),
        Field("activation", default="gelu", values=ACTIVATIONS),
        Field("layer_norm_epsilon", "norm_eps", default=1e-5),
        Field("bias", "mlp_bias", default=False),
        Field("attention_dropout", "dropout", default=0.0),
        Field("hidden_dropout", "residual_dropout", default=0.0),
        Field("tie_word_embeddings", "tie_embeddings", default=True),
    ),
    rules=_rules,
    ignored_keys=(
        *ROPE_KEYS,
        *_OLD_NAMES,
        "alibi",
        "apply_residual_connection_post_layernorm",
        "ffn_hidden_size",
        "multi_query",
        "new_decoder_architecture",
        "num_kv_heads",
        "num_ln_in_parallel_attn",
        "parallel_attn",
    ),
    read_extra=_derive,
    write_extra=_restore,
    constant={"model_type": "falcon", **NO_TOKENS},
    **{**COMMON, "prefix": "transformer."},
)
"""``model_type`` falcon."""
