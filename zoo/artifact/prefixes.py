"""What a model says of its inputs and vectors: the task prefixes of T5, and the settings of sentence encoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from zoo.artifact.directory import ModelDirectory
from zoo.artifact.layout import PREFIXES, PROMPTS
from zoo.artifact.weights import load_json
from zoo.errors import ArtifactError, nearest

__all__ = ["MATRYOSHKA", "TaskPrefixes", "read_matryoshka", "read_prefixes", "read_prompts"]

MATRYOSHKA = ("matryoshka_dimensions", "is_matryoshka")
"""Keys of a checkpoint's config.json for vectors whose first numbers are vectors too; an import keeps them among the
settings of sentence-transformers."""


@dataclass(frozen=True)
class TaskPrefixes:
    """The prefixes of a model."""

    texts: Mapping[str, str] = field(default_factory=dict)
    """The texts, by the name of the task."""
    default: str | None = None
    """The task whose prefix is used by default."""


def read_prefixes(stored: ModelDirectory) -> TaskPrefixes:
    """Return the prefixes in the files of a model directory.

    Raises :class:`ArtifactError` as :func:`read_prompts` does.
    """
    prompts = read_prompts(stored.path / PROMPTS) if PROMPTS in stored.files else TaskPrefixes()
    texts = load_json(stored.path / PREFIXES) if PREFIXES in stored.files else {}
    return TaskPrefixes({**texts, **prompts.texts}, prompts.default)


def read_matryoshka(stored: ModelDirectory) -> tuple[int, ...] | bool:
    """Return the sizes to which a sentence encoder is trained to shorten its vectors (Kusupati et al. 2022).

    True if it says that it is trained for any size, False if it says nothing. Raises :class:`ArtifactError` for other
    values.
    """
    path = stored.path / PROMPTS
    said = load_json(path) if PROMPTS in stored.files else {}
    sizes, any_size = (said.get(key) for key in MATRYOSHKA)
    if any_size not in (None, True, False):
        raise ArtifactError(f"is_matryoshka must be true or false, got {any_size!r}", path)
    if sizes is None:
        return bool(any_size)
    if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes):
        raise ArtifactError(f"matryoshka_dimensions must be a list of positive numbers, got {sizes!r}", path)
    return tuple(sorted(sizes))


def read_prompts(path: Path) -> TaskPrefixes:
    """Return ``prompts`` and ``default_prompt_name`` of config_sentence_transformers.json.

    Raises :class:`ArtifactError` unless the prompts are texts and the default is the name of one.
    """
    said = load_json(path)
    texts, default = said.get("prompts") or {}, said.get("default_prompt_name")
    if not isinstance(texts, dict) or not all(isinstance(text, str | None) for text in texts.values()):
        raise ArtifactError("prompts do not map names to texts", path)
    if default is not None and (not isinstance(default, str) or default not in texts):
        raise ArtifactError(
            f"default_prompt_name {default!r} is not one of the prompts", path, nearest(str(default), texts)
        )
    return TaskPrefixes({name: text or "" for name, text in texts.items()}, default)
