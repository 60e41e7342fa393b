"""Preset files: TOML tables of models, of recipes for training, and of known packages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from zoo.errors import UsageError, nearest
from zoo.reading import parse_toml, read_bytes

__all__ = [
    "Preset",
    "built_in_presets",
    "known_provider",
    "preset_layers",
    "read_presets",
    "read_tables",
    "user_presets",
]

SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """One ``[models.NAME]`` table as written, before inheritance and overrides."""

    name: str
    file: str
    base: str | None = None
    arch: str | None = None
    description: str | None = None
    tokenizer: str | None = None
    source: str | None = None
    """Published weights: ``OWNER/NAME@REVISION`` on the hub. Presets based on this one do not inherit it."""
    config: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of training: settings of training and of the objective."""

    @property
    def where(self) -> str:
        """The file and table, for messages."""
        return f"{self.file} [models.{self.name}]"


_TABLES = ("config", "training")
_KEYS = {**dict.fromkeys(("base", "arch", "description", "tokenizer", "source"), str), **dict.fromkeys(_TABLES, dict)}
_SOURCE = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")


def read_presets(path: Path, label: str | None = None) -> Mapping[str, Preset]:
    """Read a preset file. Messages call it ``label``, by default its path. Equal contents are parsed once.

    Raises :class:`UsageError` for invalid content, naming the file, the key and the nearest valid name.
    """
    source = label or str(path)
    return _parse_presets(_read(path, source), source)


def read_tables(path: Path, source: str) -> dict[str, dict[str, Any]]:
    """Return the tables ``models``, ``packages`` and ``recipes`` of a preset file, called ``source`` in messages.

    Raises :class:`UsageError` for a file that cannot be read, is not TOML, or has other tables.
    """
    return _parse_tables(_read(path, source), source)


def _read(path: Path, source: str) -> bytes:
    try:
        return read_bytes(path, UsageError)
    except OSError as error:
        raise UsageError(f"cannot read ({error.strerror})", source) from error


@lru_cache(maxsize=64)
def _parse_presets(content: bytes, source: str) -> Mapping[str, Preset]:
    tables = _parse_tables(content, source)
    return MappingProxyType({name: _make_preset(name, table, source) for name, table in tables["models"].items()})


def _parse_tables(content: bytes, source: str) -> dict[str, dict[str, Any]]:
    """Parse the tables of a file."""
    try:
        data = parse_toml(content.decode())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not valid TOML ({error})", source) from error
    keys = {"models": "a model", "packages": "a package", "recipes": "a recipe"}
    for key in data:
        if key != "schema" and key not in keys:
            raise UsageError(f"unknown key {key!r}", source, nearest(key, ["schema", *keys]))
    if data.get("schema") != SCHEMA or isinstance(data["schema"], bool):
        raise UsageError(f"schema must be {SCHEMA}, got {data.get('schema')!r}", source)
    for key, what in keys.items():
        tables = data.setdefault(key, {})
        if not isinstance(tables, dict):
            raise UsageError(f"{key} must be a table", source, f"write [{key}.NAME]")
        for name, table in tables.items():
            where = f"{source} [{key}.{name}]"
            if not isinstance(table, dict):
                raise UsageError(f"{what} must be a table", where)
            if not name or not all(character.isalnum() or character in "-_." for character in name) or name[0] in "-.":
                bad = f"bad {what.removeprefix('a ')} name {name!r}"
                raise UsageError(bad, where, "use letters, digits, '-', '_' and '.'")
    return data


def _make_preset(name: str, table: Mapping[str, Any], source: str) -> Preset:
    where = f"{source} [models.{name}]"
    for key, value in table.items():
        if key not in _KEYS:
            raise UsageError(f"unknown key {key!r}", where, nearest(key, _KEYS))
        if not isinstance(value, _KEYS[key]):
            expected = "a table" if _KEYS[key] is dict else "a string"
            raise UsageError(f"{key} must be {expected}, got {value!r}", where)
    if "source" in table and not _SOURCE.fullmatch(table["source"]):
        raise UsageError(f"source must be a name on the hub, got {table['source']!r}", where, "write OWNER/NAME@COMMIT")
    return Preset(name=name, file=source, **table)


def built_in_presets() -> Path:
    """Return the path of registry.toml: in the package ``zoo`` of a wheel, or in the root of an editable install."""
    package = Path(__file__).parents[1]
    packaged = package / "registry.toml"
    return packaged if packaged.exists() else package.parent / "registry.toml"


def user_presets() -> Path:
    """Return the path of the user's registry.toml, in the platform's configuration directory."""
    import click

    return Path(click.get_app_dir("zoo")) / "registry.toml"


def project_presets() -> Path | None:
    """Return the ``zoo.toml`` of the current directory or its nearest parent that has one, or None."""
    here = Path.cwd()
    return next((path for folder in (here, *here.parents) if (path := folder / "zoo.toml").is_file()), None)


def preset_layers() -> Iterator[tuple[Path, str | None]]:
    """Yield the existing preset files of zoo, the user and the project, in increasing precedence, with their labels."""
    yield built_in_presets(), "built-in registry.toml"
    for path in (user_presets(), project_presets()):
        if path is not None and path.is_file():
            yield path, None


def known_provider(name: str) -> str | None:
    """Return how to install a package that provides ``name``, from the tables ``[packages.DISTRIBUTION]``, or None."""
    for path, label in preset_layers():
        source = label or str(path)
        for package, table in read_tables(path, source)["packages"].items():
            names, install = table.get("provides"), table.get("install")
            if not isinstance(names, list) or not isinstance(install, str) or len(table) > 2:
                where = f"{source} [packages.{package}]"
                raise UsageError("a package must have provides, a list of names, and install, a string", where)
            if name in names:
                return f"{package} provides it: {install}"
    return None
