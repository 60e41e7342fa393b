"""Atomic changes to a directory: a crash leaves the old state or the new one, never a mixture.

A new directory is staged beside its target and renamed once. An existing directory is replaced only if it holds nothing
but files that zoo wrote. Additions to an existing directory are staged inside it; renaming the stage to ``.zoo-commit``
commits them, and the next process to open the directory finishes interrupted moves, if the committed files are the ones
that their manifest lists. Writers lock the directory that they change. A stage is locked while its writer lives and
contains a marker, so that abandoned stages are recognised and removed, and folders of the same name are not.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from zoo import signals, system
from zoo.errors import OTHER_PLACE, REPLACE, ArtifactError, UsageError, ZooWarning, storage_errors

__all__ = [
    "Owned",
    "add_to_directory",
    "check_file_target",
    "check_target",
    "new_directory",
    "new_file",
    "recover",
    "settled",
]

Owned = Callable[[Path], Collection[str] | None]
"""Lists the files in a directory that zoo wrote, as relative paths; None if zoo did not write the directory."""

STAGE = ".zoo-stage-"
COMMIT = ".zoo-commit"
MARKER, CONTENT = ".zoo", "content"
"""The entries of a stage: an empty file by which zoo knows it for its own, and the folder that is renamed."""
LAST = "manifest.json"
"""The file that is moved last: until then, the old manifest does not list the new files."""

_NAMED = 3
"""Maximum number of directory entries named in an error."""


@contextmanager
def new_directory(target: Path, *, force: bool, owned: Owned, kind: str = "a model directory") -> Iterator[Path]:
    """Yield an empty directory that becomes ``target`` when the block ends, and is removed if the block raises.

    Raises :class:`UsageError` as :func:`check_target` does, and ``StorageError`` when the file system refuses.
    """
    with storage_errors(target):
        target = Path(os.path.abspath(target))  # noqa: PTH100  (resolve() would follow links)
        check_target(target, force=force, owned=owned, kind=kind)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _stage(target.parent, f".{target.name}{STAGE}", target) as stage:
            yield stage
            _make_durable(stage)
            with settled(target) if target.is_dir() and not target.is_symlink() else nullcontext():
                check_target(target, force=force, owned=owned, kind=kind)
                _publish(stage, target)


@contextmanager
def new_file(target: Path, *, force: bool) -> Iterator[Path]:
    """Yield the path of a file that becomes ``target`` when the block ends, and is removed if the block raises.

    Raises :class:`UsageError` when ``target`` exists and ``force`` is false, or is not a plain file, and
    ``StorageError`` when the file system refuses.
    """
    with storage_errors(target):
        target = Path(os.path.abspath(target))  # noqa: PTH100
        check_file_target(target, force=force)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _stage(target.parent, f".{target.name}{STAGE}", None) as stage:
            yield stage / target.name
            _make_durable(stage)
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
    with storage_errors(directory), _stage(directory, STAGE, None) as stage:
        yield stage
        _make_durable(stage)  # before locking, so that other writers wait less
        with settled(directory):
            removed = finish(stage)
            _make_durable(stage)
            with signals.deferred():
                _commit(stage, directory)
                with _warns(f"{directory} is written, but the next command that opens it must finish moving files"):
                    _move_committed(directory)
                for name in removed:
                    with _warns(f"{directory / name} is no longer used, but cannot be removed"):
                        (directory / name).unlink(missing_ok=True)


@contextmanager
def _warns(what: str) -> Iterator[None]:
    """Turn an ``OSError`` into a warning, after a change that can no longer be undone."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"{what} ({error.strerror})", ZooWarning, stacklevel=4)


def recover(directory: Path) -> None:
    """Finish an addition that a crash interrupted after it was committed, and undo an interrupted replacement.

    Raises :class:`ArtifactError`, without moving any file, for a ``.zoo-commit`` that is not a complete addition.
    """
    if not directory.exists() and os.path.isdir(_aside(directory)):  # noqa: PTH112  (false for a name too long)
        with storage_errors(directory), _locked(directory.parent):
            _restore(directory)
    if os.path.lexists(directory / COMMIT):
        with storage_errors(directory), settled(directory):
            pass


@contextmanager
def settled(directory: Path) -> Iterator[None]:
    """Finish any committed addition, and keep other writers out of the directory.

    Raises :class:`ArtifactError` as :func:`recover` does.
    """
    with _locked(directory):
        if os.path.lexists(directory / COMMIT):
            _check_committed(directory)
            _move_committed(directory)
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


def _move_committed(directory: Path) -> None:
    """Move committed files into place. The caller holds the directory's lock."""
    commit = directory / COMMIT
    for path in sorted(commit.iterdir(), key=lambda path: (path.name == LAST, path.name)):
        path.replace(directory / path.name)
    try:
        system.sync(directory)
    finally:
        with suppress(OSError):  # an empty one changes nothing, and the next process removes it
            commit.rmdir()


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
            elif not (name.startswith(STAGE) and _is_stage(path)):
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


def _check_writable(folder: Path) -> None:
    """Raise ``OSError`` if a folder cannot be written to or created, as far as permissions tell."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if os.path.lexists(parent))
    if not existing.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(existing))
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(existing))


@contextmanager
def _stage(parent: Path, prefix: str, target: Path | None) -> Iterator[Path]:
    """Yield a new directory in a stage, which is locked while its writer lives and removed finally."""
    stage = parent / f"{prefix}{secrets.token_hex(4)}"
    release: system.Release | None = None
    try:
        with _locked(parent):  # no other process may sweep the stage before it is locked
            _sweep(parent, prefix)
            if target is not None:
                _restore(target)
            stage.mkdir()
            release = system.try_lock(stage)
            (stage / MARKER).touch()
            (stage / CONTENT).mkdir()
        yield stage / CONTENT
    finally:
        with signals.deferred():
            _remove(stage)
            if release is not None:
                release()


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Lock a directory, waiting until the lock is free."""
    release = system.lock(directory)
    try:
        yield
    finally:
        release()


def _sweep(parent: Path, prefix: str) -> None:
    """Remove stages whose lock is free: their writer has ended."""
    for stage in parent.glob(f"{glob.escape(prefix)}*"):
        try:
            release = system.try_lock(stage) if _is_stage(stage) else None
        except OSError:
            continue  # another process removed it, or it is not ours to read
        if release is not None:  # otherwise its writer is alive
            _remove(stage)
            release()


def _is_stage(path: Path) -> bool:
    """Return whether zoo made this directory. Until its marker exists, it is empty."""
    return path.is_dir() and not path.is_symlink() and ((path / MARKER).is_file() or not any(path.iterdir()))


def _remove(stage: Path) -> None:
    """Remove a stage, its marker last, so that the next sweep can continue an interrupted removal."""
    for folder, _, _ in os.walk(stage / CONTENT):
        with suppress(OSError):
            os.chmod(folder, 0o700)  # noqa: PTH101  (a directory that was replaced may have been read-only)
    shutil.rmtree(stage / CONTENT, ignore_errors=True)
    with suppress(OSError):
        if [path.name for path in stage.iterdir()] == [MARKER]:
            (stage / MARKER).unlink()
        stage.rmdir()


def _make_durable(stage: Path) -> None:
    mode = stage.stat().st_mode & 0o777  # follows the umask; libraries may have set stricter modes
    for path in sorted(stage.rglob("*"), reverse=True):  # contents before their directory
        path.chmod(mode if path.is_dir() else mode & 0o666)
        system.sync(path)
    system.sync(stage)


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
        with _locked(other.parent):  # so that ``recover`` does not mistake an unfinished swap for a crash
            _swap_in_steps(one, other)


def _swap_in_steps(one: Path, other: Path) -> None:
    aside = _aside(other)
    with signals.deferred(), _renamed(other, aside), _renamed(one, other):
        aside.rename(one)


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.zoo-aside")


def _restore(target: Path) -> None:
    """Undo an interrupted swap in three steps: put the old directory back unless the new one is in place."""
    aside = _aside(target)
    if aside.is_dir() and not target.exists():
        aside.rename(target)
    shutil.rmtree(aside, ignore_errors=True)
