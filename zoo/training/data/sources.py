"""The data of a run: files, directories, or a data set of a plugin. Torch-free."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import count, islice
from pathlib import Path
from typing import Any

from zoo import plugins
from zoo.artifact.digests import Digests
from zoo.contract import Dataset, Objective
from zoo.errors import MissingPackageError, UsageError, nearest
from zoo.registry import load_reference
from zoo.training.data.rows import IMAGES, FileRows, LocatedRow, RowError, data_files
from zoo.training.data.saved import is_saved, saved_split

__all__ = ["Source", "find_source"]


Rows = Iterable[Mapping[str, Any] | RowError]


@dataclass(frozen=True)
class Source:
    """Rows of data by role, and what identifies them."""

    rows: Rows
    """Iterated anew for each pass."""
    digests: Mapping[str, str]
    """SHA-256 of each file, by name, or the fingerprint of a data set's plugin."""
    name: str
    """What the data is called, without a path."""


class _Limited:
    """The first rows of others."""

    def __init__(self, rows: Rows, limit: int) -> None:
        self._rows = rows
        self._limit = limit

    def __iter__(self) -> Iterator[Mapping[str, Any] | RowError]:
        return islice(iter(self._rows), self._limit)


def _first(rows: Rows, limit: int | None) -> Rows:
    return rows if limit is None else _Limited(rows, limit)


def _limited(digests: Mapping[str, str], limit: int | None) -> Mapping[str, str]:
    """Return digests that tell the first rows from all of them."""
    return digests if limit is None else {**digests, "rows": str(limit)}


class _DatasetRows:
    """The rows of a split of a data set, by role."""

    def __init__(
        self,
        owner: plugins.Plugin,
        reference: str,
        split: str,
        roles: Mapping[str, str],
        optional: Mapping[str, str],
    ) -> None:
        self._owner = owner
        self._reference = reference
        self._split = split
        self._roles = roles
        self._optional = optional

    def __iter__(self) -> Iterator[Mapping[str, Any] | RowError]:
        with plugins.blame(self._owner, f"cannot read {self._reference}"):
            rows = iter(load_reference(self._reference, self._owner)(self._split))
        for number in count(1):
            with plugins.blame(self._owner, f"cannot read {self._reference}"):
                row = next(rows, None)
            if row is None:
                return
            lacks = next((column for column in self._roles.values() if column not in row), None)
            where = f"{self._reference}, row {number}"
            if lacks is not None:
                yield RowError(where, f"has no {lacks!r}")
            else:
                roles = (*self._roles.items(), *self._optional.items())
                yield LocatedRow({role: row[column] for role, column in roles if column in row}, where, row)


def find_source(
    given: Sequence[str],
    objective: Objective,
    columns: Mapping[str, str],
    *,
    split: str = "train",
    limit: int | None = None,
) -> Source:
    """Return the data that ``given`` names: one data set, or files and directories.

    Args:
        given: the name of a data set, or paths.
        objective: names the roles of columns.
        columns: the name in the data of columns that are not named after their role.
        split: which part of a data set, or of a saved one.
        limit: number of rows, from the first on; by default all.

    Raises:
        UsageError: there is no such data set or split, or a role does not exist.
        MissingPackageError: the package that a data set comes from is not installed.
        ArtifactError: a path does not exist, or holds no data.
    """
    roles = (*objective.columns, *objective.optional)
    for role in columns:
        if role not in roles:
            raise UsageError(f"objective {objective.name!r} has no column {role!r}", "columns", nearest(role, roles))
    named = {role: columns.get(role, role) for role in objective.columns}
    optional = {role: columns.get(role, role) for role in objective.optional}
    if len(given) == 1 and _is_dataset(given[0]):
        owner, dataset = plugins.active().dataset(given[0])
        if split not in dataset.splits:
            raise UsageError(f"{dataset.name} has no split {split!r}", "data", nearest(split, dataset.splits))
        digests = {f"{dataset.name} {split}": owner.fingerprint or f"{owner} {owner.module}"}
        if dataset.package is not None:
            digests[dataset.package] = _version(dataset)
        rows: Rows = _DatasetRows(owner, dataset.rows, split, named, optional)
        return Source(_first(rows, limit), _limited(digests, limit), dataset.name)
    files = data_files([saved_split(Path(item), split) for item in given])
    file_digests = Digests()
    tables = [file for file in files if file.suffix.lower() not in IMAGES]
    by_file = {f"{number} {file.name}": _digest_of(file, file_digests) for number, file in enumerate(tables)}
    file_rows = FileRows(files, named, optional)
    if "image" in named:
        by_file["images"] = _digest_of_images(file_rows, file_digests)
    file_digests.keep()
    names = [Path(given[0]).name if is_saved(files[0]) else files[0].name, *(file.name for file in files[1:])]
    label = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more files"
    return Source(_first(file_rows, limit), _limited(by_file, limit), label)


def _version(dataset: Dataset) -> str:
    """Return the version of the distribution that a data set comes from."""
    assert dataset.package is not None
    try:
        return version(dataset.package)
    except PackageNotFoundError as error:
        what = f"data set {dataset.name!r} is part of {dataset.package}, which is not installed"
        raise MissingPackageError(what, None, f"pip install {dataset.package}") from error


def _digest_of(file: Path, known: Digests) -> str:
    """Return the SHA-256 of a file, or of the files in the directory of a saved data set."""
    if not file.is_dir():
        return known.of(file)
    parts = sorted(item for item in file.iterdir() if item.name != "state.json")  # which differs in each copy
    return hashlib.sha256("".join(known.of(part) for part in parts).encode()).hexdigest()


def _digest_of_images(rows: Rows, known: Digests) -> str:
    """Return the SHA-256 of the image files that rows name, with their classes. Missing files are left out."""
    digest = hashlib.sha256()
    for row in rows:
        columns = row if isinstance(row, Mapping) else {}
        path = columns.get("image")
        if isinstance(path, str) and Path(path).is_file():
            digest.update(f"{Path(path).name} {columns.get('label')} {known.of(Path(path))}\n".encode())
    return digest.hexdigest()


def _is_dataset(name: str) -> bool:
    """Return whether a name is that of a data set, or can only be meant as one."""
    if Path(name).exists():
        return False
    return ("/" not in name and not Path(name).suffix) or name in {item.name for _, item in plugins.active().datasets()}
