"""Errors that a user can act on. Each class has one exit status; see docs/reference/exit-statuses.md."""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from zoo.terminal import one_line

__all__ = [
    "DISK",
    "EXPORT_AGAIN",
    "OTHER_PLACE",
    "REPLACE",
    "ArtifactError",
    "IncomparableError",
    "MissingPackageError",
    "ParityError",
    "PluginError",
    "StoppedError",
    "StorageError",
    "UnreadableError",
    "UsageError",
    "Wording",
    "ZooError",
    "ZooWarning",
    "argument",
    "close_to",
    "closest",
    "did_you_mean",
    "missing_package",
    "name_options",
    "nearest",
    "renamed",
    "storage_errors",
    "task_option",
    "values_of",
]


_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_OTHER_COMMAND = re.compile(r"\bzoo [a-z]+[^,;]*")
"""Part of a message that is a command to run; its options are its own."""
_options: Collection[str] | None = None


def name_options(options: Collection[str] | None) -> None:
    """Set the options of the command that runs, such as ``--force``; None outside commands.

    Messages name no others: where one would, it has the text for Python, or the one that its :class:`Wording` has
    for commands without the option.
    """
    global _options
    _options = options


class Wording(NamedTuple):
    """Part of a message that differs between Python and the command line."""

    python: str
    command_line: str
    otherwise: str | None = None
    """The text for a command that lacks an option in ``command_line``; by default that for Python."""

    def __str__(self) -> str:
        return self.python

    def for_command(self) -> str:
        """Return the text for the command that runs."""
        if _options is None or {*_FLAG.findall(_OTHER_COMMAND.sub("", self.command_line))} <= {*_options}:
            return self.command_line
        return self.python if self.otherwise is None else self.otherwise

    def replace(self, old: str, new: str) -> Wording:
        """Replace text in all variants."""
        otherwise = None if self.otherwise is None else self.otherwise.replace(old, new)
        return Wording(self.python.replace(old, new), self.command_line.replace(old, new), otherwise)


def argument(name: str, value: object = None, text: str = "{}") -> Wording:
    """Format ``text`` with a function argument and with the command-line option of the same name.

    >>> argument("force", True, "pass {} to replace it")
    Wording(python='pass force=True to replace it', command_line='pass --force to replace it')
    """
    option = f"--{name.replace('_', '-')}" + ("" if value is None or value is True else f" {value}")
    return Wording(text.format(name if value is None else f"{name}={value!r}"), text.format(option))


def task_option(setting: str, text: str = "{}") -> Wording:
    """Format ``text`` with an option of a task, as Python passes it and as ``zoo run`` does.

    >>> task_option("label=CLASS", "set {}")
    Wording(python='set label=CLASS', command_line='set --option label=CLASS')
    """
    return Wording(text.format(setting), text.format(f"--option {setting}"))


REPLACE = argument("force", True, "use {} to replace it")
EXPORT_AGAIN = Wording(
    "use force=True to export again", "use --force to export again", "export again with zoo export --force"
)
OTHER_PLACE = "choose another place"


class ZooError(Exception):
    """A failure and its remedy on one printable line: ``what: where: what to do``.

    Any part may be a :class:`Wording`: ``str(error)`` has the Python text, ``error.command_line`` the other.
    """

    exit_code = 1

    def __init__(self, what: str, where: object = None, remedy: str | Wording | None = None) -> None:
        parts = [part for part in (what, where, remedy) if part not in (None, "")]
        super().__init__(_one_line(parts))
        self.what = what
        self._parts = [part if isinstance(part, Wording) else str(part) for part in parts]

    @property
    def command_line(self) -> str:
        """The message for the command that runs, which names no option that this command lacks."""
        return _one_line(part.for_command() if isinstance(part, Wording) else part for part in self._parts)

    def rename(self, old: object, new: object) -> None:
        """Replace a path in the message by the one that the user knows."""
        self.what = self.what.replace(str(old), str(new))
        self._parts = [part.replace(str(old), str(new)) for part in self._parts]
        self.args = (str(self).replace(str(old), str(new)),)


@contextmanager
def renamed(old: object, new: object) -> Iterator[None]:
    """Replace a path by the one that the user knows, in the errors of the block."""
    try:
        yield
    except ZooError as error:
        error.rename(old, new)
        raise


def _one_line(parts: Iterable[object]) -> str:
    return one_line(": ".join(map(str, parts)))


class ZooWarning(UserWarning):
    """A non-fatal problem. The command line prints it as one line on stderr."""


class UsageError(ZooError):
    """An unknown name, key or value, a wrong type, or a target that already exists."""

    exit_code = 2


class UnknownKeyError(UsageError):
    """A key that settings do not have.

    Args:
        what: what is wrong.
        where: the place.
        remedy: what to do.
        key: the key.
    """

    def __init__(self, what: str, where: object = None, remedy: str | Wording | None = None, *, key: str) -> None:
        super().__init__(what, where, remedy)
        self.key = key
        self.where = where


class ArtifactError(ZooError):
    """A missing, truncated, altered or invalid file or input."""

    exit_code = 3


class StoppedError(ZooError):
    """A run of a graph was interrupted, or took longer than it may."""

    exit_code = 3


class UnreadableError(ArtifactError):
    """A file exists but cannot be read, for want of permission or on a failing disk. Its content may be sound."""


class ParityError(ZooError):
    """The exported graph does not equal the model, or could not be compared with it."""

    exit_code = 4


class IncomparableError(ParityError):
    """A comparison could not be made on this machine, for example for want of memory. It says nothing about a graph."""


class PluginError(ZooError):
    """A plugin is missing, broken, or clashes with another."""

    exit_code = 5


class MissingPackageError(ZooError):
    """A package of an optional dependency group is not installed."""


class StorageError(ZooError):
    """The file system is unwritable, full or failing."""

    exit_code = 6


def closest(name: str, choices: Iterable[str]) -> list[str]:
    """Return up to three choices that are close to ``name`` regardless of case, the closest first."""
    folded = {choice.casefold(): choice for choice in sorted(choices)}
    return [folded[text] for text in difflib.get_close_matches(name.casefold(), folded, n=3, cutoff=0.6)]


def close_to(name: str, choices: Iterable[str]) -> str | None:
    """Return a remedy that names the choices closest to ``name`` regardless of case, or None when none is close."""
    return did_you_mean(closest(name, choices))


def did_you_mean(names: Sequence[str]) -> str | None:
    """Return a remedy that names alternatives, or None without any."""
    return "did you mean " + " or ".join(map(repr, names)) + "?" if names else None


_NAME = 80
"""Maximum number of characters of a name in a remedy."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return a remedy that names the choices closest to ``name``, or the first few when none is close."""
    choices = sorted(choices)
    close = close_to(name, choices)
    if close:
        return close
    if not choices:
        return "none are available"
    shown = ", ".join(choice if len(choice) <= _NAME else f"{choice[:_NAME]}..." for choice in choices[:12])
    return f"known: {shown}" + (", ..." if len(choices) > 12 else "")


@contextmanager
def values_of(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert a :class:`UsageError` about values that a file of an artefact holds into an :class:`ArtifactError`."""
    try:
        yield
    except UsageError as error:
        raise ArtifactError(error.what, path) from error


_EXTRAS = {
    **dict.fromkeys(("onnx", "onnx_ir", "onnxscript", "torch"), "torch"),
    "timm": "timm",
    "torchvision": "timm",
    "transformers": "transformers",
    "PIL": "images",
    **dict.fromkeys(("OpenSSL", "cryptography", "model_signing"), "sign"),
}
"""The extra that installs a package."""


def missing_package(error: BaseException) -> MissingPackageError | None:
    """Return the error to report for an ``ImportError`` of PyTorch or another package of ``_EXTRAS``; else None."""
    while error.__cause__ is not None and not isinstance(error, ImportError):
        error = error.__cause__
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if name not in _EXTRAS:
        return None
    return MissingPackageError(f"{name} is not installed", None, f'pip install "attention-zoo[{_EXTRAS[name]}]"')


DISK = frozenset({errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EROFS})
"""Numbers of the errors of a disk that is full or fails, whoever writes to it."""
_REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EFBIG: "raise the limit on the size of a file",
    errno.EACCES: "check the permissions",
    errno.EPERM: "check the permissions",
    errno.EROFS: "choose a writable place",
}


@contextmanager
def storage_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert any ``OSError`` raised inside into a :class:`StorageError` about ``path``.

    A path with a NUL character, which no file can have, is a :class:`UsageError`.
    """
    try:
        yield
    except ValueError as error:
        if "\0" not in str(path):
            raise
        raise UsageError("a path cannot contain a NUL character", repr(str(path))) from error
    except OSError as error:
        what = error.strerror or type(error).__name__
        raise StorageError(f"cannot write ({what})", path, _REMEDIES.get(error.errno or 0)) from error
