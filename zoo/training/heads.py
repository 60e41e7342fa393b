"""A model directory with another task: the same trunk, and a fresh head. Importing this module imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from zoo import plugins
from zoo.errors import UsageError
from zoo.models import create
from zoo.models.attachments import attach, attachments
from zoo.models.tensors import stored_tensors
from zoo.registry import ModelSpec

__all__ = ["Retasked", "retask"]


@dataclass(frozen=True)
class Retasked:
    """A model for another task."""

    spec: ModelSpec
    model: nn.Module
    fresh: tuple[str, ...]
    """Tensors that were initialised."""
    dropped: tuple[str, ...]
    """Tensors of the old model that the new one does not have."""


def retask(spec: ModelSpec, model: nn.Module, values: Mapping[str, Any], seed: int) -> Retasked:
    """Return a model with changed configuration values that keeps every tensor of the same name and shape.

    Raises :class:`UsageError` for an unknown value, or if less than half of the new model's numbers would be kept.
    """
    with plugins.blame(spec.plugin, f"cannot configure {spec.name}"):
        config = type(spec.config).from_dict({**spec.config.to_dict(), **values}, spec.name)
    new_spec = replace(spec, config=config)
    if config == spec.config:
        return Retasked(spec, model, (), ())
    new = create.build(new_spec, seed=seed, dtype="float32").to(next(model.parameters()).dtype)
    held, wanted = stored_tensors(model)[0], stored_tensors(new)[0]
    kept = {name for name, tensor in wanted.items() if name in held and held[name].shape == tensor.shape}
    if sum(wanted[name].numel() for name in kept) * 2 < sum(tensor.numel() for tensor in wanted.values()):
        raise UsageError("the model would lose most of its weights with these settings", spec.name)
    with torch.no_grad():
        for name in kept:
            wanted[name].copy_(held[name])
    attach(new, attachments(model))
    return Retasked(
        new_spec, new, tuple(name for name in wanted if name not in kept), tuple(sorted(held.keys() - kept))
    )
