"""Files of rows for training: each input's row, followed by one for each variant of its text."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from zoo.errors import StorageError, UsageError, storage_errors
from zoo.storage import check_file_target, new_file
from zoo.tables import LINES, PARQUET, TABLES
from zoo_runtime.files.results import plain
from zoo_runtime.files.rows import pyarrow_module

__all__ = ["AugmentedRows"]

_BATCH = 1024


class AugmentedRows:
    """A file of rows for ``zoo train --data``: JSON lines, CSV or parquet. It appears once it is complete.

    Args:
        path: ``.jsonl``, ``.ndjson``, ``.csv``, ``.tsv`` or ``.parquet``.
        column: the column of texts, which differs between the rows of an input. The others are the same.
        force: replace an existing file.
        types: pyarrow types of the columns, where known.

    Raises:
        UsageError: the file cannot be written, or already exists.
    """

    def __init__(
        self, path: Path, column: str, *, force: bool = False, types: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.path = path
        self.column = column
        self.types = types
        self.force = force
        self.suffix = path.suffix.lower()
        if self.suffix not in (*LINES, *TABLES, PARQUET):
            raise UsageError("unknown file type", path, f"name it *{', *'.join((*LINES, *TABLES, PARQUET))}")
        if self.suffix == PARQUET:
            pyarrow_module("parquet")
        check_file_target(path, force=force)
        self.done = set[str | int]()
        self.rows = self.empty = 0
        """Numbers of rows written, and of variants left out because they have no text."""
        self._names: list[str] = []
        self._waiting: list[dict[str, Any]] = []
        self._writer: Any = None

    @contextmanager
    def writing(self) -> Iterator[AugmentedRows]:
        """Open the file, and complete it when the block ends. If the block raises, earlier contents are kept."""
        with new_file(self.path, force=self.force) as stage, storage_errors(self.path), stage.open("wb") as self._file:
            yield self
            self._flush()
            if self._writer is not None:
                self._writer.close()

    def write(self, id: Any, result: Mapping[str, Any], columns: Mapping[str, Any]) -> None:
        """Add the row of an input and those of its variants."""
        if self.column not in columns:
            raise UsageError("inputs without a text cannot be written as rows", self.path, "give texts, not token ids")
        texts = [variant["text"] for variant in result.get("variants", ())]
        if None in texts:
            raise UsageError("variants have no text without a tokenizer", self.path, "give --tokenizer FILE")
        self.empty += texts.count("")
        for text in (columns[self.column], *filter(None, texts)):
            self._waiting.append({**columns, self.column: text})
        if len(self._waiting) >= _BATCH:
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
        text = io.StringIO(newline="")
        writer = csv.writer(text, delimiter=TABLES[self.suffix], lineterminator="\n")
        if not self._names:
            self._names = [*rows[0]]
            writer.writerow(self._names)
        for row in rows:
            wrong = next((name for name, value in row.items() if isinstance(value, list | dict)), None)
            if wrong is not None:
                raise UsageError(f"column {wrong!r} holds lists, which a table cannot", self.path, "write .jsonl")
            if row.keys() != set(self._names):
                raise UsageError("the rows of the input have different columns", self.path, "write .jsonl")
            writer.writerow([row[name] for name in self._names])
        self._file.write(text.getvalue().encode("utf-8", "backslashreplace"))

    def _flush_parquet(self, rows: list[dict[str, Any]]) -> None:
        arrow = pyarrow_module("lib")
        try:
            if self._writer is None:
                inferred = arrow.Table.from_pylist(rows).schema
                fields = [(field.name, self.types.get(field.name, field.type)) for field in inferred]
                self._writer = pyarrow_module("parquet").ParquetWriter(self._file, arrow.schema(fields))
            late = sorted({name for row in rows for name in row} - set(self._writer.schema.names))
            if late:
                raise ValueError(f"no earlier row has {', '.join(late)}")
            self._writer.write_table(arrow.Table.from_pylist(rows, schema=self._writer.schema))
        except (arrow.ArrowException, ValueError) as error:
            raise StorageError(f"parquet cannot hold these rows ({error})", self.path, "write .jsonl") from error
