"""The description of a run, as it is stored in an unfinished model directory. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from zoo.artifact.weights import load_json
from zoo.errors import ArtifactError, UsageError
from zoo.training.settings import TrainingSettings

__all__ = ["PLAN", "Plan"]

PLAN = "training.json"
"""The plan of an unfinished run, or the record of a finished one."""
_SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that determines a run, apart from the code and the contents of files."""

    model: str
    """A preset or a model directory."""
    values: tuple[str, ...] = ()
    """``KEY=VALUE`` settings of the model's configuration."""
    task: str | None = None
    """The task of the trained model, if it differs from that of ``model``."""
    tokenizer: str | None = None
    objective: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the objective."""
    data: tuple[str, ...]
    """Files, directories, or the name of a data set."""
    validation: tuple[str, ...] = ()
    """The same for evaluations; by default the validation split of a data set."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """The name in the data of each column, by role."""
    skip_bad: int = 0
    settings: TrainingSettings
    digests: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of each file of data and of the tokenizer, by name."""

    def write(self, file: Path, progress: Mapping[str, Any]) -> None:
        """Write the plan and what is known of the run so far."""
        content = {"schema": _SCHEMA, "plan": asdict(self), "progress": dict(progress)}
        file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> tuple[Self, dict[str, Any]]:
        """Return the plan of an unfinished run and what :meth:`write` was given.

        Raises :class:`ArtifactError` if the file is malformed.
        """
        content = load_json(file)
        try:
            if content["schema"] != _SCHEMA:
                raise ValueError(f"schema {content['schema']} is unknown")
            stored: dict[str, Any] = dict(content["plan"])
            settings = TrainingSettings.from_dict(stored.pop("settings"), file)
            stored |= {key: tuple(stored[key]) for key in ("values", "data", "validation")}
            return cls(settings=settings, **stored), dict(content["progress"])
        except (KeyError, TypeError, ValueError, UsageError) as error:
            raise ArtifactError(f"not the plan of a training run ({error})", file) from error
