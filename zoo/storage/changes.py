"""Atomic creation and replacement of directories and files, and additions to directories."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

from zoo import signals, system
from zoo.errors import REPLACE, StorageError, UnreadableError, UsageError, ZooWarning, renamed, storage_errors
from zoo.storage.recovery import COMMIT, aside_of, move_committed, recover, restore, settled
from zoo.storage.stages import STAGE, locked, make_durable, staged
from zoo.storage.targets import Owned, check_file_target, check_target

__all__ = ["add_to_directory", "new_directory", "new_file"]


@contextmanager
def new_directory(target: Path, *, force: bool, owned: Owned, kind: str = "a model directory") -> Iterator[Path]:
    """Yield an empty directory that becomes ``target`` when the block ends, and is removed if the block raises.

    Raises :class:`UsageError` as :func:`check_target` does, and ``StorageError`` when the file system refuses.
    """
    original = target
    with storage_errors(target):
        target = Path(os.path.abspath(target))  # noqa: PTH100  (resolve() would follow links)
        check_target(target, force=force, owned=owned, kind=kind)
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            staged(target.parent, f".{target.name}{STAGE}", partial(restore, target)) as stage,
            _known_as(stage, original),
        ):
            yield stage
            make_durable(stage)
            with settled(target) if target.is_dir() and not target.is_symlink() else nullcontext():
                check_target(target, force=force, owned=owned, kind=kind)
                _publish(stage, target)


@contextmanager
def new_file(target: Path, *, force: bool) -> Iterator[Path]:
    """Yield the path of a file that becomes ``target`` when the block ends, and is removed if the block raises.

    Raises :class:`UsageError` when ``target`` exists and ``force`` is false, or is not a plain file, and
    ``StorageError`` when the file system refuses.
    """
    original = target
    with storage_errors(target):
        target = Path(os.path.abspath(target))  # noqa: PTH100
        check_file_target(target, force=force)
        target.parent.mkdir(parents=True, exist_ok=True)
        with staged(target.parent, f".{target.name}{STAGE}") as stage, _known_as(stage / target.name, original):
            yield stage / target.name
            make_durable(stage)
            check_file_target(target, force=force)
            (stage / target.name).replace(target)
            with _warns(f"{target} is written, but a power failure may undo that"):
                system.sync(target.parent)


@contextmanager
def add_to_directory(directory: Path, finish: Callable[[Path], Collection[str]] = lambda stage: ()) -> Iterator[Path]:
    """Yield an empty directory whose files are moved into ``directory`` when the block ends, all or none.

    ``finish`` is called with the stage before the files are moved, while ``directory`` is locked, so that it can take
    into account what other writers have added meanwhile. It returns the names of files to remove.
    """
    recover(directory)
    with storage_errors(directory), staged(directory, STAGE) as stage, _known_as(stage, directory):
        yield stage
        make_durable(stage)  # before locking, so that other writers wait less
        with settled(directory):
            removed = finish(stage)
            make_durable(stage)
            with signals.deferred():
                _commit(stage, directory)
                with _warns(f"{directory} is written, but the next command that opens it must finish moving files"):
                    move_committed(directory)
                for name in removed:
                    with _warns(f"{directory / name} is no longer used, but cannot be removed"):
                        (directory / name).unlink(missing_ok=True)


@contextmanager
def _known_as(staged_path: Path, target: Path) -> Iterator[None]:
    """Name the target in errors about a staged file, of which one that cannot be read again is a ``StorageError``."""
    with renamed(staged_path, target):
        try:
            yield
        except UnreadableError as error:
            if str(staged_path) not in str(error):
                raise
            raise StorageError(str(error)) from error


@contextmanager
def _warns(what: str) -> Iterator[None]:
    """Turn an ``OSError`` into a warning, after a change that can no longer be undone."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"{what} ({error.strerror})", ZooWarning, stacklevel=4)


def _commit(stage: Path, directory: Path) -> None:
    """Rename the stage to ``.zoo-commit``, durably. On failure nothing has changed."""
    with _renamed(stage, directory / COMMIT):
        system.sync(directory)


@contextmanager
def _renamed(source: Path, target: Path) -> Iterator[None]:
    """Rename a directory, and rename it back if the block raises ``OSError``."""
    source.rename(target)
    try:
        yield
    except OSError:
        target.rename(source)
        raise


def _publish(stage: Path, target: Path) -> None:
    """Rename the stage to the target, exchanging names if the target exists. On failure nothing has changed."""
    replaces = target.exists()
    try:
        if replaces:
            _exchange(stage, target)
        else:
            stage.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise UsageError("already exists", target, REPLACE) from error
        raise
    try:
        system.sync(target.parent)
    except OSError:
        if replaces:
            _exchange(stage, target)
        else:
            target.rename(stage)
        raise


def _exchange(one: Path, other: Path) -> None:
    """Swap two directories atomically, or else in three steps that ``recover`` undoes after a crash."""
    if not system.swap(one, other):
        with locked(other.parent):  # so that ``recover`` does not mistake an unfinished swap for a crash
            _swap_in_steps(one, other)


def _swap_in_steps(one: Path, other: Path) -> None:
    aside = aside_of(other)
    with signals.deferred(), _renamed(other, aside), _renamed(one, other):
        aside.rename(one)
