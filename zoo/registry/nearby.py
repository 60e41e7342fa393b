"""Suggestions for a mistyped name: the presets and the directories with the most similar names."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from itertools import islice, product
from pathlib import Path

from zoo.errors import ArtifactError, UsageError, ZooError, closest, did_you_mean, nearest
from zoo.plugins.presets import known_provider
from zoo.registry.resolution import Registry, registry

__all__ = ["check_name", "no_directory", "no_match", "similar_path"]

_ENTRIES = 10_000
"""Maximum number of names in a folder that are compared."""
_PATTERNS = 81
"""Maximum number of patterns that are tried."""


def no_directory(path: str | os.PathLike[str], remedy: str | None = None) -> ArtifactError:
    """Return the error about a path that is no directory.

    It suggests the preset of this name, or the nearest directories beside the path and the nearest presets, or else
    ``remedy``.
    """
    given, path = path, Path(path)
    if path.exists():
        return ArtifactError("not a directory", given)
    presets: list[str] = []
    if path.parent == Path():
        with suppress(ZooError):
            presets = registry().names()
    beside = _names(path.parent, directories=True)
    near = closest(path.name, {*beside, *presets})
    if path.name in presets:
        remedy = f"make it with zoo build {path.name}"
    elif near and near[0] in beside:
        remedy = did_you_mean([str(path.with_name(name)) for name in near if name in beside])
    elif near:
        remedy = f"did you mean the preset {near[0]!r}? make it with zoo build {near[0]}"
    return ArtifactError("no such directory", given, remedy)


def similar_path(path: Path) -> str | None:
    """Return a remedy with the nearest names beside a path, of files or directories, or None when none is close."""
    return did_you_mean([str(path.with_name(name)) for name in closest(path.name, _names(path.parent))])


def _names(folder: Path, directories: bool = False) -> list[str]:
    with suppress(OSError), os.scandir(folder) as entries:
        shown = (entry for entry in islice(entries, _ENTRIES) if not entry.name.startswith("."))
        return [entry.name for entry in shown if entry.is_dir() or not directories]
    return []


def check_name(name: str) -> None:
    """Raise the error about a model that is neither a directory nor a preset, if it can suggest a directory.

    Raises :class:`ArtifactError` for a path, and :class:`UsageError` for a name.
    """
    known = registry().names()
    if ":" in name or name in known:
        return
    if "/" in name:
        raise no_directory(name)
    beside = _names(Path(), directories=True)
    if closest(name, beside):
        remedy = known_provider(name) or nearest(name, {*known, *beside})
        raise UsageError(f"unknown model {name!r}", None, remedy)


def no_match(presets: Registry, pattern: str) -> UsageError:
    """Return the error about a pattern that no preset matches.

    It suggests patterns of the nearest words that names of presets have, or else the nearest names.
    """
    names = presets.names()
    words = {word for name in names for word in name.split("-")}
    parts = re.split(r"([\w.]+)", pattern)  # every second one is a word
    choices = [_similar_words(part, words) if place % 2 else [part] for place, part in enumerate(parts)]
    patterns = islice(map("".join, product(*choices)), _PATTERNS)
    similar = did_you_mean([text for text in patterns if presets.names(text)][:3])
    remedy = known_provider(pattern) or similar or nearest(pattern, names)
    return UsageError(f"no preset matches {pattern!r}", None, remedy)


def _similar_words(word: str, words: set[str]) -> list[str]:
    """Return the nearest words, those of the same letters first, or the word itself."""
    return sorted(closest(word, words), key=lambda other: sorted(other) != sorted(word.casefold())) or [word]
