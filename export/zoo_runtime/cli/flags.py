"""The flags of ``zoo run``, in groups by what they concern."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["BatchFlags", "InputFlags", "OutputFlags", "TaskFlags", "take"]

Group = TypeVar("Group", "BatchFlags", "InputFlags", "OutputFlags", "TaskFlags")


def take(group: type[Group], flags: dict[str, Any]) -> Group:
    """Make a group of those flags that are its fields, and remove them from ``flags``."""
    return group(**{field.name: flags.pop(field.name) for field in fields(group)})


@dataclass(frozen=True, kw_only=True)
class InputFlags:
    """Inputs, and how to read them."""

    texts: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...]
    id_lists: tuple[str, ...]
    input_file: str | None
    column: str | None
    pair_column: str | None
    id_column: str | None
    chat: bool
    image: Path | None
    adapters: tuple[str, ...]

    @property
    def main_column(self) -> str:
        """The column of inputs in a file with columns."""
        return self.column or ("messages" if self.chat else "text")


@dataclass(frozen=True, kw_only=True)
class OutputFlags:
    """Where answers go."""

    output_name: str | None
    training_data: Path | None
    figure: Path | None
    maps: Path | None
    resume: bool
    force: bool
    stream: bool | None
    as_json: bool

    @property
    def output(self) -> Path | None:
        """The file of results."""
        return None if self.output_name is None else Path(self.output_name)


@dataclass(frozen=True, kw_only=True)
class TaskFlags:
    """The task, and its options."""

    task: str | None
    settings: tuple[str, ...]
    """Options as ``KEY=VALUE``, parsed by the task."""
    options: dict[str, Any]
    """Options that have flags of their own."""
    batch_size: int | None


@dataclass(frozen=True, kw_only=True)
class BatchFlags:
    """How the files of a batch are shared out."""

    engine: str | None
    workers: int | None

    def is_asked(self, input_file: str | None) -> bool:
        """Whether the command is to run a batch: its inputs are several files, or it names an engine or workers."""
        if input_file is None:
            return self.engine is not None or self.workers is not None
        from zoo_runtime.batch.input_files import is_batch

        return self.engine is not None or self.workers is not None or is_batch(input_file)
