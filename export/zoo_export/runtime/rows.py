"""Inputs from files, and results to files: text by lines, JSON lines, parquet."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from zoo.errors import ArtifactError, StorageError, UsageError, nearest, storage_errors
from zoo_export.runtime.runner import Answer, Pair

__all__ = ["Results", "plain", "read_rows"]

_STDIN = "-"
_LINES = (".jsonl", ".ndjson")
_PARQUET = ".parquet"
_BATCH = 1024


def read_rows(path: str, column: str, id_column: str | None = None, pair_column: str | None = None) -> Iterator[Answer]:
    """Read a file row by row. A row that cannot be read has its error already.

    Args:
        path: ``.jsonl`` or ``.ndjson``, ``.parquet``, or text with an input in each line; ``-`` for text from stdin.
        column: what holds the inputs, in a file that has columns.
        id_column: what names the rows; ``id`` where the file has it.
        pair_column: what holds the second texts of inputs that are pairs.

    Raises:
        ArtifactError: the file is missing, or not what its name says.
        UsageError: it has no such column, or no columns at all for the second texts.
    """
    suffix = Path(path).suffix.lower()
    if path != _STDIN and not Path(path).exists():
        raise ArtifactError("no such file", path)
    if suffix == _PARQUET:
        return _unique(_read_parquet(path, column, id_column, pair_column), path)
    if suffix in _LINES:
        return _unique(_read_json_lines(path, column, id_column, pair_column), path)
    if pair_column is not None:
        raise UsageError("text by lines has no columns", f"--pair-column {pair_column}", "give .jsonl or .parquet")
    return _read_lines(path)


def _open(path: str) -> IO[bytes]:
    if path == _STDIN:
        if sys.stdin is None:
            raise UsageError("stdin is closed", "--input -")
        return sys.stdin.buffer
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise ArtifactError(f"cannot read ({error.strerror})", path) from error


def _read_lines(path: str) -> Iterator[Answer]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")  # some editors begin with a mark
                yield Answer(number, text.rstrip("\r\n"), id=number)
            except UnicodeDecodeError as error:
                yield _bad(path, number, f"not UTF-8 ({error.reason} at byte {error.start})")


def _bad(path: str, number: int, what: str, remedy: str | None = None) -> Answer:
    """A row without a result."""
    error = ArtifactError(what, f"{'stdin' if path == _STDIN else path}, row {number}", remedy)
    return Answer(number, None, error=error, id=number)


def _read_json_lines(path: str, column: str, id_column: str | None, pair_column: str | None) -> Iterator[Answer]:
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
                remedy = nearest(lacks[0], row) if isinstance(row, dict) else "write an object in each line"
                yield _bad(path, number, f"has no {lacks[0]!r}", remedy)
            else:
                null = next((name for name in (column, pair_column) if pair_column and row[name] is None), None)
                value = row[column] if pair_column is None else Pair(row[column], row[pair_column])
                id = row.get(id_column or "id", number)
                yield Answer(number, value, id=id) if null is None else _bad(path, number, f"{null!r} is null")


def _read_parquet(path: str, column: str, id_column: str | None, pair_column: str | None) -> Iterator[Answer]:
    parquet = _pyarrow("parquet")
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:  # pyarrow has classes of its own for this
        raise ArtifactError(f"not a parquet file ({error})", path) from error
    with file:
        names = file.schema_arrow.names
        for name in (column, id_column, pair_column):
            if name is not None and name not in names:
                raise UsageError(f"no column {name!r}", path, nearest(name, names))
        id_column = id_column or ("id" if "id" in names else None)
        for number, row in enumerate(_parquet_rows(file, path, column, id_column, pair_column), 1):
            value = row[column] if pair_column is None else Pair(row[column], row[pair_column])
            null = next((name for name in (column, pair_column) if name is not None and row[name] is None), None)
            id = row[id_column] if id_column else number
            yield Answer(number, value, id=id) if null is None else _bad(path, number, f"{null!r} is null")


def _parquet_rows(file: Any, path: str, *names: str | None) -> Iterator[dict[str, Any]]:
    """The values of some columns, some rows at a time."""
    columns = list(dict.fromkeys(filter(None, names)))
    try:
        for batch in file.iter_batches(_BATCH, columns=columns):
            yield from batch.to_pylist()
    except Exception as error:  # pyarrow has classes of its own for this
        raise ArtifactError(f"cannot be read ({error})", path) from error


def _unique(rows: Iterator[Answer], path: str) -> Iterator[Answer]:
    """Refuse a second row of one name: nobody could tell their results apart. A name is a text or a whole number."""
    seen: set[str | int] = set()
    for row in rows:
        if row.error is not None:
            yield row
        elif not _is_name(row.id):
            yield _bad(path, row.number, f"its id is neither a text nor a whole number, but {type(row.id).__name__}")
        elif row.id in seen:
            yield _bad(path, row.number, f"id {row.id!r} is there twice")
        else:
            seen.add(row.id)
            yield row


def _is_name(id: object) -> bool:
    return isinstance(id, str | int) and not isinstance(id, bool)


def _pyarrow(module: str) -> Any:
    from importlib import import_module

    try:
        return import_module(f"pyarrow.{module}")
    except ImportError as error:
        raise UsageError("parquet needs pyarrow", None, "pip install attention-zoo[parquet]") from error


def plain(result: Any) -> Any:
    """A result as JSON can hold it; what it has no form for, as text."""
    if isinstance(result, np.ndarray | np.generic):
        return plain(result.tolist()) if result.dtype == object else result.tolist()
    if isinstance(result, Mapping):
        return {str(key): plain(value) for key, value in result.items()}
    if isinstance(result, list | tuple):
        return [plain(value) for value in result]
    return result if result is None or isinstance(result, str | int | float) else str(result)


class Results:
    """A file of results, JSON lines or parquet, each row with the ``id`` of its input.

    New JSON lines are there as soon as they are written, so that an interrupted run can be resumed. A parquet file, and
    one that replaces another, appears when it is complete.

    Args:
        path: ``.jsonl``, ``.ndjson`` or ``.parquet``.
        force: it may exist, and is replaced.
        resume: it may exist, and is continued. A last line that is torn is cut off.

    Raises:
        UsageError: nothing can be written there, or it exists.
        ArtifactError: it is to be continued and holds something else.
    """

    def __init__(self, path: Path, *, force: bool = False, resume: bool = False) -> None:
        self.path = path
        self.parquet = path.suffix.lower() == _PARQUET
        if not self.parquet and path.suffix.lower() not in _LINES:
            raise UsageError("unknown kind of file", path, f"name it *{', *'.join((*_LINES, _PARQUET))}")
        if resume and force:
            raise UsageError("continue or replace", "--resume, --force", "choose one of them")
        if resume and self.parquet:
            raise UsageError("a parquet file cannot be continued", path, "write .jsonl")
        if self.parquet:
            _pyarrow("parquet")
        if path.is_dir():
            raise UsageError("is a directory", path, "name a file")
        self._exists = path.exists()
        if self._exists and not (force or resume):
            raise UsageError("already exists", path, "continue it with --resume, or replace it with --force")
        self.done: set[str | int] = set()
        """The ids of an earlier run's results."""
        self._end = self._read_earlier() if resume and self._exists else 0
        self._resume = resume and self._exists
        self._writer: Any = None
        self._waiting: list[dict[str, Any]] = []

    @contextmanager
    def writing(self) -> Iterator[Results]:
        """Open the file, and complete it when the block ends. If it raises, what was there before is there still."""
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
                if place != target:
                    place.replace(target)
        except BaseException:
            self._abandon()
            with contextlib.suppress(OSError):
                if place != target or not (self._resume or place.stat().st_size):
                    place.unlink()
            raise
        self._file.close()

    def write(self, id: Any, result: Mapping[str, Any]) -> None:
        """Add a row."""
        row = {"id": id} | plain(result) | {"id": id}
        with storage_errors(self.path):
            if self.parquet:
                self._waiting.append(row)
                if len(self._waiting) == _BATCH:
                    self._flush()
            else:  # a lone surrogate has no UTF-8: what it is replaced by is what JSON writes for it
                self._file.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
                self._file.flush()

    def _flush(self) -> None:
        if not self.parquet or (not self._waiting and self._writer is not None):
            return
        arrow = _pyarrow("lib")
        schema = self._writer.schema if self._writer is not None else None
        try:
            table = arrow.Table.from_pylist(self._waiting, schema=schema)
            if self._writer is None:
                self._writer = _pyarrow("parquet").ParquetWriter(self._file, table.schema)
            self._writer.write_table(table)
        except (arrow.ArrowException, ValueError) as error:
            raise StorageError(f"parquet cannot hold these results ({error})", self.path, "write .jsonl") from error
        self._waiting = []

    def _abandon(self) -> None:
        """Close what may not find room any more."""
        with contextlib.suppress(Exception):
            if self._writer is not None:
                self._writer.close()
        with contextlib.suppress(OSError):
            self._file.close()

    def _read_earlier(self) -> int:
        """Note the ids of complete rows; where they end."""
        end = 0
        with _open(str(self.path)) as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    id = json.loads(line)["id"]
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    raise ArtifactError("not a result of zoo run", f"{self.path}, line {number}") from error
                if not _is_name(id):
                    raise ArtifactError("not a result of zoo run", f"{self.path}, line {number}")
                self.done.add(id)
                end += len(line)
        return end
