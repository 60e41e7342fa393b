"""Atomic changes to a directory: a crash leaves the old state or the new one, never a mixture.

A new directory is staged beside its target and renamed once. Additions to an existing directory are staged inside it;
renaming the stage to ``.zoo-commit`` commits them, and whoever opens the directory next finishes the moves. A stage is
locked while its writer lives, so an abandoned one is recognised and swept.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from zoo.errors import UsageError, storage_errors

__all__ = ["add_to_directory", "check_file_target", "check_target", "new_directory", "new_file", "recover"]

STAGE = ".zoo-stage-"
COMMIT = ".zoo-commit"
LAST = "manifest.json"
"""The file that is moved last: until it is, its predecessor does not mention the others."""

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def new_directory(
    target: Path, *, force: bool, replaceable: Callable[[Path], bool], kind: str = "a model directory"
) -> Iterator[Path]:
    """Yield an empty directory that becomes ``target`` when the block ends, and vanishes if it raises.

    Raises :class:`UsageError` when ``target`` exists and ``force`` is false, or is not ``replaceable``, which means not
    of this ``kind``, and ``StorageError`` when the file system refuses.
    """
    target = Path(os.path.abspath(target))  # noqa: PTH100  (resolve() would follow a link that we replace)
    with storage_errors(target):
        check_target(target, force=force, replaceable=replaceable, kind=kind)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _stage(target.parent, f".{target.name}{STAGE}", target) as stage:
            yield stage
            _make_durable(stage)
            check_target(target, force=force, replaceable=replaceable, kind=kind)
            _publish(stage, target)


@contextmanager
def new_file(target: Path, *, force: bool) -> Iterator[Path]:
    """Yield the path of a file to write, which becomes ``target`` when the block ends, and vanishes if it raises.

    Raises :class:`UsageError` when ``target`` exists and ``force`` is false, or is not a plain file, and
    ``StorageError`` when the file system refuses.
    """
    target = Path(os.path.abspath(target))  # noqa: PTH100
    with storage_errors(target):
        check_file_target(target, force=force)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _stage(target.parent, f".{target.name}{STAGE}", None) as stage:
            yield stage / target.name
            _make_durable(stage)
            check_file_target(target, force=force)
            (stage / target.name).replace(target)
            _sync(target.parent)


@contextmanager
def add_to_directory(directory: Path) -> Iterator[Path]:
    """Yield an empty directory whose files are moved into ``directory`` when the block ends, all or none."""
    recover(directory)
    with storage_errors(directory), _stage(directory, STAGE, None) as stage:
        yield stage
        _make_durable(stage)
        with _locked(directory):
            _finish_commit(directory)
            stage.rename(directory / COMMIT)
            _sync(directory)
            _finish_commit(directory)


def recover(directory: Path) -> None:
    """Finish a committed addition that a crash interrupted."""
    commit = directory / COMMIT
    if commit.is_dir() and not commit.is_symlink():
        with storage_errors(directory), _locked(directory):
            _finish_commit(directory)


def _finish_commit(directory: Path) -> None:
    """Move committed files to their places; the directory is locked."""
    commit = directory / COMMIT
    if commit.is_dir() and not commit.is_symlink():
        for path in sorted(commit.iterdir(), key=lambda path: (path.name == LAST, path.name)):
            path.replace(directory / path.name)
        _sync(directory)
        commit.rmdir()


def check_target(
    target: Path, *, force: bool, replaceable: Callable[[Path], bool], kind: str = "a model directory"
) -> None:
    """Raise :class:`UsageError` unless ``target`` is free, or may be replaced."""
    with storage_errors(target):
        if not (target.is_symlink() or target.exists()):
            return
        if not force:
            raise UsageError("already exists", target, "use --force to replace it")
        if target.is_symlink() or not replaceable(target):
            raise UsageError(f"exists and is not {kind}", target, "choose another place with -o")


def check_file_target(target: Path, *, force: bool) -> None:
    """Raise :class:`UsageError` unless ``target`` is free, or is a plain file that may be replaced."""
    with storage_errors(target):
        if not (target.is_symlink() or target.exists()):
            return
        if not force:
            raise UsageError("already exists", target, "use --force to replace it")
        if target.is_symlink() or not target.is_file():
            raise UsageError("exists and is not a file", target, "choose another place with -o")


@contextmanager
def _stage(parent: Path, prefix: str, target: Path | None) -> Iterator[Path]:
    """Yield a new directory, locked as long as its writer lives, and remove what is left under its name."""
    stage = parent / f"{prefix}{secrets.token_hex(4)}"
    descriptor = -1
    try:
        with _locked(parent):  # nobody may sweep the stage between its making and its locking
            _sweep(parent, prefix)
            if target is not None:
                _restore(target)
            stage.mkdir()
            descriptor = os.open(stage, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        if descriptor >= 0:
            os.close(descriptor)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sweep(parent: Path, prefix: str) -> None:
    """Remove stages whose writer is gone: their lock can be had."""
    for stage in parent.glob(f"{glob.escape(prefix)}*"):
        try:
            descriptor = os.open(stage, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # swept by someone else meanwhile
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(stage, ignore_errors=True)
        except BlockingIOError:
            pass  # its writer lives
        finally:
            os.close(descriptor)


def _make_durable(stage: Path) -> None:
    mode = stage.stat().st_mode & 0o777  # what the umask leaves; libraries may have chosen less
    for path in sorted(stage.rglob("*"), reverse=True):  # what a directory holds comes before it
        path.chmod(mode if path.is_dir() else mode & 0o666)
        _sync(path)
    _sync(stage)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _publish(stage: Path, target: Path) -> None:
    """Give the stage the target's name, and the stage's to what was there. On failure nothing has changed."""
    replaces = target.exists()
    try:
        if replaces:
            _exchange(stage, target)
        else:
            stage.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise UsageError("already exists", target, "use --force to replace it") from error
        raise
    try:
        _sync(target.parent)
    except OSError:
        if replaces:
            _exchange(stage, target)
        else:
            target.rename(stage)
        raise


def _exchange(one: Path, other: Path) -> None:
    """Swap two directories in one step (renameat2), or in three where the system has no such call."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None:
        if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.ENOSYS, errno.EINVAL):
            raise OSError(code, os.strerror(code), str(other))
    aside = _aside(other)
    other.rename(aside)
    try:
        one.rename(other)
        try:
            aside.rename(one)
        except OSError:
            other.rename(one)
            raise
    except OSError:
        aside.rename(other)
        raise


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.zoo-aside")


def _restore(target: Path) -> None:
    """Undo a swap in three steps that a crash interrupted: put the old directory back, unless the new one is there."""
    aside = _aside(target)
    if aside.is_dir() and not target.exists():
        aside.rename(target)
    shutil.rmtree(aside, ignore_errors=True)
