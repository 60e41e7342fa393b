"""Recipes for training: the tables ``[recipes.NAME]`` of preset files, with the source of every value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo import plugins
from zoo.errors import UsageError, nearest
from zoo.plugins.presets import preset_layers, read_tables
from zoo.registry.spec import Assignment

__all__ = ["TrainingRecipe", "find_recipe", "recipe_names"]

_TABLES = ("settings", "options", "config", "columns", "lora")
_KEYS: Mapping[str, type] = {
    "base": str, "description": str, "task": str, "objective": str, "tokenizer": str, "data": list, "validation": list,
    **dict.fromkeys(_TABLES, dict),
}  # fmt: skip


@dataclass(frozen=True)
class TrainingRecipe:
    """A recipe after inheritance and overrides. Values are as written: their users check them."""

    name: str
    origins: Mapping[str, list[Assignment]]
    """All values assigned to each key, in order; the last one applies. Keys in tables are ``TABLE.KEY``."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key outside of tables."""
        return self.origins[key][-1].value if key in self.origins else default

    def table(self, name: str) -> dict[str, Any]:
        """Return the values of a table, such as ``settings`` (of training) or ``options`` (of the objective)."""
        prefix = f"{name}."
        return {
            key.removeprefix(prefix): assignments[-1].value
            for key, assignments in self.origins.items()
            if key.startswith(prefix)
        }

    def where(self, key: str) -> str:
        """Return the file and table that set a key."""
        return self.origins[key][-1].source


def _layers() -> list[tuple[str, Mapping[str, Mapping[str, Any]]]]:
    """Return the name and the recipes of each preset file, in increasing precedence."""
    files = [(path, label) for path, label in preset_layers()]
    provided = [(path, None) for plugin in plugins.active().loaded() for path in plugin.preset_files]
    layers: list[tuple[str, Mapping[str, Mapping[str, Any]]]] = []
    for path, label in (*files[:1], *provided, *files[1:]):
        source = label or str(path)
        layers.append((source, read_tables(Path(path), source)["recipes"]))
    return layers


def recipe_names() -> dict[str, str]:
    """Return the description of each recipe, by name."""
    descriptions: dict[str, str] = {}
    for _, recipes in _layers():
        for name, table in recipes.items():
            descriptions[name] = str(table.get("description", descriptions.get(name, "")))
    return dict(sorted(descriptions.items()))


def find_recipe(name: str) -> TrainingRecipe:
    """Return a recipe: its base's values, overridden by its own, by file in increasing precedence.

    Raises :class:`UsageError` for an unknown name, a malformed table, or recipes that inherit in a cycle.
    """
    layers = _layers()
    chain: list[tuple[str, Mapping[str, Any]]] = []
    seen: list[str] = []
    base: str | None = name
    while base is not None:
        if base in seen:
            raise UsageError(f"recipes inherit in a cycle ({' -> '.join((*seen, base))})", "--recipe")
        entries = [(f"{source} [recipes.{base}]", recipes[base]) for source, recipes in layers if base in recipes]
        if not entries:
            names = {recipe for _, recipes in layers for recipe in recipes}
            raise UsageError(f"unknown recipe {base!r}", chain[0][0] if chain else "--recipe", nearest(base, names))
        for where, table in entries:
            _check(table, where)
        chain, seen = [*entries, *chain], [*seen, base]
        base = next((table["base"] for _, table in reversed(entries) if "base" in table), None)
    origins: dict[str, list[Assignment]] = {}
    for where, table in chain:
        for key, value in table.items():
            flat = {f"{key}.{inner}": item for inner, item in value.items()} if key in _TABLES else {key: value}
            for full, item in flat.items():
                origins.setdefault(full, []).append(Assignment(item, where))
    return TrainingRecipe(name, origins)


def _check(table: Mapping[str, Any], where: str) -> None:
    for key, value in table.items():
        if key not in _KEYS:
            raise UsageError(f"unknown key {key!r}", where, nearest(key, _KEYS))
        kind = _KEYS[key]
        if not _fits(value, kind):
            kinds: dict[type, str] = {str: "a string", list: "a list of strings", dict: "a table"}
            raise UsageError(f"{key} must be {kinds[kind]}, got {value!r}", where)


def _fits(value: Any, kind: type) -> bool:
    if isinstance(value, list):
        return kind is list and all(isinstance(item, str) for item in value)
    return isinstance(value, kind)
