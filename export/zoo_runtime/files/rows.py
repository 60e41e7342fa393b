"""Reading inputs from files: plain text, JSON lines, JSON, CSV, parquet."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from zoo import tables
from zoo.errors import ArtifactError, UsageError, ZooError, close_to, nearest
from zoo.reading import lines
from zoo.tables import JSON, LINES, PARQUET, TABLES, read_numbered
from zoo_runtime.running.inputs import Answer, Pair

__all__ = [
    "RESUMES_BY_ID",
    "UNIQUE_IDS",
    "ColumnError",
    "column_types",
    "count_rows",
    "is_id",
    "is_table",
    "open_input",
    "open_parquet",
    "pyarrow_module",
    "read_rows",
]

_STDIN = "-"
_BATCH = 1024
RESUMES_BY_ID = "--resume finds rows by their ids, which must be unique"
UNIQUE_IDS = "start again with --force, and --id-column with a column of unique ids"
_MIXED = "give both, or one --column whose values are single inputs and lists of two"
"""Remedy for a row of JSON that has only a part of a pair."""


class ColumnError(UsageError):
    """A file, or one of its rows, lacks a column that the options name, or has one that results have."""


def read_rows(
    path: str,
    column: str,
    id_column: str | None = None,
    pair_column: str | None = None,
    *,
    keep: bool = False,
    resume: bool = False,
) -> Iterator[Answer]:
    """Read a file row by row. A row that cannot be read is yielded with its ``error`` set.

    Args:
        path: ``.jsonl`` or ``.ndjson``, ``.json`` with an array of objects, ``.csv`` or ``.tsv`` with a header,
            ``.parquet``, or text with one input per line; ``-`` for text from stdin.
        column: the column of inputs, in formats that have columns.
        id_column: the column of row ids, which must be unique texts or integers. By default it is ``id``, if the file
            has it, with any values.
        pair_column: the column of second texts, for inputs that are pairs.
        keep: read all columns, to write them with the results.
        resume: rows with earlier results are left out, by their ids.

    Raises:
        ArtifactError: the file is missing, or its contents do not match its extension.
        ColumnError: a column does not exist, or ``pair_column`` is given for plain text.
        UsageError: with ``resume``, an id is not unique, or neither a text nor an integer.
    """
    suffix = Path(path).suffix.lower()
    if path != _STDIN and not Path(path).exists():
        raise ArtifactError("no such file", path)
    if is_table(path):
        read = _read_parquet if suffix == PARQUET else _read_objects
        rows = read(path, column, id_column, pair_column, keep)
        return _unique(rows, path, resume) if resume or id_column is not None else rows
    if pair_column is not None:
        where = f"--pair-column {pair_column}"
        raise ColumnError("plain text has no columns", where, "give .jsonl, .csv or .parquet")
    return _read_lines(path, keep)


def count_rows(path: str) -> int | None:
    """Number of rows that :func:`read_rows` yields; None for a stream, which can be read only once."""
    if not Path(path).is_file():
        return None
    if Path(path).suffix.lower() == PARQUET:
        with open_parquet(path) as file:
            return int(file.metadata.num_rows)
    if Path(path).suffix.lower() in (JSON, *TABLES):
        return sum(1 for _ in read_numbered(Path(path)))
    with open_input(path) as file:
        skip_blank = Path(path).suffix.lower() in LINES
        return sum(1 for line in lines(file, path) if not skip_blank or line.strip())


def open_parquet(path: str) -> Any:
    """Open a parquet file as ``pyarrow.parquet.ParquetFile``, or raise :class:`ArtifactError`."""
    return tables.open_parquet(pyarrow_module("parquet"), path)


def column_types(path: str | None) -> dict[str, Any]:
    """Return the types of the columns of a parquet file by name; empty for other files."""
    if path is None or Path(path).suffix.lower() != PARQUET:
        return {}
    with open_parquet(path) as file:
        return {field.name: field.type for field in file.schema_arrow}


def open_input(path: str) -> IO[bytes]:
    if path == _STDIN:
        if sys.stdin is None:
            raise UsageError("stdin is closed", "--input -")
        return sys.stdin.buffer
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise ArtifactError(f"cannot read ({error.strerror})", path) from error


def _read_lines(path: str, keep: bool) -> Iterator[Answer]:
    with open_input(path) as file:
        for number, line in enumerate(lines(file, path), 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")  # byte order mark
                text = text.rstrip("\r\n")
                yield Answer(number, text, id=number, columns={"text": text} if keep else {})
            except UnicodeDecodeError as error:
                yield _bad(path, number, f"not UTF-8 ({error.reason} at byte {error.start})")


def _bad(
    path: str, number: int, problem: str, remedy: str | None = None, kind: type[ZooError] = ArtifactError
) -> Answer:
    """A row with an error."""
    error = kind(problem, f"{'stdin' if path == _STDIN else path}, row {number}", remedy)
    return Answer(number, None, error=error, id=number)


def _read_objects(
    path: str, column: str, id_column: str | None, pair_column: str | None, keep: bool
) -> Iterator[Answer]:
    required = [name for name in (column, id_column, pair_column) if name is not None]
    for number, row in read_numbered(Path(path)):
        if isinstance(row, str):
            yield _bad(path, number, row)
            continue
        lacks = next((name for name in required if name not in row), None)
        if lacks is not None and Path(path).suffix.lower() in TABLES:
            raise ColumnError(f"no column {lacks!r}", path, nearest(lacks, row))
        if lacks is not None:
            is_half = pair_column is not None and (column in row or pair_column in row)
            remedy = (close_to(lacks, row) or _MIXED) if is_half else nearest(lacks, row)
            yield _bad(path, number, f"has no {lacks!r}", remedy, ColumnError)
            continue
        pair = (column, pair_column) if pair_column is not None else ()
        null = next((name for name in pair if row[name] is None), None)
        value = row[column] if pair_column is None else Pair(row[column], row[pair_column])
        id = row.get(id_column or "id", number)
        yield (
            Answer(number, value, id=id, columns=row if keep else {})
            if null is None
            else _bad(path, number, f"{null!r} is null", _MIXED)
        )


def _read_parquet(
    path: str, column: str, id_column: str | None, pair_column: str | None, keep: bool
) -> Iterator[Answer]:
    with open_parquet(path) as file:
        names = file.schema_arrow.names
        for name in (column, id_column, pair_column):
            if name is not None and name not in names:
                raise ColumnError(f"no column {name!r}", path, nearest(name, names))
        id_column = id_column or ("id" if "id" in names else None)
        columns = names if keep else (column, id_column, pair_column)
        for number, row in enumerate(_parquet_rows(file, path, *columns), 1):
            value = row[column] if pair_column is None else Pair(row[column], row[pair_column])
            null = next((name for name in (column, pair_column) if name is not None and row[name] is None), None)
            id = row[id_column] if id_column else number
            yield (
                Answer(number, value, id=id, columns=row if keep else {})
                if null is None
                else _bad(path, number, f"{null!r} is null", "put it into another file" if pair_column else None)
            )


def _parquet_rows(file: Any, path: str, *names: str | None) -> Iterator[dict[str, Any]]:
    """Yield rows with the given columns, read in batches."""
    columns = list(dict.fromkeys(filter(None, names)))
    try:
        for batch in file.iter_batches(_BATCH, columns=columns):
            yield from batch.to_pylist()
    except Exception as error:  # pyarrow raises its own classes
        raise ArtifactError(f"cannot be read ({error})", path) from error


def _unique(rows: Iterator[Answer], path: str, resume: bool) -> Iterator[Answer]:
    """Reject rows whose id is a duplicate, or neither a string nor an integer. ``resume`` makes that an error."""
    seen: set[str | int] = set()
    for row in rows:
        problem = None
        if row.error is None and not is_id(row.id):
            problem = f"id must be a string or an integer, got {type(row.id).__name__}"
        elif row.error is None and row.id in seen:
            problem = f"duplicate id {row.id!r}"
        if problem is not None and resume:
            raise UsageError(f"{RESUMES_BY_ID} ({problem})", f"{path}, row {row.number}", UNIQUE_IDS)
        if row.error is None and problem is None:
            seen.add(row.id)
        yield row if problem is None else _bad(path, row.number, problem)


def is_table(path: str | None) -> bool:
    """Return whether a file of inputs has columns, by its name; lines of text have none."""
    return path is not None and Path(path).suffix.lower() in (*LINES, JSON, *TABLES, PARQUET)


def is_id(id: object) -> bool:
    return isinstance(id, str | int) and not isinstance(id, bool)


def pyarrow_module(module: str) -> Any:
    """Import a module of pyarrow, or raise :class:`UsageError`."""
    from importlib import import_module

    try:
        return import_module(f"pyarrow.{module}")
    except ImportError as error:
        raise UsageError("parquet needs pyarrow", None, "pip install attention-zoo[parquet]") from error
