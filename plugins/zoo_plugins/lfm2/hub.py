"""Checkpoints of LFM2 in the hub's layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zoo import UsageError
from zoo.checkpoints import Checkpoint, Field, Layout, Rule
from zoo_plugins.gpt.hub import NO_TOKENS
from zoo_plugins.lfm2.config import Lfm2Config
from zoo_plugins.llama.hub_rope import read_partial_rotation
from zoo_plugins.llama.hub_shared import check_kinds

__all__ = ["LFM2"]

_CONVOLUTION, _ATTENTION = "conv", "full_attention"
_WIDTH_KEYS = ("block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of")


def _rules(c: Lfm2Config) -> Sequence[Rule]:
    layer, attention, convolution = "model.layers.*", "model.layers.*.self_attn", "model.layers.*.conv"
    projections = ("input_gate", "output_gate", "value")
    return (
        Rule("token_embedding", "model.embed_tokens"),
        Rule("blocks.*.norm_1", f"{layer}.operator_norm"),
        *(Rule(f"blocks.*.attention.{part}", f"{attention}.{part[0]}_proj") for part in ("query", "key", "value")),
        Rule("blocks.*.attention.output", f"{attention}.out_proj"),
        Rule("blocks.*.attention.query_norm", f"{attention}.q_layernorm"),
        Rule("blocks.*.attention.key_norm", f"{attention}.k_layernorm"),
        Rule(tuple(f"blocks.*.convolution.{part}" for part in projections), f"{convolution}.in_proj"),
        Rule("blocks.*.convolution.convolution", f"{convolution}.conv"),
        Rule("blocks.*.convolution.output", f"{convolution}.out_proj"),
        Rule("blocks.*.norm_2", f"{layer}.ffn_norm"),
        Rule("blocks.*.mlp.gate", f"{layer}.feed_forward.w1"),
        Rule("blocks.*.mlp.down", f"{layer}.feed_forward.w2"),
        Rule("blocks.*.mlp.up", f"{layer}.feed_forward.w3"),
        Rule("norm", "model.embedding_norm"),
        Rule("head", "lm_head"),
    )


def _read(checkpoint: Checkpoint, values: dict[str, Any]) -> dict[str, Any]:
    hub, where = checkpoint.config, checkpoint.config_file
    sizes = ("num_layers", "hidden_size", "num_heads")
    count, width, heads = (Lfm2Config.check_field(name, values[name], where) for name in sizes)
    fields = {
        "convolution_layers": _read_layers(checkpoint, count),
        "intermediate_size": _read_width(checkpoint, values),
        "tie_embeddings": hub.get("tie_embedding", values["tie_embeddings"]),  # the older key decides
    }
    theta = {"rope_theta": 1e6, **hub}
    rotation = read_partial_rotation(theta, where, hub.get("head_dim") or max(1, width // max(1, heads)))
    return {**fields, "rope_theta": rotation["rope_theta"]}


def _read_layers(checkpoint: Checkpoint, count: int) -> tuple[bool, ...]:
    """Return which layers have convolutions: older files number those with attention."""
    hub, where = checkpoint.config, checkpoint.config_file
    kinds, attention = hub.get("layer_types"), hub.get("full_attn_idxs")
    if kinds is None:
        attention = list(range(count)) if attention is None else attention
        if not isinstance(attention, list):
            raise UsageError(f"full_attn_idxs must be a list of numbers of layers, got {attention!r}", where)
        kinds = [_ATTENTION if layer in attention else _CONVOLUTION for layer in range(count)]
    found = check_kinds(kinds, count, (_CONVOLUTION, _ATTENTION), where)
    return tuple(kind == _CONVOLUTION for kind in found)


def _read_width(checkpoint: Checkpoint, values: dict[str, Any]) -> int:
    """Return the width of the feed-forward network: by default two thirds of the setting, rounded up."""
    hub, where = checkpoint.config, checkpoint.config_file
    told = hub.get("block_ff_dim", values["intermediate_size"])  # the older key decides
    width: int = Lfm2Config.check_field("intermediate_size", told, where)
    if not hub.get("block_auto_adjust_ff_dim", True):
        return width
    factor, multiple = hub.get("block_ffn_dim_multiplier", 1.0), hub.get("block_multiple_of", 256)
    if type(multiple) is not int or multiple < 1 or not isinstance(factor, int | float) or not factor > 0:
        what = f"got {factor!r} and {multiple!r}"
        raise UsageError(f"block_ffn_dim_multiplier and block_multiple_of must be positive, {what}", where)
    return -(-int(factor * int(2 * width / 3)) // multiple) * multiple


def _write(c: Lfm2Config) -> dict[str, Any]:
    return {
        "layer_types": [_CONVOLUTION if c.has_convolution(layer) else _ATTENTION for layer in range(c.num_layers)],
        "block_auto_adjust_ff_dim": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
        "rope_theta": c.rope_theta,
    }


LFM2 = Layout(
    classes={"Lfm2ForCausalLM": "text-generation"},
    fields=(
        Field("vocab_size", default=65536),
        Field("max_position_embeddings", "max_seq_len", default=128000),
        Field("hidden_size", default=2560),
        Field("num_hidden_layers", "num_layers", default=32),
        Field("num_attention_heads", "num_heads", default=32),
        Field("num_key_value_heads", "num_kv_heads", default=8),
        Field("head_dim", default=None),
        Field("intermediate_size", default=12288),
        Field("norm_eps", default=1e-5),
        Field("conv_L_cache", "kernel_size", default=3),
        Field("conv_bias", "convolution_bias", default=False),
        Field("tie_word_embeddings", "tie_embeddings", default=True),
    ),
    rules=_rules,
    prefix="model.",
    ignored_tensors=(r".*\.rotary_emb\.inv_freq",),
    ignored_keys=(
        "layer_types", "full_attn_idxs", "block_ff_dim", "tie_embedding", *_WIDTH_KEYS,
        "rope_parameters", "rope_scaling", "rope_theta", "theta",
        # Settings of the training code, which published files repeat and the original class does not read.
        "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu",
        "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "use_pos_enc",
    ),
    read_extra=_read,
    write_extra=_write,
    constant={"model_type": "lfm2", **NO_TOKENS, "pad_token_id": None},
)  # fmt: skip
"""``model_type`` lfm2."""
