"""The plan of a batch, its shards and their outcomes, as plain data."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from zoo.errors import ArtifactError, ParityError, PluginError, StorageError, UsageError, ZooError
from zoo.plugins import Selection

__all__ = ["Done", "Failure", "Plan", "Shard"]

_LOCATIONS = ("directory", "model", "output", "selection")
"""Fields of a plan that its results do not depend on, and the digest of the model, which is recorded apart."""
_CLASSES = {cls.__name__: cls for cls in (ArtifactError, ParityError, PluginError, StorageError, UsageError, ZooError)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How each shard of a batch is run."""

    directory: str
    """The absolute path of the model directory, the same on every machine."""
    model: str
    """SHA-256 of the model, its export and the evidence for it, and those of the model that drafts."""
    output: str
    """The folder of results: an absolute path, or a URL of fsspec."""
    session: Mapping[str, Any]
    """Arguments of :func:`zoo_runtime.load_session`."""
    versions: Mapping[str, str]
    """Versions of the packages that compute."""
    task: str | None = None
    settings: Sequence[str] = ()
    """Options of the task, as texts ``KEY=VALUE``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the task with values."""
    column: str = "text"
    id_column: str | None = None
    pair_column: str | None = None
    adapter: str | None = None
    batch_size: int | None = None
    selection: Mapping[str, Any] = field(default_factory=dict)
    """The plugins that may be imported: fields of the selection."""

    @property
    def threads(self) -> int:
        """The number of threads of a worker."""
        return int(self.session.get("threads") or 1)

    @property
    def draft(self) -> str | None:
        """The absolute path of the model that drafts tokens, if there is one."""
        values = dict(text.partition("=")[::2] for text in self.settings)
        return self.options.get("draft", values.get("draft"))

    def identity(self) -> dict[str, Any]:
        """Return what the results depend on, apart from the inputs."""
        options = {name: value for name, value in asdict(self).items() if name not in _LOCATIONS}
        identity: dict[str, Any] = json.loads(json.dumps({"model": self.model, "options": options}))
        return identity

    def digest(self) -> str:
        """Return the SHA-256 of :meth:`identity`."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        """Return the plan as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Invert :meth:`to_json`."""
        return cls(**json.loads(text))


def plain_selection(selection: Selection) -> dict[str, Any]:
    """Return the fields of a selection as plain data."""
    only = None if selection.only is None else sorted(selection.only)
    return {"third_party": selection.third_party, "only": only, "disabled": sorted(selection.disabled)}


def selection_of(plan: Plan) -> Selection:
    """Return the selection of plugins of a plan."""
    only = plan.selection.get("only")
    return Selection(
        bool(plan.selection.get("third_party", True)),
        None if only is None else frozenset(only),
        frozenset(plan.selection.get("disabled", ())),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A file of inputs."""

    source: str
    """Its path or URL."""
    target: str
    """The name of its results in the output folder."""
    size: int
    """Its size in bytes."""
    changed: str
    """The time of its last change or its entity tag, as its file system reports it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An error that can be sent between processes."""

    kind: str
    """The name of its class."""
    text: str

    @classmethod
    def of(cls, error: ZooError) -> Self:
        """Describe an error."""
        name = next((base.__name__ for base in type(error).__mro__ if base.__name__ in _CLASSES), "ZooError")
        return cls(kind=name, text=error.command_line)

    def error(self) -> ZooError:
        """Return an error of the same class with the same text."""
        return _CLASSES.get(self.kind, ZooError)(self.text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """The outcome of a shard."""

    target: str
    """The name of its results in the output folder."""
    rows: int = 0
    """Number of inputs, with those that failed."""
    failed: int = 0
    """Number of inputs that failed."""
    size: int = 0
    """Size of the results in bytes."""
    sha256: str = ""
    """Digest of the results."""
    warnings: Sequence[str] = ()
    """One line for each input that failed, and other warnings."""
    failure: Failure | None = None
    """Why there are no results, such as a file that is damaged."""

    def fault(self) -> str | None:
        """Return what is wrong with the values, which may come from an engine of a plugin."""
        values: dict[str, Any] = self.to_dict()
        texts = values.pop("warnings")
        failure = values.pop("failure")
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            return f"warnings is {texts!r:.60}, which must be a sequence of texts"
        if not (
            failure is None or (isinstance(self.failure, Failure) and all(type(v) is str for v in failure.values()))
        ):
            return f"failure is {failure!r:.60}, which must be a zoo_runtime.batch.Failure of texts"
        if wrong := [name for name in ("rows", "failed", "size") if type(values[name]) is not int or values[name] < 0]:
            return f"{wrong[0]} is {values[wrong[0]]!r:.60}, which must be a number from 0"
        if self.failed > self.rows:
            return f"{self.failed} of {self.rows} inputs failed"
        if failure is None and not (type(self.sha256) is str and re.fullmatch("[0-9a-f]{64}", self.sha256)):
            return f"sha256 is {self.sha256!r:.60}, which must be 64 hexadecimal digits"
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Invert :meth:`to_dict`."""
        failure = values.get("failure")
        members = {item.name: values[item.name] for item in fields(cls) if item.name in values}
        return cls(**{**members, "failure": None if failure is None else Failure(**failure)})
