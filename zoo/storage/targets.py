"""Checks that a target is free, or may be replaced."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from zoo.errors import OTHER_PLACE, REPLACE, UsageError, storage_errors
from zoo.storage.recovery import recover
from zoo.storage.stages import STAGE, is_stage

__all__ = ["Owned", "check_file_target", "check_target", "is_same_file"]

Owned = Callable[[Path], Collection[str] | None]
"""Lists the files in a directory that zoo wrote, as relative paths; None if zoo did not write the directory."""

_NAMED = 3
"""Maximum number of directory entries named in an error."""


def check_target(target: Path, *, force: bool, owned: Owned, kind: str = "a model directory") -> None:
    """Raise :class:`UsageError` unless ``target`` is free or may be replaced.

    Raises ``StorageError`` if it is not writable. With ``force``, a directory that is empty or holds ``owned`` files
    only may be replaced. The current directory and those that contain it are never replaced: the caller's shell would
    be left in a deleted directory. ``kind`` is the kind of directory named in the error.
    """
    with storage_errors(target):
        _check_writable(target.parent)
        if not (target.is_symlink() or target.exists()):
            return
        if not target.is_symlink() and Path.cwd().is_relative_to(target.resolve()):
            raise UsageError("is or contains the current directory", target, "run this from its parent directory")
        if not force:
            raise UsageError("already exists", target, REPLACE)
        if target.is_symlink() or not target.is_dir():
            raise UsageError(f"exists and is not {kind}", target, OTHER_PLACE)
        recover(target)
        files = owned(target)
        foreign = list(_foreign(target, files or ()))
        if foreign and files is None:
            raise UsageError(f"exists and is not {kind}", target, OTHER_PLACE)
        if foreign:
            names = ", ".join(foreign[:_NAMED]) + (f" and {len(foreign) - _NAMED} more" if foreign[_NAMED:] else "")
            what = f"contains files other than those zoo wrote ({names})"
            raise UsageError(what, target, "move them elsewhere first, or choose another place")


def _foreign(directory: Path, owned: Collection[str], prefix: str = "") -> Iterator[str]:
    """Yield the entries of a directory that are not owned. A directory without owned files is one entry."""
    for path in sorted(directory.iterdir()):
        name = prefix + path.name
        if path.is_dir() and not path.is_symlink():
            if any(file.startswith(f"{name}/") for file in owned):
                yield from _foreign(path, owned, f"{name}/")
            elif not (name.startswith(STAGE) and is_stage(path)):
                yield f"{name}/"
        elif name not in owned:
            yield name


def check_file_target(target: Path, *, force: bool) -> None:
    """Raise :class:`UsageError` unless ``target`` is free or a plain file that may be replaced.

    Raises ``StorageError`` if it is not writable.
    """
    with storage_errors(target):
        _check_writable(target.parent)
        if not (target.is_symlink() or target.exists()):
            return
        if not force:
            raise UsageError("already exists", target, REPLACE)
        if target.is_symlink() or not target.is_file():
            raise UsageError("exists and is not a file", target, OTHER_PLACE)


def is_same_file(one: Path, other: Path) -> bool:
    """Return whether both paths lead to one file. False for one that cannot be looked up; its user will say so."""
    try:
        return one.samefile(other)
    except OSError:
        return False


def _check_writable(folder: Path) -> None:
    """Raise ``OSError`` if a folder cannot be written to or created, as far as permissions tell."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if os.path.lexists(parent))
    if not existing.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(existing))
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(existing))
