"""Reading rows of data: plain text, JSON lines, JSON, CSV, parquet, images, and folders of them, one row at a time."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.errors import ArtifactError, MissingPackageError, UsageError, nearest
from zoo.reading import check_plain
from zoo.tables import JSON, LINES, PARQUET, TABLES, open_parquet, read_numbered
from zoo.terminal import is_unicode
from zoo.training.data.saved import is_saved, read_saved

__all__ = ["FileRows", "LocatedRow", "RowError", "data_files", "read_rows"]

TEXTS = (".txt", ".md")
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_BATCH = 1024
_PIECE = 1 << 18
"""Characters of a plain text that are read at once."""


@dataclass(frozen=True, slots=True)
class RowError:
    """A row that cannot be read."""

    where: str
    """The file and the number of the row."""
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


class LocatedRow(dict[str, Any]):
    """A row by role.

    Args:
        values: the values by role.
        where: the file and the number of the row.
        columns: the row by the names of its columns; by default the same as ``values``.
    """

    def __init__(self, values: Mapping[str, Any], where: str, columns: Mapping[str, Any] | None = None) -> None:
        super().__init__(values)
        self.where = where
        """The file and the number of the row."""
        self.columns = dict(values) if columns is None else columns
        """All columns of the row by name, also those without a role."""


def data_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files of some paths, those of directories in alphabetical order, and directories of saved data sets.

    Raises:
        ArtifactError: a path does not exist or is no plain file, or a directory holds no data.
        UsageError: a file has an unknown type, or the files have several.
    """
    suffixes = (*LINES, JSON, *TABLES, *TEXTS, PARQUET, *IMAGES)
    files: list[Path] = []
    for path in paths:
        if is_saved(path):
            files.append(path)
        elif path.is_dir():
            readable = sorted(item for item in path.rglob("*") if item.suffix.lower() in suffixes and item.is_file())
            if not readable:
                raise ArtifactError("no data in this directory", path, f"put *{', *'.join(suffixes)} there")
            files += readable
        elif not path.exists():
            raise ArtifactError("no such file", path)
        else:
            check_plain(path)  # it is read more than once
            files.append(path)
    for path in files:
        if path.suffix.lower() not in suffixes and not is_saved(path):
            raise UsageError("unknown file type", path, f"name it *{', *'.join(suffixes)}")
    if len({_kind(path) for path in files}) > 1:
        raise UsageError("plain texts, images and tables cannot be mixed", files[0], "name the files of one kind")
    return files


def _kind(path: Path) -> tuple[str, ...]:
    """Return the suffixes of the files that can be read together with this one."""
    return next((kind for kind in (TEXTS, IMAGES) if path.suffix.lower() in kind), ())


def read_rows(
    path: Path, columns: Mapping[str, str], optional: Mapping[str, str]
) -> Iterator[dict[str, Any] | RowError]:
    """Yield the rows of a file by role.

    A plain text has the role ``text`` only. Its rows are pieces of about 262,000 characters that end with a line;
    all but the last have ``continues``. An image has the roles ``image``, its path, and ``label``, the name of its
    directory. Paths of images in tables are relative to the directory of the table.

    Args:
        path: a file of one of the known types, or the directory of a saved data set.
        columns: the column in the file of each role.
        optional: the same for roles that the file need not have.

    Raises:
        ArtifactError: the file cannot be read.
        UsageError: a column does not exist.
    """
    suffix = path.suffix.lower()
    if suffix in TEXTS:
        if set(columns) != {"text"}:
            raise UsageError("plain text has no columns", path, "give .jsonl, .csv or .parquet")
        yield from _read_text(path)
        return
    if suffix in IMAGES:
        if set(columns) != {"image", "label"}:
            raise UsageError("an image has no columns but image and label", path, "give .jsonl, .csv or .parquet")
        yield {"image": str(path), "label": path.absolute().parent.name}
        return
    rows: Iterator[tuple[int, dict[str, Any] | str]]
    if is_saved(path) or suffix == PARQUET:
        rows = enumerate(read_saved(path) if is_saved(path) else _read_parquet(path), 1)
    else:
        rows = read_numbered(path)
    for number, row in rows:
        where = f"{path}, row {number}"
        if isinstance(row, str):
            yield RowError(where, row)
            continue
        lacks = next((column for column in columns.values() if column not in row), None)
        if lacks is not None:
            if suffix in (*LINES, JSON):
                yield RowError(where, f"has no {lacks!r}")
                continue
            raise UsageError(f"no column {lacks!r}", path, nearest(lacks, row))
        roles = {**columns, **{role: column for role, column in optional.items() if column in row}}
        null = next((column for column in roles.values() if row[column] is None), None)
        broken = next((column for column in roles.values() if _has_surrogate(row[column])), None)
        if null is not None:
            yield RowError(where, f"{null!r} is null")
        elif broken is not None:
            yield RowError(where, f"{broken!r} is not valid Unicode")
        else:
            found_row = LocatedRow({role: row[column] for role, column in roles.items()}, where, row)
            if isinstance(found_row.get("image"), str):
                found_row["image"] = str(path.parent / found_row["image"])
            yield found_row


def _has_surrogate(value: Any) -> bool:
    """Return whether a text, or a text in a list, has half of a surrogate pair, which no encoding can represent."""
    if isinstance(value, list):
        return any(map(_has_surrogate, value))
    return isinstance(value, str) and not is_unicode(value)


class FileRows:
    """The rows of files, read anew by each iteration."""

    def __init__(self, files: Sequence[Path], columns: Mapping[str, str], optional: Mapping[str, str]) -> None:
        self.files = files
        self._columns = columns
        self._optional = optional

    def __iter__(self) -> Iterator[dict[str, Any] | RowError]:
        for file in self.files:
            yield from read_rows(file, self._columns, self._optional)


def _read_text(path: Path) -> Iterator[dict[str, Any] | RowError]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            piece = file.read(_PIECE) + file.readline(_PIECE)
            while piece:
                following = file.read(_PIECE) + file.readline(_PIECE)
                yield {"text": piece, **({"continues": True} if following else {})}
                piece = following
    except UnicodeDecodeError as error:
        yield RowError(str(path), f"not UTF-8 ({error.reason} at byte {error.start})")
    except OSError as error:
        raise ArtifactError(f"cannot read ({error.strerror})", path) from error


def _read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingPackageError("parquet needs pyarrow", path, "pip install attention-zoo[parquet]") from error
    with open_parquet(parquet, path) as file:
        try:
            for batch in file.iter_batches(_BATCH):
                yield from batch.to_pylist()
        except Exception as error:  # pyarrow raises its own classes
            raise ArtifactError(f"not a parquet file ({error})", path) from error
