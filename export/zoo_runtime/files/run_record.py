"""The record of a run: the model, options, versions and inputs of a file of results, in a hidden file beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from zoo.artifact.weights import parse_json
from zoo.errors import ArtifactError, UsageError, storage_errors
from zoo.storage import check_file_target, new_file

__all__ = ["RunRecord", "difference"]

_RESTART = "start again with --force"
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors of :func:`difference` for a file that is not a record."""


def difference(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return how results differ in what they depend on, as ``other options (NAME: VALUE, now VALUE)``, or None.

    Args:
        earlier: :meth:`zoo_runtime.batch.Plan.identity` of an earlier run.
        now: that of this run.

    Raises:
        ValueError: the earlier one is damaged.
    """
    options = earlier.get("options")
    if not isinstance(options, dict) or "model" not in earlier:
        raise ValueError(f"options is {options!r}")
    if earlier["model"] != now["model"]:
        return "another model, export or evidence"
    for name, value in now["options"].items():
        if (before := options.get(name)) != value:
            was, is_now = _changed(before, value)
            return f"other options ({name}: {was}, now {is_now})"
    return None


def _changed(earlier: Any, now: Any) -> tuple[str, str]:
    """Return both values, or of two mappings the entries that differ."""
    if isinstance(earlier, dict) and isinstance(now, dict):
        names = [name for name in {**earlier, **now} if earlier.get(name) != now.get(name)]
        parts = [", ".join(f"{name}={values.get(name)}" for name in names) for values in (earlier, now)]
        return parts[0], parts[1]
    return str(earlier), str(now)


def _read_entry(line: bytes) -> tuple[str | int, str]:
    """Return the id and the digest of an input. Raises an error of :data:`_DAMAGED` for another line."""
    entry = json.loads(line)
    if not isinstance(entry, list):
        raise TypeError(f"got {type(entry).__name__} for an input")
    id, digest = entry
    return id, digest


class RunRecord:
    """The record of a file of results, ``.NAME.run.json``.

    Its first line is the identity of the run. A line with the id and the digest of each input follows, written before
    the input's result.

    Args:
        results: the file of results. If it is a symbolic link, the record belongs to the file that it names.
        identity: :meth:`zoo_runtime.batch.Plan.identity` of the run.
    """

    def __init__(self, results: Path, identity: Mapping[str, Any]) -> None:
        self.results = results
        named = Path(os.path.realpath(results))
        self.path = named.with_name(f".{named.name}.run.json")
        self.identity = identity
        self.written = False
        """Whether this run has written the record."""
        self.digests: dict[str | int, str] = {}
        """Digests of the inputs with results, by their ids."""
        self._file: IO[bytes] | None = None

    def check(self) -> None:
        """Check that the results are of the same model, options and versions.

        Raises:
            UsageError: they are not.
            ArtifactError: the record is missing or damaged.
        """
        with storage_errors(self.path):
            if self.path.is_symlink() or not self.path.is_file():
                problem = f"the record of what its results are of is missing: {self.path.name}"
                raise ArtifactError(problem, self.results, _RESTART)
            first, *lines = self.path.read_bytes().splitlines(keepends=True) or [b""]
        try:
            different = difference(parse_json(first), self.identity)
            # an interrupted run may have left an incomplete line
            self.digests = dict(_read_entry(line) for line in lines if line.endswith(b"\n"))
        except _DAMAGED as error:
            raise ArtifactError(f"the record of a run is damaged ({error})", self.path, _RESTART) from error
        if different is not None:
            problem = f"its results are of {different}"
            raise UsageError(problem, self.results, f"repeat its model and options, or {_RESTART}")

    def write(self, *, force: bool = False) -> None:
        """Write the record, in place of an earlier one, or with ``force`` of any file.

        Raises :class:`UsageError` if there is something else.
        """
        if not force:
            self._check_free()
        with storage_errors(self.path), new_file(self.path, force=True) as staged:
            lines = (json.dumps(entry) + "\n" for entry in (self.identity, *self.digests.items()))
            staged.write_text("".join(lines), encoding="utf-8")
        self.written = True

    def open(self) -> None:
        """Begin to append the digests that :meth:`add` adds."""
        with storage_errors(self.path):
            end = self.path.read_bytes().rfind(b"\n") + 1  # an interrupted run may have left an incomplete line
            self._file = self.path.open("r+b")
            self._file.truncate(end)
            self._file.seek(end)

    def close(self) -> None:
        """Append no more digests."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def add(self, id: str | int, digest: str) -> None:
        """Record the digest of an input whose result is written next."""
        self.digests[id] = digest
        if self._file is not None:
            with storage_errors(self.path):
                self._file.write(json.dumps([id, digest]).encode() + b"\n")
                self._file.flush()

    def _check_free(self) -> None:
        """Raise :class:`UsageError` if a file that is not a record has the name of the record."""
        try:
            difference(parse_json(self.path.read_bytes().partition(b"\n")[0]), self.identity)
        except OSError:
            return  # writing finds what is wrong, unless there is no such file
        except _DAMAGED as error:
            problem = "exists, and is not the record of a run"
            raise UsageError(problem, self.path, "rename it, or choose another place for the results") from error

    def remove(self) -> None:
        """Remove the record, if there is one. Raises :class:`UsageError` for anything but a plain file."""
        check_file_target(self.path, force=True)
        with storage_errors(self.path):
            self.path.unlink(missing_ok=True)
