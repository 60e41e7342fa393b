"""Texts that a model expects before each input: the task prefixes of T5, and the prompts of sentence encoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from zoo.artifact.directory import ModelDirectory
from zoo.artifact.layout import PREFIXES, PROMPTS
from zoo.artifact.weights import load_json
from zoo.errors import ArtifactError, nearest

__all__ = ["TaskPrefixes", "read_prefixes", "read_prompts"]


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
