"""Types of the columns of parquet files that hold rows."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from zoo.errors import StorageError
from zoo_runtime.files.rows import pyarrow_module

__all__ = ["BATCH", "check_rows", "find_schema", "make_table"]

BATCH = 1024
"""Rows that are written at a time. The types of columns are those of the first batch."""
_REMEDY = "write .jsonl, or give the values of the column as texts"
Rows = Sequence[Mapping[str, Any]]


def check_rows(rows: Iterable[Mapping[str, Any]], types: Mapping[str, Any], path: Path) -> None:
    """Raise :class:`StorageError` if a parquet file cannot hold rows, which all have the columns of the first.

    Args:
        rows: the rows; at most a batch of them is in memory.
        types: as for :func:`find_schema`.
        path: the file, for the message.
    """
    schema = None
    every = iter(rows)
    while batch := list(islice(every, BATCH)):
        if schema is None:
            schema = find_schema(batch, types, path)
        make_table(batch, schema, path)
    if schema is not None:
        try:
            pyarrow_module("parquet").ParquetWriter(io.BytesIO(), schema).close()
        except pyarrow_module("lib").ArrowException as error:
            raise StorageError(f"parquet cannot hold these rows ({error})", path, "write .jsonl") from error


def find_schema(rows: Rows, types: Mapping[str, Any], path: Path) -> Any:
    """Return the pyarrow schema of rows, which has the columns of the first.

    Args:
        rows: the first rows that are written.
        types: pyarrow types of columns by name, where known. The others are inferred.
        path: the file, for the message.

    Raises:
        StorageError: the values of a column have no common type.
    """
    arrow = pyarrow_module("lib")
    inferred = ((name, types.get(name) or _column(rows, name, None, path).type) for name in (rows[0] if rows else ()))
    return arrow.schema(list(inferred))


def make_table(rows: Rows, schema: Any, path: Path) -> Any:
    """Return rows as a pyarrow table. Raises :class:`StorageError` for a value that its column cannot hold."""
    arrays = [_column(rows, field.name, field.type, path) for field in schema]
    return pyarrow_module("lib").Table.from_arrays(arrays, schema=schema)


def _column(rows: Rows, name: str, kind: Any, path: Path) -> Any:
    """Return the values of a column as a pyarrow array, of an inferred type if ``kind`` is None."""
    arrow = pyarrow_module("lib")
    values = [row.get(name) for row in rows]
    try:
        try:
            return arrow.array(values, kind)
        except OverflowError:
            if kind is None and all(value is None or type(value) is int for value in values):
                return arrow.array(values, arrow.uint64())  # pyarrow infers signed integers alone
            raise
    except OverflowError as error:
        numbers = [number for number in _integers(values) if not -(2**63) <= number < 2**63]
        shown = f"the integer {max(numbers, key=abs)}" if numbers else "a negative integer"
        raise StorageError(f"parquet cannot hold {shown} in column {name!r}", path, _REMEDY) from error
    except (arrow.ArrowException, ValueError) as error:
        raise StorageError(f"parquet cannot hold column {name!r} ({error})", path, _REMEDY) from error


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        for item in value:
            yield from _integers(item)
    elif isinstance(value, int):
        yield value
