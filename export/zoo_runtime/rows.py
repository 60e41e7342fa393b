"""Reading inputs from files and writing results: plain text, JSON lines, parquet."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import numpy as np

from zoo.errors import ArtifactError, StorageError, UsageError, nearest, storage_errors
from zoo.storage import check_file_target
from zoo.tables import TABLES, read_table
from zoo_runtime.runner import Answer, Pair

__all__ = [
    "EMBEDDING",
    "Results",
    "column_types",
    "count_rows",
    "open_parquet",
    "plain",
    "pyarrow_module",
    "read_rows",
]

EMBEDDING = "embedding"
"""The vector in a result. Such results keep the columns of their input in parquet."""

_STDIN = "-"
_LINES = (".jsonl", ".ndjson")
_PARQUET = ".parquet"
_BATCH = 1024


def read_rows(
    path: str, column: str, id_column: str | None = None, pair_column: str | None = None, *, keep: bool = False
) -> Iterator[Answer]:
    """Read a file row by row. A row that cannot be read is yielded with its ``error`` set.

    Args:
        path: ``.jsonl`` or ``.ndjson``, ``.csv`` or ``.tsv`` with a header, ``.parquet``, or text with one input per
            line; ``-`` for text from stdin.
        column: the column of inputs, in formats that have columns.
        id_column: the column of row ids; by default ``id``, if the file has it.
        pair_column: the column of second texts, for inputs that are pairs.
        keep: read all columns, to write them with the results.

    Raises:
        ArtifactError: the file is missing, or its contents do not match its extension.
        UsageError: a column does not exist, or ``pair_column`` is given for plain text.
    """
    suffix = Path(path).suffix.lower()
    if path != _STDIN and not Path(path).exists():
        raise ArtifactError("no such file", path)
    if suffix == _PARQUET:
        return _unique(_read_parquet(path, column, id_column, pair_column, keep), path)
    if suffix in TABLES:
        return _unique(_read_table(path, column, id_column, pair_column, keep), path)
    if suffix in _LINES:
        return _unique(_read_json_lines(path, column, id_column, pair_column, keep), path)
    if pair_column is not None:
        raise UsageError("plain text has no columns", f"--pair-column {pair_column}", "give .jsonl, .csv or .parquet")
    return _read_lines(path, keep)


def count_rows(path: str) -> int | None:
    """Number of rows that :func:`read_rows` yields; None for a stream, which can be read only once."""
    if not Path(path).is_file():
        return None
    if Path(path).suffix.lower() == _PARQUET:
        with pyarrow_module("parquet").ParquetFile(path) as file:
            return int(file.metadata.num_rows)
    if Path(path).suffix.lower() in TABLES:
        return sum(1 for _ in read_table(Path(path)))
    with _open(path) as lines:
        skip_blank = Path(path).suffix.lower() in _LINES
        return sum(1 for line in lines if not skip_blank or line.strip())


def open_parquet(path: str) -> Any:
    """Open a parquet file as ``pyarrow.parquet.ParquetFile``, or raise :class:`ArtifactError`."""
    parquet = pyarrow_module("parquet")
    try:
        return parquet.ParquetFile(path)
    except FileNotFoundError as error:
        raise ArtifactError("no such file", path) from error
    except Exception as error:  # pyarrow raises its own classes
        raise ArtifactError(f"not a parquet file ({error})", path) from error


def column_types(path: str | None) -> dict[str, Any]:
    """Return the types of the columns of a parquet file by name; empty for other files."""
    if path is None or Path(path).suffix.lower() != _PARQUET:
        return {}
    with open_parquet(path) as file:
        return {field.name: field.type for field in file.schema_arrow}


def _open(path: str) -> IO[bytes]:
    if path == _STDIN:
        if sys.stdin is None:
            raise UsageError("stdin is closed", "--input -")
        return sys.stdin.buffer
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise ArtifactError(f"cannot read ({error.strerror})", path) from error


def _read_lines(path: str, keep: bool) -> Iterator[Answer]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")  # byte order mark
                text = text.rstrip("\r\n")
                yield Answer(number, text, id=number, columns={"text": text} if keep else {})
            except UnicodeDecodeError as error:
                yield _bad(path, number, f"not UTF-8 ({error.reason} at byte {error.start})")


def _bad(path: str, number: int, what: str, remedy: str | None = None) -> Answer:
    """A row with an error."""
    error = ArtifactError(what, f"{'stdin' if path == _STDIN else path}, row {number}", remedy)
    return Answer(number, None, error=error, id=number)


def _read_json_lines(
    path: str, column: str, id_column: str | None, pair_column: str | None, keep: bool
) -> Iterator[Answer]:
    wanted = [name for name in (column, id_column, pair_column) if name is not None]
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                yield _bad(path, number, f"not JSON ({error})")
                continue
            lacks = [name for name in wanted if not isinstance(row, dict) or name not in row]
            if lacks:
                remedy = nearest(lacks[0], row) if isinstance(row, dict) else "write one JSON object per line"
                yield _bad(path, number, f"has no {lacks[0]!r}", remedy)
            else:
                null = next((name for name in (column, pair_column) if pair_column and row[name] is None), None)
                value = row[column] if pair_column is None else Pair(row[column], row[pair_column])
                id = row.get(id_column or "id", number)
                columns = row if keep else {}
                yield (
                    Answer(number, value, id=id, columns=columns)
                    if null is None
                    else _bad(path, number, f"{null!r} is null")
                )


def _read_table(path: str, column: str, id_column: str | None, pair_column: str | None, keep: bool) -> Iterator[Answer]:
    for number, row in enumerate(read_table(Path(path)), 1):
        if isinstance(row, str):
            yield _bad(path, number, row)
            continue
        for name in (column, id_column, pair_column):
            if name is not None and name not in row:
                raise UsageError(f"no column {name!r}", path, nearest(name, row))
        value = row[column] if pair_column is None else Pair(row[column], row[pair_column])
        yield Answer(number, value, id=row.get(id_column or "id", number), columns=row if keep else {})


def _read_parquet(
    path: str, column: str, id_column: str | None, pair_column: str | None, keep: bool
) -> Iterator[Answer]:
    with open_parquet(path) as file:
        names = file.schema_arrow.names
        for name in (column, id_column, pair_column):
            if name is not None and name not in names:
                raise UsageError(f"no column {name!r}", path, nearest(name, names))
        id_column = id_column or ("id" if "id" in names else None)
        wanted = names if keep else (column, id_column, pair_column)
        for number, row in enumerate(_parquet_rows(file, path, *wanted), 1):
            value = row[column] if pair_column is None else Pair(row[column], row[pair_column])
            null = next((name for name in (column, pair_column) if name is not None and row[name] is None), None)
            id = row[id_column] if id_column else number
            yield (
                Answer(number, value, id=id, columns=row if keep else {})
                if null is None
                else _bad(path, number, f"{null!r} is null")
            )


def _parquet_rows(file: Any, path: str, *names: str | None) -> Iterator[dict[str, Any]]:
    """Yield rows with the given columns, read in batches."""
    columns = list(dict.fromkeys(filter(None, names)))
    try:
        for batch in file.iter_batches(_BATCH, columns=columns):
            yield from batch.to_pylist()
    except Exception as error:  # pyarrow raises its own classes
        raise ArtifactError(f"cannot be read ({error})", path) from error


def _unique(rows: Iterator[Answer], path: str) -> Iterator[Answer]:
    """Reject rows whose id is a duplicate, or neither a string nor an integer."""
    seen: set[str | int] = set()
    for row in rows:
        if row.error is not None:
            yield row
        elif not _is_id(row.id):
            yield _bad(path, row.number, f"id must be a string or an integer, got {type(row.id).__name__}")
        elif row.id in seen:
            yield _bad(path, row.number, f"duplicate id {row.id!r}")
        else:
            seen.add(row.id)
            yield row


def _is_id(id: object) -> bool:
    return isinstance(id, str | int) and not isinstance(id, bool)


def pyarrow_module(module: str) -> Any:
    """Import a module of pyarrow, or raise :class:`UsageError`."""
    from importlib import import_module

    try:
        return import_module(f"pyarrow.{module}")
    except ImportError as error:
        raise UsageError("parquet needs pyarrow", None, "pip install attention-zoo[parquet]") from error


def plain(result: Any) -> Any:
    """Convert a result to types that JSON supports; other types become strings."""
    if isinstance(result, np.ndarray | np.generic):
        return plain(result.tolist()) if result.dtype == object else result.tolist()
    if isinstance(result, Mapping):
        return {str(key): plain(value) for key, value in result.items()}
    if isinstance(result, list | tuple):
        return [plain(value) for value in result]
    return result if result is None or isinstance(result, str | int | float) else str(result)


class Results:
    """A file of results, JSON lines or parquet, each row with the ``id`` of its input.

    A new JSON lines file is flushed after every row, so that an interrupted run can be resumed. A parquet file, or a
    file that replaces another, appears only once it is complete.

    Args:
        path: ``.jsonl``, ``.ndjson`` or ``.parquet``.
        force: replace an existing file, but not a symbolic link.
        resume: continue an existing file. An incomplete last line is removed.
        types: pyarrow types of the input's columns, where known.

    Raises:
        UsageError: the file cannot be written, or already exists.
        ArtifactError: the file to continue does not contain results.
    """

    def __init__(
        self, path: Path, *, force: bool = False, resume: bool = False, types: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.path, self.types = path, types
        self.metadata: dict[str, str] = {}
        """Key-value metadata for a parquet file."""
        self.parquet = path.suffix.lower() == _PARQUET
        if not self.parquet and path.suffix.lower() not in _LINES:
            raise UsageError("unknown file type", path, f"name it *{', *'.join((*_LINES, _PARQUET))}")
        if resume and force:
            raise UsageError("cannot both continue and replace the output", "--resume, --force", "choose one of them")
        if resume and self.parquet:
            raise UsageError("cannot continue a parquet file", path, "write .jsonl")
        if self.parquet:
            pyarrow_module("parquet")
        if path.is_dir():
            raise UsageError("is a directory", path, "name a file")
        self._exists = path.is_symlink() or path.exists()
        if self._exists and not (force or resume):
            raise UsageError("already exists", path, "continue it with --resume, or replace it with --force")
        if force:
            check_file_target(path, force=True)
        self.done: set[str | int] = set()
        """Ids of the results already in the file."""
        self._end = self._read_earlier() if resume and self._exists else 0
        self._resume = resume and self._exists
        self._writer: Any = None
        self._waiting: list[dict[str, Any]] = []

    @contextmanager
    def writing(self) -> Iterator[Results]:
        """Open the file, and complete it when the block ends. If the block raises, earlier contents are kept."""
        target = self.path.resolve()
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        place = temporary if self.parquet or (self._exists and not self._resume) else target
        with storage_errors(self.path):
            self._file = place.open("r+b" if self._resume else "wb")
        try:
            with storage_errors(self.path):
                self._file.truncate(self._end)
                self._file.seek(self._end)
            yield self
            with storage_errors(self.path):
                self._flush()
                if self._writer is not None:
                    self._writer.close()
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()  # Windows does not rename an open file
                if place != target:
                    place.replace(target)
        except BaseException:
            self._abandon()
            with contextlib.suppress(OSError):
                if place != target or not (self._resume or place.stat().st_size):
                    place.unlink()
            raise

    def write(self, id: Any, result: Mapping[str, Any], columns: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Add a row. A vector in a parquet file keeps the ``columns`` of its input."""
        row = {"id": id} | plain(result) | {"id": id}
        if self.parquet and EMBEDDING in row:
            if clash := sorted(key for key in columns.keys() & row.keys() if (key, columns[key]) != ("id", id)):
                raise UsageError(f"the input has a column {clash[0]!r}, as the result", self.path, "rename it")
            row = {"id": id} | dict(columns) | row
        with storage_errors(self.path):
            if self.parquet:
                self._waiting.append(row)
                if len(self._waiting) == _BATCH:
                    self._flush()
            else:  # UTF-8 cannot encode lone surrogates; backslashreplace writes them as JSON escapes
                self._file.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
                self._file.flush()

    def _flush(self) -> None:
        if not self.parquet or (not self._waiting and self._writer is not None):
            return
        arrow = pyarrow_module("lib")
        schema = self._writer.schema if self._writer is not None else None
        names = dict.fromkeys(name for row in self._waiting for name in row)
        try:
            if schema is not None and (late := sorted(names.keys() - set(schema.names))):
                raise ValueError(f"no earlier row has {', '.join(late)}")
            rows = [dict.fromkeys(names) | row for row in self._waiting]  # pyarrow takes the columns of the first row
            if schema is None:
                schema = self._schema(arrow, rows)
            table = arrow.Table.from_pylist(rows, schema=schema)
            if self._writer is None:
                self._writer = pyarrow_module("parquet").ParquetWriter(
                    self._file, table.schema.with_metadata(self.metadata)
                )
            self._writer.write_table(table)
        except (arrow.ArrowException, ValueError) as error:
            raise StorageError(f"parquet cannot hold these results ({error})", self.path, "write .jsonl") from error
        self._waiting = []

    def _schema(self, arrow: Any, rows: list[dict[str, Any]]) -> Any:
        """Return the types of the first rows; those of the input's columns are kept, and vectors have one size."""
        found = arrow.Table.from_pylist(rows).schema
        sizes = {len(row[EMBEDDING]) if isinstance(row.get(EMBEDDING), list) else None for row in rows}
        if None in sizes or len(sizes) != 1:
            return found
        known = {**self.types, EMBEDDING: arrow.list_(arrow.float32(), sizes.pop())}
        return arrow.schema([(field.name, known.get(field.name, field.type)) for field in found])

    def _abandon(self) -> None:
        """Close the file, ignoring errors: the disk may be full."""
        with contextlib.suppress(Exception):
            if self._writer is not None:
                self._writer.close()
        with contextlib.suppress(OSError):
            self._file.close()

    def _read_earlier(self) -> int:
        """Collect the ids of complete rows and return the offset where they end."""
        what, remedy = "not a result of zoo run", "resume a file that zoo run wrote"
        end = 0
        with _open(str(self.path)) as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    id = json.loads(line)["id"]
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    raise ArtifactError(what, f"{self.path}, line {number}", remedy) from error
                if not _is_id(id):
                    raise ArtifactError(what, f"{self.path}, line {number}", remedy)
                self.done.add(id)
                end += len(line)
        return end
