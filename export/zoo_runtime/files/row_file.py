"""Files of rows: JSON lines, CSV or parquet, which appear once they are complete."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from zoo.errors import StorageError, UsageError, storage_errors
from zoo.storage import check_file_target, new_file
from zoo.tables import LINES, PARQUET, TABLES, cell, table_line
from zoo_runtime.files.parquet_types import BATCH, find_schema, make_table
from zoo_runtime.files.results import plain
from zoo_runtime.files.rows import pyarrow_module

__all__ = ["RowFile"]


class RowFile:
    """A file of rows: JSON lines, CSV or parquet. It appears once it is complete.

    Args:
        path: ``.jsonl``, ``.ndjson``, ``.csv``, ``.tsv`` or ``.parquet``.
        force: replace an existing file.
        types: pyarrow types of the columns, where known.
        encode: write lists in a table as JSON. Otherwise they are an error.

    Raises:
        UsageError: the file cannot be written, or already exists.
    """

    def __init__(
        self, path: Path, *, force: bool = False, types: Mapping[str, Any] = MappingProxyType({}), encode: bool = False
    ) -> None:
        self.path = path
        self.types = types
        self.force = force
        self.suffix = path.suffix.lower()
        if self.suffix not in (*LINES, *TABLES, PARQUET):
            raise UsageError("unknown file type", path, f"name it *{', *'.join((*LINES, *TABLES, PARQUET))}")
        if self.suffix == PARQUET:
            pyarrow_module("parquet")
        check_file_target(path, force=force)
        self.rows = 0
        """Number of rows written."""
        self._encode = encode
        self._names: list[str] = []
        self._waiting: list[dict[str, Any]] = []
        self._writer: Any = None

    @contextmanager
    def writing(self) -> Iterator[Self]:
        """Open the file, and complete it when the block ends. If the block raises, earlier contents are kept."""
        with new_file(self.path, force=self.force) as stage, storage_errors(self.path), stage.open("wb") as self._file:
            yield self
            self._flush()
            if self._writer is not None:
                self._writer.close()

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row."""
        self._waiting.append(dict(row))
        if len(self._waiting) >= BATCH:
            self._flush()

    def _flush(self) -> None:
        rows = self._waiting
        self._waiting = []
        self.rows += len(rows)
        if self.suffix in LINES:
            lines = (json.dumps(plain(row), ensure_ascii=False) + "\n" for row in rows)
            self._file.write("".join(lines).encode("utf-8", "backslashreplace"))
        elif rows and self.suffix == PARQUET:
            self._flush_parquet(rows)
        elif rows:
            self._flush_table(rows)

    def _flush_table(self, rows: list[dict[str, Any]]) -> None:
        lines = []
        if not self._names:
            self._names = [*rows[0]]
            lines.append(table_line(self._names, self.suffix))
        for row in rows:
            lists = {name: value for name, value in row.items() if isinstance(value, list | dict)}
            if lists and not self._encode:
                wrong = next(iter(lists))
                raise UsageError(f"column {wrong!r} holds lists, which a table cannot", self.path, "write .jsonl")
            if row.keys() != set(self._names):
                raise UsageError("the rows of the input have different columns", self.path, "write .jsonl")
            encoded = {name: cell(plain(value)) for name, value in lists.items()}
            lines.append(table_line([(row | encoded)[name] for name in self._names], self.suffix))
        self._file.write("".join(lines).encode("utf-8", "backslashreplace"))

    def _flush_parquet(self, rows: list[dict[str, Any]]) -> None:
        arrow = pyarrow_module("lib")
        try:
            if self._writer is None:
                schema = find_schema(rows, self.types, self.path)
                self._writer = pyarrow_module("parquet").ParquetWriter(self._file, schema)
            late = sorted({name for row in rows for name in row} - set(self._writer.schema.names))
            if late:
                raise ValueError(f"no earlier row has {', '.join(late)}")
            self._writer.write_table(make_table(rows, self._writer.schema, self.path))
        except (arrow.ArrowException, ValueError) as error:
            raise StorageError(f"parquet cannot hold these rows ({error})", self.path, "write .jsonl") from error
