"""Errors a user can act on. Each class has one exit status; see "Exit status" in the README."""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

__all__ = [
    "ArtifactError",
    "ParityError",
    "PluginError",
    "StorageError",
    "UsageError",
    "ZooError",
    "nearest",
    "storage_errors",
]


class ZooError(Exception):
    """A failure with its remedy, printed as one line: ``what: where: what to do``."""

    exit_code = 1

    def __init__(self, what: str, where: object = None, remedy: str | None = None) -> None:
        parts = [str(part) for part in (what, where, remedy) if part not in (None, "")]
        super().__init__(" ".join(": ".join(parts).split()))


class UsageError(ZooError):
    """Unknown name, key or value, wrong type, or a target that exists."""

    exit_code = 2


class ArtifactError(ZooError):
    """A missing, truncated, altered or meaningless file or input."""

    exit_code = 3


class ParityError(ZooError):
    """The exported graph does not equal the model, or could not be shown to."""

    exit_code = 4


class PluginError(ZooError):
    """A plugin is missing, broken, or clashes with another."""

    exit_code = 5


class StorageError(ZooError):
    """The file system refused: unwritable, full, or failing."""

    exit_code = 6


def close_to(name: str, choices: Iterable[str]) -> str | None:
    """A remedy that names the choices closest to ``name``, where some are close."""
    close = difflib.get_close_matches(name, sorted(choices), n=3, cutoff=0.6)
    return "did you mean " + " or ".join(map(repr, close)) + "?" if close else None


def nearest(name: str, choices: Iterable[str]) -> str:
    """A remedy that names the choices closest to ``name``, or a few of them when none is close."""
    choices = sorted(choices)
    close = close_to(name, choices)
    if close:
        return close
    if not choices:
        return "there are none"
    shown = ", ".join(choices[:12])
    return f"known: {shown}" + (", ..." if len(choices) > 12 else "")


_REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EACCES: "check the permissions",
    errno.EPERM: "check the permissions",
    errno.EROFS: "choose a writable place with -o",
}


@contextmanager
def storage_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn any ``OSError`` raised inside into a :class:`StorageError` about ``path``."""
    try:
        yield
    except OSError as error:
        what = error.strerror or type(error).__name__
        raise StorageError(f"cannot write ({what})", path, _REMEDIES.get(error.errno or 0)) from error
