"""Parts shared by the checkpoint layouts of GPT-NeoX and its relatives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo import UsageError
from zoo.checkpoints import Checkpoint, Rule, paired_rows
from zoo_plugins.bert.sentence import sentence_encoder
from zoo_plugins.llama.hub_rope import read_partial_rotation, write_rope
from zoo_plugins.neox.config import NeoXConfig

__all__ = ["QKV", "paired_rules", "read_rotation", "refuse_other", "write_rotation"]

QKV = ("blocks.*.attention.query", "blocks.*.attention.key", "blocks.*.attention.value")
"""The tensors that many families hold in one."""
_SCALINGS = {kind: kind for kind in ("linear", "dynamic", "llama3", "yarn")}


def read_rotation(
    checkpoint: Checkpoint, values: Mapping[str, Any], *, part: float, theta: object = 10000.0
) -> dict[str, Any]:
    """Read rotary positions of a part of each head, and the files of a sentence encoder.

    Args:
        checkpoint: the checkpoint.
        values: the values of the fields.
        part: the part of each head, if the configuration does not state it.
        theta: the base of the frequencies, if the configuration does not state it.
    """
    hub, where = checkpoint.config, checkpoint.config_file
    sizes = {key: NeoXConfig.check_field(key, values[key], where) for key in ("hidden_size", "num_heads")}
    head_dim = values.get("head_dim") or sizes["hidden_size"] // max(sizes["num_heads"], 1)
    rotation = read_partial_rotation(
        {"rope_theta": theta, **hub},
        where,
        head_dim,
        part=part,
        kinds=_SCALINGS,
        length=hub.get("max_position_embeddings", values["max_seq_len"]),
        original=hub.get("original_max_position_embeddings"),
    )
    return {**rotation, **sentence_encoder(checkpoint)}


def write_rotation(c: NeoXConfig) -> dict[str, Any]:
    """Invert :func:`read_rotation`."""
    part, rope = c.turned_size / c.key_size, write_rope(c)
    parameters = {**rope["rope_parameters"], "partial_rotary_factor": part}
    return {**rope, "rope_parameters": parameters, "partial_rotary_factor": part}


def paired_rules(c: NeoXConfig, module: str) -> tuple[Rule, ...]:
    """Return the rules of queries and keys whose rotated pairs are neighbours, given the name of their module."""
    return tuple(
        Rule(
            f"blocks.*.attention.{ours}", f"{module}.{theirs}", row_order=paired_rows(heads, c.key_size, c.turned_size)
        )
        for ours, theirs, heads in (
            ("query", "q_proj", c.num_heads),
            ("key", "k_proj", c.num_kv_heads or c.num_heads),
        )
    )


def refuse_other(checkpoint: Checkpoint, **supported: object) -> None:
    """Raise :class:`UsageError` for keys of config.json that have another value than the supported one."""
    hub = checkpoint.config
    wrong = [f"{key} {hub[key]!r}" for key, value in supported.items() if hub.get(key, value) != value]
    if wrong:
        raise UsageError(f"{', '.join(wrong)} is not supported", checkpoint.config_file)
