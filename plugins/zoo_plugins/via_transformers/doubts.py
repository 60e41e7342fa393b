"""Values of a configuration that are no sizes where transformers has sizes, to name them when a class fails."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from zoo import ArtifactError, UsageError, ZooError

__all__ = ["unfit"]

_NO_SIZES = ("_id", "_ids", "_index", "_indices")
"""Endings of keys that may be null, or 0."""


def unfit(original: Mapping[str, Any], problem: str, where: object, remedy: str | None = None) -> ZooError:
    """Return the error for a configuration with which a class cannot be made or called.

    Args:
        original: the configuration.
        problem: what failed.
        where: the file of the configuration, or None if it does not come from one.
        remedy: what to do, unless a value is doubtful.
    """
    doubt = None if where is None else _first_doubt(original, _defaults(original))
    if doubt is None:
        return UsageError(problem, where, remedy)
    key, value, default = doubt
    stated, usual = (json.dumps(item)[:60] for item in (value, default))
    return ArtifactError(f"{key} {stated} is not possible ({problem})", where, f"the default is {usual}")


def _defaults(original: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of a configuration; empty if it has none."""
    try:
        return dict(CONFIG_MAPPING[original["model_type"]]().to_dict())
    except Exception:  # another library may raise anything
        return {}


def _first_doubt(
    values: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = ""
) -> tuple[str, Any, Any] | None:
    """Return the key, the value and the default of the first whole number, or list of these, that cannot be one."""
    for key, value in values.items():
        default = defaults.get(key)
        if isinstance(default, Mapping):
            nested = _first_doubt(value, default, f"{prefix}{key}.") if isinstance(value, Mapping) else None
            if nested is not None:
                return nested
        elif not key.endswith(_NO_SIZES) and _are_sizes(default) and not _are_sizes(value):
            return f"{prefix}{key}", value, default
    return None


def _are_sizes(value: Any) -> bool:
    """Return whether a value is a whole number other than 0, as -1 counts layers from the last, or a list of these."""
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_are_sizes, value))
    return isinstance(value, int) and not isinstance(value, bool) and value != 0
