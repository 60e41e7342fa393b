"""Folders of results, in which each file appears complete, and their manifests."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Protocol

from zoo import system
from zoo.errors import ArtifactError, StorageError, UsageError, storage_errors
from zoo.storage import scratch_folder
from zoo_runtime.batch.urls import base_name, file_system, is_url, local, remote_errors

__all__ = ["MANIFEST", "LocalFolder", "OutputFolder", "RemoteFolder", "is_temporary", "open_folder"]

MANIFEST = "_zoo.manifest"
"""The manifest in the output folder, or the start of the names of its parts. Readers of data sets skip such names."""
_TEMPORARY = ".zoo-shard-"
_TEMPORARIES = re.compile(rf"{re.escape(_TEMPORARY)}[0-9a-f]{{16}}(\.\w+)?")
"""Names of a worker's temporary files."""
_STORES = frozenset({"abfs", "abfss", "adl", "az", "gcs", "gs", "memory", "oci", "oss", "s3", "s3a"})
"""Protocols of object stores, in which an object appears as a whole and a rename is a copy."""
_PART = 256
"""Number of lines in a part of the manifest of a folder whose files cannot be appended to."""


class OutputFolder(Protocol):
    """A folder of results and their manifest."""

    def locked(self) -> AbstractContextManager[None]:
        """Create the folder, and keep other runs out of it while the block runs."""

    def sizes(self) -> dict[str, int]:
        """Return the size of each file."""

    def size(self, name: str) -> int | None:
        """Return the size of a file, or None if there is none."""

    def clean(self) -> None:
        """Remove files of workers that were killed."""

    def writing(self, name: str) -> AbstractContextManager[Path]:
        """Yield the path of a file that becomes ``name`` when the block ends, at once and durably."""

    def read_manifest(self) -> bytes:
        """Return the lines of the manifest; none if there is no manifest."""

    def write_manifest(self, content: bytes) -> None:
        """Begin to append to the manifest after these lines, all of which are in it already."""

    def append_manifest(self, line: bytes) -> None:
        """Add a line to the manifest, durably."""


def is_temporary(name: str) -> bool:
    """Whether a file is one that a worker writes results to before they appear."""
    return _TEMPORARIES.fullmatch(name) is not None


def open_folder(output: str) -> OutputFolder:
    """Return the folder of results at a path or URL, which need not exist."""
    return RemoteFolder(output) if is_url(output) else LocalFolder(Path(local(output)))


class LocalFolder:
    """A folder of this machine, or one that machines share."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def locked(self) -> Iterator[None]:
        with storage_errors(self.path):
            if self.path.exists() and not self.path.is_dir():
                raise UsageError("is not a folder", f"--output {self.path}", "choose another name")
            self.path.mkdir(parents=True, exist_ok=True)
            release = system.try_lock(self.path)
        if release is None:
            raise StorageError("another run is writing to it", self.path, "wait for its end, or choose another folder")
        try:
            yield
        finally:
            release()

    def sizes(self) -> dict[str, int]:
        with storage_errors(self.path):
            return {path.name: path.stat().st_size for path in self.path.iterdir() if path.is_file()}

    def size(self, name: str) -> int | None:
        with storage_errors(self.path / name):
            return (self.path / name).stat().st_size if (self.path / name).is_file() else None

    def clean(self) -> None:
        with suppress(OSError):
            for path in self.path.iterdir():
                if is_temporary(path.name):
                    with suppress(OSError):
                        path.unlink()

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        temporary = self.path / f"{_TEMPORARY}{secrets.token_hex(8)}{Path(name).suffix}"
        try:
            yield temporary
            with storage_errors(self.path / name):
                system.sync(temporary)
                temporary.replace(self.path / name)
                system.sync(self.path)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def read_manifest(self) -> bytes:
        with storage_errors(self.path):
            place = self.path / MANIFEST
            return place.read_bytes() if place.exists() else b""

    def write_manifest(self, content: bytes) -> None:
        with storage_errors(self.path / MANIFEST):
            with (self.path / MANIFEST).open("ab") as file:
                file.truncate(len(content))
                os.fsync(file.fileno())
            system.sync(self.path)

    def append_manifest(self, line: bytes) -> None:
        with storage_errors(self.path / MANIFEST), (self.path / MANIFEST).open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


class RemoteFolder:
    """A folder of a file system of fsspec. Nothing keeps other runs out; they would write the same bytes.

    The manifest is in parts of a number of lines, since objects cannot be appended to: only the last part is rewritten.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.fs, place = file_system(self.url)
        self.place = place.rstrip("/")
        protocols = self.fs.protocol
        self._renames = _STORES.isdisjoint([protocols] if isinstance(protocols, str) else protocols)
        self._part = 0
        self._lines: list[bytes] = []

    @contextmanager
    def locked(self) -> Iterator[None]:
        with remote_errors(self.url, StorageError):
            self.fs.makedirs(self.place, exist_ok=True)
        yield

    def sizes(self) -> dict[str, int]:
        with remote_errors(self.url, StorageError):
            self.fs.invalidate_cache()
            if not self.fs.exists(self.place):
                return {}
            infos = self.fs.ls(self.place, detail=True)
            return {base_name(info["name"]): int(info["size"] or 0) for info in infos if info["type"] == "file"}

    def size(self, name: str) -> int | None:
        with remote_errors(f"{self.url}/{name}", StorageError):
            self.fs.invalidate_cache()
            place = f"{self.place}/{name}"
            return int(self.fs.info(place)["size"]) if self.fs.exists(place) else None

    def clean(self) -> None:
        with suppress(Exception):
            for name in self.sizes():
                if is_temporary(name):
                    self.fs.rm_file(f"{self.place}/{name}")

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        with scratch_folder() as folder:
            path = folder / f"results{Path(name).suffix}"
            yield path
            self._put(path, name)

    def _put(self, path: Path, name: str) -> None:
        """Copy a file to the folder, where it appears as a whole."""
        with remote_errors(f"{self.url}/{name}", StorageError):
            if not self._renames:
                self.fs.put_file(str(path), f"{self.place}/{name}")
                return
            temporary = f"{self.place}/{_TEMPORARY}{secrets.token_hex(8)}{path.suffix}"
            try:
                self.fs.put_file(str(path), temporary)
                self.fs.mv(temporary, f"{self.place}/{name}")
            except BaseException:
                with suppress(Exception):
                    self.fs.rm_file(temporary)
                raise

    def _parts(self) -> list[str]:
        return sorted(name for name in self.sizes() if name.startswith(f"{MANIFEST}."))

    def read_manifest(self) -> bytes:
        with remote_errors(self.url, ArtifactError):
            return b"".join(self.fs.cat_file(f"{self.place}/{name}") for name in self._parts())

    def write_manifest(self, content: bytes) -> None:
        self._part = len(self._parts())
        self._lines = []

    def append_manifest(self, line: bytes) -> None:
        if len(self._lines) == _PART:
            self._part = self._part + 1
            self._lines = []
        self._lines.append(line)
        with scratch_folder() as folder:
            path = folder / "part"
            with storage_errors(folder):
                path.write_bytes(b"".join(self._lines))
            self._put(path, f"{MANIFEST}.{self._part:06d}")
