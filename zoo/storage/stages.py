"""Stages: directories whose files are not yet, or no longer, where they belong."""

from __future__ import annotations

import glob
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zoo import signals, system
from zoo.errors import StorageError, storage_errors

__all__ = ["STAGE", "is_stage", "locked", "make_durable", "scratch_folder", "staged", "sweep"]

STAGE = ".zoo-stage-"
_SCRATCH = "zoo-scratch-"
MARKER, CONTENT = ".zoo", "content"
"""The entries of a stage: an empty file by which zoo knows it for its own, and the folder that is renamed."""


@contextmanager
def staged(parent: Path, prefix: str, prepare: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """Yield a new directory in a stage, which is locked while its writer lives and removed finally.

    Stages that a killed process left are removed. ``prepare`` is called while ``parent`` is locked.
    """
    stage = parent / f"{prefix}{secrets.token_hex(4)}"
    release: system.Release | None = None
    try:
        with locked(parent):  # no other process may sweep the stage before it is locked
            _sweep(parent, f"{glob.escape(prefix)}*")
            prepare()
            stage.mkdir()
            _open_to_owner(stage)  # its content follows the umask, even one with which nobody can write to it
            release = system.try_lock(stage)
            _fill(stage)
        yield stage / CONTENT
    finally:
        with signals.deferred():
            _remove(stage)
            if release is not None:
                release()


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield an empty directory among the temporary files of the system, which only this user can read.

    It is removed finally. Those that killed processes left are removed first. Raises ``StorageError`` if none can be
    made.
    """
    parent = _temporary()
    stage: Path | None = None
    release: system.Release | None = None
    try:
        with storage_errors(parent):
            _sweep(parent, f"{_SCRATCH}*")
            while stage is None or release is None:  # another process may sweep the stage before it is locked
                stage = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=parent))
                with suppress(FileNotFoundError):
                    _open_to_owner(stage)
                    release = system.try_lock(stage)
            _fill(stage)
            _open_to_owner(stage / CONTENT)
        yield stage / CONTENT
    finally:
        with signals.deferred():
            if stage is not None:
                _remove(stage)
            if release is not None:
                release()


def _open_to_owner(folder: Path) -> None:
    """Let the owner of a directory enter and change it, whatever the umask was."""
    folder.chmod(folder.stat().st_mode & 0o777 | 0o700)


def _temporary() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        remedy = "set TMPDIR to a folder that is writable"
        raise StorageError("no folder for temporary files is writable", os.environ.get("TMPDIR"), remedy) from error


def _fill(stage: Path) -> None:
    (stage / MARKER).touch()
    (stage / CONTENT).mkdir()


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock a directory, waiting until the lock is free."""
    release = system.lock(directory)
    try:
        yield
    finally:
        release()


def sweep(directory: Path) -> bool:
    """Remove what killed writers have left in a directory. Return whether nothing is left: no writer is at work."""
    pattern = f"*{STAGE}*"
    with storage_errors(directory), locked(directory):
        _sweep(directory, pattern)
        return not any(directory.glob(pattern))


def _sweep(parent: Path, pattern: str) -> None:
    """Remove stages of this user whose lock is free: their writer has ended."""
    for stage in parent.glob(pattern):
        try:
            release = system.try_lock(stage) if is_stage(stage) and system.is_own(stage) else None
        except OSError:
            continue  # another process removed it, or it is not ours to read
        if release is not None:  # otherwise its writer is alive
            _remove(stage)
            release()


def is_stage(path: Path) -> bool:
    """Return whether zoo made this directory. Until its marker exists, it is empty."""
    return path.is_dir() and not path.is_symlink() and ((path / MARKER).is_file() or not any(path.iterdir()))


def _remove(stage: Path) -> None:
    """Remove a stage, its marker last, so that the next sweep can continue an interrupted removal."""
    with suppress(OSError):
        _open_to_owner(stage / CONTENT)
    for folder, names, _ in os.walk(stage / CONTENT):  # descends into directories after they can be entered
        for path in (Path(folder, name) for name in names):
            with suppress(OSError):
                if not path.is_symlink():
                    _open_to_owner(path)
    shutil.rmtree(stage / CONTENT, ignore_errors=True)
    with suppress(OSError):
        if [path.name for path in stage.iterdir()] == [MARKER]:
            (stage / MARKER).unlink()
        stage.rmdir()


def make_durable(stage: Path) -> None:
    mode = stage.stat().st_mode & 0o777  # follows the umask; libraries may have set stricter modes
    for path in sorted(stage.rglob("*"), reverse=True):  # contents before their directory
        path.chmod(mode if path.is_dir() else mode & 0o666)
        system.sync(path)
    system.sync(stage)
