"""Parts shared by the checkpoint layouts of GPT-NeoX and its relatives."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from zoo import UsageError
from zoo.checkpoints import Checkpoint, Field, Rule
from zoo_plugins.llama.hub_rope import read_partial_common
from zoo_plugins.neox.config import NeoXConfig

__all__ = ["NORM_2", "QKV", "SIZES", "read_rotation", "read_sizes", "refuse_other"]

SIZES = (
    Field("vocab_size"),
    Field("hidden_size"),
    Field("num_hidden_layers", "num_layers"),
    Field("num_attention_heads", "num_heads"),
    Field("intermediate_size"),
    Field("attention_dropout", "dropout", default=0.0),
)
"""Fields of config.json that most of these families share."""
NORM_2 = Rule("blocks.*.norm_2", "model.layers.*.post_attention_layernorm")

QKV = ("blocks.*.attention.query", "blocks.*.attention.key", "blocks.*.attention.value")
"""The tensors that many families hold in one."""
read_rotation = partial(read_partial_common, kinds={kind: kind for kind in ("linear", "dynamic", "llama3", "yarn")})
"""Reads rotary positions of a part of each head, with the kinds of scaling that these families may have."""


def read_sizes(checkpoint: Checkpoint, values: Mapping[str, Any], old_names: Mapping[str, str]) -> dict[str, Any]:
    """Return the checked sizes that old files have under other names, by zoo's; those of old files take precedence."""
    hub, where = checkpoint.config, checkpoint.config_file
    old = {ours: hub[theirs] for theirs, ours in old_names.items() if hub.get(theirs) is not None}
    return {key: NeoXConfig.check_field(key, {**values, **old}[key], where) for key in old_names.values()}


def refuse_other(checkpoint: Checkpoint, section: Mapping[str, Any] | None = None, /, **supported: object) -> None:
    """Raise :class:`UsageError` for keys of config.json, or of a section, with another value than the supported one."""
    hub = checkpoint.config if section is None else section
    wrong = [f"{key} {hub[key]!r}" for key, value in supported.items() if hub.get(key, value) != value]
    if wrong:
        raise UsageError(f"{', '.join(wrong)} is not supported", checkpoint.config_file)
