"""Recovery from a crash: an addition that was committed is finished, an interrupted replacement is undone."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from zoo import system
from zoo.errors import ArtifactError, storage_errors
from zoo.storage.stages import locked

__all__ = ["COMMIT", "aside_of", "move_committed", "recover", "restore", "settled"]

COMMIT = ".zoo-commit"
LAST = "manifest.json"
"""The file that is moved last: until then, the old manifest does not list the new files."""


def recover(directory: Path) -> None:
    """Finish an addition that a crash interrupted after it was committed, and undo an interrupted replacement.

    Raises :class:`ArtifactError`, without moving any file, for a ``.zoo-commit`` that is not a complete addition.
    """
    if not directory.exists() and os.path.isdir(aside_of(directory)):  # noqa: PTH112  (false for a name too long)
        with storage_errors(directory), locked(directory.parent):
            restore(directory)
    if os.path.lexists(directory / COMMIT):
        with storage_errors(directory), settled(directory):
            pass


@contextmanager
def settled(directory: Path) -> Iterator[None]:
    """Finish any committed addition, and keep other writers out of the directory.

    Raises :class:`ArtifactError` as :func:`recover` does.
    """
    with locked(directory):
        if os.path.lexists(directory / COMMIT):
            _check_committed(directory)
            move_committed(directory)
        yield


def _check_committed(directory: Path) -> None:
    """Raise :class:`ArtifactError` unless zoo staged what is in ``.zoo-commit``: anyone may have put it there."""
    commit = directory / COMMIT
    try:
        if commit.is_symlink() or not commit.is_dir():
            raise ArtifactError("not a directory")
        if any(commit.iterdir()):  # otherwise only removing it remains
            _check_addition(commit, directory)
    except ArtifactError as error:
        raise ArtifactError(f"not a complete addition by zoo ({error})", commit, "move it elsewhere") from error


def _check_addition(addition: Path, directory: Path) -> None:
    """Raise :class:`ArtifactError` unless moving the files of ``addition`` into ``directory`` completes its manifest.

    The manifest of an addition is moved last. Files that were moved before it must be in ``directory`` already.
    """
    files, current = _listed(addition / LAST), _listed(directory / LAST)
    staged = {path.name for path in addition.iterdir()} - {LAST}
    for name in sorted(staged):
        if not _is_entry(addition / name, files.get(name)):
            raise ArtifactError(f"{name} is not the file that its {LAST} lists")
        if name not in current and os.path.lexists(directory / name):
            raise ArtifactError(f"{name} would replace a file that is not in the manifest")
    for name in sorted(files.keys() - staged):
        if files[name] != current.get(name) and not _is_entry(directory / name, files[name]):
            raise ArtifactError(f"{name} is missing")


def _listed(path: Path) -> dict[str, Any]:
    """Return the entries of a manifest by file name."""
    if path.is_symlink() or not path.is_file():
        raise ArtifactError("missing", path)
    try:
        files: dict[str, Any] = json.loads(path.read_bytes())["files"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ArtifactError("not a manifest", path) from error
    if not isinstance(files, dict) or any(Path(name).name != name for name in files):
        raise ArtifactError("not a manifest", path)
    return files


def _is_entry(path: Path, entry: object) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return entry == {"sha256": digest, "size": path.stat().st_size}


def move_committed(directory: Path) -> None:
    """Move committed files into place. The caller holds the directory's lock."""
    commit = directory / COMMIT
    for path in sorted(commit.iterdir(), key=lambda path: (path.name == LAST, path.name)):
        path.replace(directory / path.name)
    try:
        system.sync(directory)
    finally:
        with suppress(OSError):  # an empty one changes nothing, and the next process removes it
            commit.rmdir()


def aside_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.zoo-aside")


def restore(target: Path) -> None:
    """Undo an interrupted swap in three steps: put the old directory back unless the new one is in place."""
    aside = aside_of(target)
    if aside.is_dir() and not target.exists():
        aside.rename(target)
    shutil.rmtree(aside, ignore_errors=True)
