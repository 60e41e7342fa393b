"""Parts shared by the checkpoint layouts of GPT-NeoX and its relatives."""

from __future__ import annotations

from functools import partial

from zoo import UsageError
from zoo.checkpoints import Checkpoint
from zoo_plugins.llama.hub_rope import read_partial_common

__all__ = ["QKV", "read_rotation", "refuse_other"]

QKV = ("blocks.*.attention.query", "blocks.*.attention.key", "blocks.*.attention.value")
"""The tensors that many families hold in one."""
read_rotation = partial(read_partial_common, kinds={kind: kind for kind in ("linear", "dynamic", "llama3", "yarn")})
"""Reads rotary positions of a part of each head, with the kinds of scaling that these families may have."""


def refuse_other(checkpoint: Checkpoint, **supported: object) -> None:
    """Raise :class:`UsageError` for keys of config.json that have another value than the supported one."""
    hub = checkpoint.config
    wrong = [f"{key} {hub[key]!r}" for key, value in supported.items() if hub.get(key, value) != value]
    if wrong:
        raise UsageError(f"{', '.join(wrong)} is not supported", checkpoint.config_file)
