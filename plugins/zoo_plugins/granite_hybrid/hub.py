"""Checkpoints of Granite 4 without experts in the hub's layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from zoo import UsageError
from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, Rule
from zoo_plugins.gpt.hub import NO_TOKENS
from zoo_plugins.granite_hybrid.config import GraniteHybridConfig
from zoo_plugins.llama.hub_granite import logit_divisor, read_factor
from zoo_plugins.llama.hub_rope import ROPE_KEYS, read_partial_rotation
from zoo_plugins.llama.hub_shared import check_kinds
from zoo_plugins.mamba2.hub import INFINITY, read_step_limits

__all__ = ["GRANITE_HYBRID"]

_STATES, _ATTENTION = "linear_attention", "full_attention"
_OLD_KINDS = {"mamba": _STATES, "attention": _ATTENTION}
"""Kinds of layers as transformers 4 names them."""
_MIXER = {"input": "in_proj", "convolution": "conv1d", "step_bias": "dt_bias", "log_decay": "A_log", "skip": "D",
          "norm": "norm", "output": "out_proj"}  # fmt: skip


def _rules(c: GraniteHybridConfig) -> Sequence[Rule]:
    layer = "model.layers.*"
    parts = ("query", "key", "value", "output")
    return (
        Rule("token_embedding", "model.embed_tokens"),
        Rule("blocks.*.norm_1", f"{layer}.input_layernorm"),
        *(Rule(f"blocks.*.attention.{part}", f"{layer}.self_attn.{part[0]}_proj") for part in parts),
        *(Rule(f"blocks.*.mixer.{ours}", f"{layer}.mamba.{theirs}") for ours, theirs in _MIXER.items()),
        Rule("blocks.*.norm_2", f"{layer}.post_attention_layernorm"),
        Rule(("blocks.*.mlp.gate", "blocks.*.mlp.up"), f"{layer}.shared_mlp.input_linear"),
        Rule("blocks.*.mlp.down", f"{layer}.shared_mlp.output_linear"),
        Rule("norm", "model.norm"),
        Rule("head", "lm_head"),
    )


def _read(checkpoint: Checkpoint, values: dict[str, Any]) -> dict[str, Any]:
    hub, where = checkpoint.config, checkpoint.config_file
    if (experts := hub.get("num_local_experts", 8)) != 0:
        remedy = "--via transformers uses the class itself"
        raise UsageError(f"num_local_experts {experts!r} is not supported, only 0", where, remedy)
    sizes = ("num_layers", "hidden_size", "num_heads", "state_num_heads")
    count, width, heads, states = (GraniteHybridConfig.check_field(name, values[name], where) for name in sizes)
    low, high = read_step_limits(hub.get("time_step_limit", [0.0, math.inf]), where)
    rotation = read_partial_rotation(hub, where, max(2, width // max(1, heads)))
    return {
        "state_layers": tuple(kind == _STATES for kind in _read_kinds(checkpoint, count)),
        "state_head_dim": _read_head_dim(checkpoint, width, states),
        "num_kv_heads": heads if values["num_kv_heads"] is None else values["num_kv_heads"],
        "rotary": hub.get("position_embedding_type") == "rope",
        "rope_theta": rotation["rope_theta"],
        "logit_multiplier": 1 / read_factor(hub, "logits_scaling", where),
        "min_step": low,
        "max_step": None if math.isinf(high) else high,
    }


def _read_kinds(checkpoint: Checkpoint, count: int) -> list[str]:
    """Return the kind of each layer; by default, all are state-space layers."""
    hub, where = checkpoint.config, checkpoint.config_file
    kinds = hub.get("layer_types") or hub.get("layers_block_type") or [_STATES] * count
    if (told := hub.get("layers_block_type", kinds)) != kinds:
        raise UsageError(f"layers_block_type {told!r} differs from layer_types {kinds!r}", where)
    named = [_OLD_KINDS.get(str(kind), kind) for kind in kinds] if isinstance(kinds, list) else kinds
    return check_kinds(named, count, (_STATES, _ATTENTION), where)


def _read_head_dim(checkpoint: Checkpoint, width: int, heads: int) -> int:
    """Return the width of the heads of state-space layers, which is given twice."""
    hub, where = checkpoint.config, checkpoint.config_file
    size, expand = hub.get("mamba_d_head", "auto"), hub.get("mamba_expand", 2)
    if type(expand) is not int or expand < 1 or heads < 1 or expand * width % heads:
        what = f"mamba_expand {expand!r} x hidden_size {width} is not divisible by mamba_n_heads {heads}"
        raise UsageError(what, where)
    if size not in ("auto", expand * width // heads):
        what = f"mamba_n_heads {heads} x mamba_d_head {size!r} is not mamba_expand {expand} x hidden_size {width}"
        raise UsageError(what, where)
    return expand * width // heads


def _write(c: GraniteHybridConfig) -> dict[str, Any]:
    expand, rest = divmod(c.state_width, c.hidden_size)
    if rest:
        raise UsageError(f"mamba_expand must be a whole number: {c.state_width} / {c.hidden_size} is not")
    return {
        "layer_types": [_STATES if c.has_states(layer) else _ATTENTION for layer in range(c.num_layers)],
        "mamba_d_head": c.state_head_dim,
        "mamba_expand": expand,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "position_embedding_type": "rope" if c.rotary else None,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
        "rope_theta": c.rope_theta,
        "logits_scaling": logit_divisor(c.logit_multiplier),
        "time_step_limit": [c.min_step, INFINITY if c.max_step is None else c.max_step],
    }


GRANITE_HYBRID = Layout(
    classes={"GraniteMoeHybridForCausalLM": "text-generation"},
    fields=(
        Field("vocab_size", default=32000),
        Field("max_position_embeddings", "max_seq_len", default=2048),
        Field("hidden_size", default=4096),
        Field("num_hidden_layers", "num_layers", default=32),
        Field("num_attention_heads", "num_heads", default=32),
        Field("num_key_value_heads", "num_kv_heads", default=None),
        Field("attention_multiplier", "attention_scale", default=1.0),
        Field("attention_bias", default=False),
        Field("attention_dropout", "dropout", default=0.0),
        Field("mamba_n_heads", "state_num_heads", default=128),
        Field("mamba_n_groups", "num_groups", default=1),
        Field("mamba_d_state", "state_size", default=256),
        Field("mamba_d_conv", "kernel_size", default=4),
        Field("mamba_conv_bias", "convolution_bias", default=True),
        Field("mamba_proj_bias", "projection_bias", default=False),
        Field("shared_intermediate_size", "intermediate_size", default=1024),
        Field("hidden_act", "activation", default="silu", values=ACTIVATIONS),
        Field("rms_norm_eps", "norm_eps", default=1e-6),
        Field("embedding_multiplier", default=1.0),
        Field("residual_multiplier", default=1.0),
        Field("tie_word_embeddings", "tie_embeddings", default=False),
    ),
    rules=_rules,
    prefix="model.",
    ignored_tensors=(r".*\.rotary_emb\.inv_freq",),
    ignored_keys=(
        *ROPE_KEYS, "layer_types", "layers_block_type", "logits_scaling", "position_embedding_type", "time_step_limit",
        "mamba_d_head", "mamba_expand", "mamba_chunk_size", "num_local_experts", "num_experts_per_tok",
        # Settings of experts, which these models do not have.
        "intermediate_size", "output_router_logits", "router_aux_loss_coef", "init_method",
        "normalization_function", "mlp_bias",
    ),
    read_extra=_read,
    write_extra=_write,
    constant={"model_type": "granitemoehybrid", **NO_TOKENS, "pad_token_id": None},
    tokenizer="TokenizersBackend",
)  # fmt: skip
"""``model_type`` granitemoehybrid, without experts."""
