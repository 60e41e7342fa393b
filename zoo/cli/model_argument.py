"""The MODEL argument of commands: a preset's name or a model directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.errors import UsageError
from zoo.registry import ModelSpec, registry
from zoo.registry.nearby import check_name, no_directory

if TYPE_CHECKING:
    from zoo.artifact import ModelDirectory

__all__ = ["find_model", "find_preset", "refuse_settings", "resolve_preset"]


def resolve_preset(name: str, settings: Sequence[str], values: Mapping[str, Any] | None = None) -> ModelSpec:
    """Return a preset as :meth:`zoo.registry.Registry.resolve` does, after checking its defaults of training."""
    spec = registry().resolve(name, settings, values=values)
    if spec.training:
        from zoo.training.defaults import preset_defaults

        preset_defaults(spec)
    return spec


def find_preset(model: str, settings: Sequence[str]) -> ModelSpec | None:
    """Return the preset named ``model``, or None if ``model`` is a directory."""
    source = Path(model)
    if source.is_dir():
        return None
    if source.exists() or "/" in model:
        raise no_directory(model)
    check_name(model)
    return resolve_preset(model, settings)


def find_model(model: str, settings: Sequence[str]) -> tuple[ModelSpec, ModelDirectory | None]:
    """Return a model's description, and its directory unless it is a preset. Weights are not read.

    A directory takes precedence over a preset of the same name, except with settings, which apply to presets only.
    """
    presets = registry()
    if settings and model in presets.names():
        return resolve_preset(model, settings), None
    spec = find_preset(model, settings)
    if spec is not None:
        return spec, None
    refuse_settings(settings)
    from zoo.artifact import ModelDirectory

    stored = ModelDirectory.open(model, weights=False)
    return stored.spec, stored


def refuse_settings(settings: Sequence[str]) -> None:
    """Raise :class:`UsageError` for settings given with a model directory."""
    if settings:
        raise UsageError("the configuration of a model directory is fixed", "--set", "use zoo adapt, or a preset")
