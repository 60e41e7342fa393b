"""Preset files: TOML tables of models, one architecture and a few configuration values each."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zoo.errors import UsageError, nearest

__all__ = ["Preset", "read_presets"]

SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """One ``[models.NAME]`` table as written, before inheritance and overlays."""

    name: str
    source: str
    base: str | None = None
    arch: str | None = None
    description: str | None = None
    tokenizer: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """File and table, for messages."""
        return f"{self.source} [models.{self.name}]"


_KEYS = {"base": str, "arch": str, "description": str, "tokenizer": str, "config": dict}


def read_presets(path: Path, label: str | None = None) -> dict[str, Preset]:
    """Read a preset file, called ``label`` in messages, its path by default.

    Anything it should not hold is a :class:`UsageError` that names file, key and the nearest name.
    """
    source = label or str(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read ({error.strerror})", source) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not valid TOML ({error})", source) from error
    for key in data:
        if key not in ("schema", "models"):
            raise UsageError(f"unknown key {key!r}", source, nearest(key, ["schema", "models"]))
    if data.get("schema") != SCHEMA or isinstance(data["schema"], bool):
        raise UsageError(f"schema must be {SCHEMA}, got {data.get('schema')!r}", source)
    models = data.get("models", {})
    if not isinstance(models, dict):
        raise UsageError("models must be a table", source, "write [models.NAME]")
    return {name: _read_preset(name, table, source) for name, table in models.items()}


def _read_preset(name: str, table: object, source: str) -> Preset:
    where = f"{source} [models.{name}]"
    if not isinstance(table, dict):
        raise UsageError("a model must be a table", where)
    if not name or not all(character.isalnum() or character in "-_." for character in name) or name[0] in "-.":
        raise UsageError(f"bad model name {name!r}", where, "use letters, digits, '-', '_' and '.'")
    for key, value in table.items():
        if key not in _KEYS:
            raise UsageError(f"unknown key {key!r}", where, nearest(key, _KEYS))
        if not isinstance(value, _KEYS[key]):
            wanted = "a table" if _KEYS[key] is dict else "a string"
            raise UsageError(f"{key} must be {wanted}, got {value!r}", where)
    return Preset(name=name, source=source, **table)
