"""Presets and the model descriptions that they resolve to."""

from __future__ import annotations

from zoo.registry.resolution import Registry, registry
from zoo.registry.spec import Assignment, ModelSpec, PresetSummary, config_class, load_reference

__all__ = ["Assignment", "ModelSpec", "PresetSummary", "Registry", "config_class", "load_reference", "registry"]
