"""Data attached to a model in memory besides its configuration and weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from zoo.artifact.provenance import Origin

__all__ = ["Attachments", "attach", "attachments"]


@dataclass(frozen=True)
class Attachments:
    """Data attached to a model in memory, and saved with it."""

    origin: Origin = field(default_factory=Origin)
    description: str = ""
    tokenizer: str | None = None
    """See :class:`ModelSpec`."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Tokenizer and companion files, read when the model was loaded because its directory may later be deleted."""


_ATTACHED = "_zoo_attachments"
"""The attribute of the model that holds them, so that they are copied and pickled with it."""


def attach(model: nn.Module, attachments: Attachments) -> nn.Module:
    vars(model)[_ATTACHED] = attachments
    return model


def attachments(model: nn.Module) -> Attachments:
    attached: Attachments = vars(model).get(_ATTACHED, Attachments())
    return attached
