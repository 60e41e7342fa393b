"""Output directories that are not model directories, with a record of the files that zoo wrote.

The record lets a later ``--force`` distinguish those files from the user's. This module never imports torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from zoo import storage
from zoo.artifact import SIGNATURE, entry_of, write_json
from zoo.artifact.weights import load_json, read_if_valid

__all__ = ["check_output_target", "new_output"]

RECORD = ".zoo-files.json"
"""SHA-256 and size of every other file, and the command that wrote them."""
SCHEMA = 1


@contextmanager
def new_output(target: Path, command: str, *, force: bool) -> Iterator[Path]:
    """Yield an empty directory that becomes ``target`` when the block ends, with a record of its files.

    Raises :class:`zoo.UsageError` as :func:`check_output_target` does.
    """
    with storage.new_directory(target, force=force, owned=_owned_by(command), kind=_kind(command)) as stage:
        yield stage
        files = {str(path.relative_to(stage)): entry_of(path) for path in stage.rglob("*") if path.is_file()}
        write_json(stage / RECORD, {"schema": SCHEMA, "command": command, "files": dict(sorted(files.items()))})


def check_output_target(target: Path, command: str, *, force: bool) -> None:
    """Raise :class:`zoo.UsageError` unless ``command`` can write its output to the directory ``target``.

    With ``force``, an existing directory may be replaced if the same command wrote every file in it and none has
    changed since.
    """
    storage.check_target(target, force=force, owned=_owned_by(command), kind=_kind(command))


def _kind(command: str) -> str:
    return f"a directory written by zoo {command}"


def _owned_by(command: str) -> storage.Owned:
    def owned(directory: Path) -> Collection[str] | None:
        record = read_if_valid(directory / RECORD, load_json) or {}
        files = record.get("files")
        if (record.get("schema"), record.get("command")) != (SCHEMA, command) or not isinstance(files, dict):
            return None
        return {RECORD, SIGNATURE, *(name for name, entry in files.items() if _is_unchanged(directory / name, entry))}

    return owned


def _is_unchanged(path: Path, entry: object) -> bool:
    return path.is_file() and entry == entry_of(path)
