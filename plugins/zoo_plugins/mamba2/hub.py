"""Mamba-2 checkpoints in the hub's layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from zoo import UsageError
from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, Rule
from zoo_plugins.mamba2.config import Mamba2Config

__all__ = ["INFINITY", "MAMBA2", "read_step_limits"]

INFINITY = {"__float__": "Infinity"}
"""How transformers writes the number in JSON, which has none."""
_LENGTH = 2048
"""Length of the texts on which the published models are trained; their configurations do not name one."""


def _read_sizes(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    """Read the width, which is given twice, and the limits of the step size."""
    hub, where = checkpoint.config, checkpoint.config_file
    heads, expand = hub.get("num_heads", 128), hub.get("expand", 2)
    low, high = read_step_limits(hub.get("time_step_limit", [0.0, math.inf]), where)
    if type(heads) is not int:
        raise UsageError(f"num_heads must be an integer, got {heads!r}", where)
    width = heads * Mamba2Config.check_field("head_dim", values["head_dim"], where)
    if not isinstance(expand, int | float) or expand * values["hidden_size"] != width:
        what = f"num_heads {heads} x head_dim {values['head_dim']} is not expand {expand!r} x hidden_size"
        raise UsageError(what, where, "correct one of them")
    return {
        "intermediate_size": width,
        "max_seq_len": _LENGTH,
        "min_step": low,
        "max_step": None if math.isinf(high) else high,
    }


def read_step_limits(value: Any, where: object) -> tuple[float, float]:
    """Return the smallest and the largest step size. Infinity is a number, or a mapping that stands for it."""
    try:
        low, high = (float(item["__float__"] if isinstance(item, Mapping) else item) for item in value)
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"time_step_limit must be two numbers, got {value!r}", where) from None
    return low, high


def _write_sizes(c: Mamba2Config) -> Mapping[str, Any]:
    expand, rest = divmod(c.width, c.hidden_size)
    return {
        "num_heads": c.num_heads,
        "expand": c.width / c.hidden_size if rest else expand,
        "time_step_limit": [c.min_step, INFINITY if c.max_step is None else c.max_step],
    }


MAMBA2 = Layout(
    classes={"Mamba2ForCausalLM": "text-generation", "Mamba2Model": "text-generation"},
    aliases=("Mamba2Model",),
    fields=(
        Field("vocab_size"),
        Field("hidden_size"),
        Field("num_hidden_layers", "num_layers"),
        Field("head_dim", default=64),
        Field("state_size", default=128),
        Field("n_groups", "num_groups", default=8),
        Field("conv_kernel", "kernel_size", default=4),
        Field("hidden_act", "activation", default="silu", values=ACTIVATIONS),
        Field("use_bias", "projection_bias", default=False),
        Field("use_conv_bias", "convolution_bias", default=True),
        Field("layer_norm_epsilon", "norm_eps", default=1e-5),
        Field("tie_word_embeddings", "tie_embeddings", default=False),
    ),
    rules=(
        Rule("token_embedding", "backbone.embeddings"),
        Rule("blocks.*.norm", "backbone.layers.*.norm"),
        Rule("blocks.*.mixer.input", "backbone.layers.*.mixer.in_proj"),
        Rule("blocks.*.mixer.convolution", "backbone.layers.*.mixer.conv1d"),
        Rule("blocks.*.mixer.step_bias", "backbone.layers.*.mixer.dt_bias"),
        Rule("blocks.*.mixer.log_decay", "backbone.layers.*.mixer.A_log"),
        Rule("blocks.*.mixer.skip", "backbone.layers.*.mixer.D"),
        Rule("blocks.*.mixer.norm", "backbone.layers.*.mixer.norm"),
        Rule("blocks.*.mixer.output", "backbone.layers.*.mixer.out_proj"),
        Rule("norm", "backbone.norm_f"),
        Rule("head", "lm_head"),
    ),
    prefix="backbone.",
    ignored_keys=(
        "expand",
        "num_heads",
        "chunk_size",
        "residual_in_fp32",
        "rescale_prenorm_residual",
        "time_step_*",
    ),
    read_extra=_read_sizes,
    write_extra=_write_sizes,
    constant={"model_type": "mamba2", "bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
    tokenizer="GPTNeoXTokenizer",
)
"""``model_type`` mamba2."""
