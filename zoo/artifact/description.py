"""config.json, the description of a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zoo.artifact.layout import SCHEMA
from zoo.artifact.provenance import Origin
from zoo.artifact.weights import DTYPES, load_json
from zoo.errors import ArtifactError, UsageError
from zoo.registry import ModelSpec

__all__ = ["describe", "read_description", "read_origin"]


def describe(spec: ModelSpec, *, dtype: str) -> dict[str, Any]:
    """Return the content of config.json. The writer of the weights adds their ``origin``."""
    return {
        "name": spec.name,
        "description": spec.description,
        "architecture": spec.architecture.name,
        "task": spec.task,
        "plugin": {
            "name": spec.plugin.name,
            "distribution": spec.plugin.distribution,
            "version": spec.plugin.version,
        },
        "dtype": dtype,
        "tokenizer": spec.tokenizer,
        "config": spec.config.to_dict(),
    }


_DESCRIPTION = {
    "schema": int,
    "name": str,
    "architecture": str,
    "task": str,
    "plugin": dict,
    "dtype": str,
    "config": dict,
}


def read_description(path: Path) -> dict[str, Any]:
    data = load_json(path)
    for key, kind in _DESCRIPTION.items():
        if not isinstance(data.get(key), kind):
            raise ArtifactError(f"{key} is missing or not of type {kind.__name__}", path)
    if data["schema"] != SCHEMA:
        raise ArtifactError(f"schema {data['schema']} is unknown: this version of zoo reads {SCHEMA}", path)
    if data["dtype"] not in DTYPES:
        raise ArtifactError(f"unknown dtype {data['dtype']!r}", path)
    if not all(isinstance(data["plugin"].get(key), str) for key in ("name", "distribution", "version")):
        raise ArtifactError("plugin must name its distribution and version", path)
    if not isinstance(data.get("description", ""), str):
        raise ArtifactError("description is not a string", path)
    read_origin(data, path)
    return data


def read_origin(description: Mapping[str, Any], path: Path) -> Origin:
    origin = description.get("origin")
    if origin is None:  # an old model, or one without weights
        return Origin()
    try:
        if not isinstance(origin, dict):
            raise UsageError(f"origin must be an object, got {origin!r:.80}")
        return Origin.from_dict(origin, path)
    except (UsageError, RecursionError) as error:
        raise ArtifactError(str(error), path) from error
