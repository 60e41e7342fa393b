"""Provenance of a model's weights, recorded in ``config.json`` and shown in the model card."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath
from typing import Any, Literal, Self

from zoo.config import Settings

__all__ = ["Origin", "Training", "base_name", "fold_names"]

Kind = Literal["initialised", "imported", "adapted", "trained", "modified", "unknown"]


def base_name(path: str | os.PathLike[str]) -> str:
    """Return the last part of a path, including for ``.`` and for links. Bytes that are not UTF-8 are escaped."""
    name = os.path.basename(os.path.abspath(path))  # noqa: PTH100, PTH119  (resolve() would follow links)
    return name.encode(errors="backslashreplace").decode()


def fold_names(names: Iterable[str]) -> list[str]:
    """Replace the numbers in names of tensors by ``*`` where several names differ only in them.

    >>> fold_names(["head.bias", "blocks.0.norm.bias", "blocks.1.norm.bias"])
    ['head.bias', 'blocks.*.norm.bias']
    """
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), []).append(name)
    return [alike_names[0] if len(alike_names) == 1 else folded for folded, alike_names in alike.items()]


@dataclass(frozen=True, kw_only=True)
class Training(Settings):
    """A record of how weights were trained."""

    objective: str
    data: str
    """Hub id or base name of the data."""
    steps: int
    max_length: int | None = None
    """Number of tokens to which inputs were truncated, or into windows of which they were divided; None for neither."""


@dataclass(frozen=True, kw_only=True)
class Origin(Settings):
    """The provenance of weights, as far as it is known."""

    kind: Kind = "unknown"
    """``modified`` weights are those of ``parent`` after unrecorded changes."""
    source: str | None = None
    """Hub id, or base name of a file or directory; never a path. For adapted weights, the original model's name."""
    revision: str | None = None
    """Commit of a hub id."""
    format: str | None = None
    """Name of the importer."""
    license: str | None = None
    """As the source states it, for instance ``apache-2.0``."""
    comparison: str | None = None
    """Result of comparing an imported model with the original implementation."""
    answers: str | None = None
    """Result of comparing it from text to answer: token ids, chats, vectors and classes."""
    seed: int | None = None
    """Random seed of initialised weights."""
    changes: tuple[str, ...] = ()
    """Changes made to the weights of the source or the parent."""
    training: Training | None = None
    """How trained weights were trained."""
    weights: str | None = None
    """SHA-256 of the described weights: of the names, dtypes, shapes and digests of all tensors."""
    parent: Origin | None = None
    """Origin of the weights from which these were made."""

    def __post_init__(self) -> None:
        if self.source is not None and PurePath(self.source).is_absolute():
            object.__setattr__(self, "source", base_name(self.source))

    def derive(self, kind: Kind, **known: Any) -> Origin:
        """Return the origin of weights made from these, with the same licence."""
        return Origin(kind=kind, license=self.license, parent=self, **known)

    def of(self, weights: str) -> Origin:
        """Return the origin of weights with this digest: unchanged, or ``modified`` if the digest differs."""
        if self.kind == "unknown":
            return replace(self, weights=weights)
        before = self.parent if self.kind == "modified" and self.parent is not None else self
        recorded = next((origin for origin in (self, before) if origin.weights == weights), None)
        return recorded if recorded is not None else before.derive("modified", weights=weights)

    @property
    def last_training(self) -> Training | None:
        """The last training of these weights, or of those from which they were made otherwise; None if unknown."""
        if self.kind in ("adapted", "modified") and self.parent is not None:
            return self.parent.last_training
        return self.training

    def to_dict(self) -> dict[str, Any]:
        """Return JSON data without unknown fields."""
        return _without_empty(asdict(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: object = None) -> Self:
        """Invert :meth:`to_dict`, ignoring unknown keys. Raises :class:`UsageError` for wrong values."""
        fields = {key: value for key, value in values.items() if key in cls.field_types()}
        for key, kind in (("training", Training), ("parent", Origin)):
            if isinstance(fields.get(key), dict):
                fields[key] = kind.from_dict(fields[key], where)
        return super().from_dict(fields, where)

    def __str__(self) -> str:
        """Return a one-line description."""
        return "; before that: ".join(" ".join(text.split()) for text in self._texts())

    def _texts(self) -> list[str]:
        """Describe this origin and its parents, newest first."""
        source = self.source or "an unnamed source"
        details = list(self.changes)
        match self.kind:
            case "initialised":
                seed = f" from seed {self.seed}" if self.seed is not None else ""
                text = f"randomly initialised{seed}, not trained"
            case "imported":
                text = f"imported from {source}"
                if self.revision:
                    details.insert(0, f"revision {self.revision}")
                if self.format:
                    details.insert(0, f"{self.format} layout")
            case "adapted":
                text = f"adapted from {source}"
            case "trained":
                record = self.training
                text = "trained"
                text += f" for {record.steps} steps on {record.data} ({record.objective})" if record is not None else ""
            case "modified":
                text = "modified in an unrecorded way"
            case "unknown":
                text = "of unknown origin"
        text += f" ({', '.join(details)})" if details else ""
        text += "".join(f", {result}" for result in (self.comparison, self.answers) if result)
        return [text, *(self.parent._texts() if self.parent is not None else ())]


def _without_empty(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested data without ``None`` and empty tuples."""
    return {
        key: _without_empty(value) if isinstance(value, dict) else value
        for key, value in data.items()
        if value not in (None, ())
    }
