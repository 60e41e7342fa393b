"""Writing results to files: JSON lines, CSV, parquet."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile
from types import MappingProxyType
from typing import IO, Any

import numpy as np

from zoo.errors import ArtifactError, StorageError, UsageError, storage_errors
from zoo.storage import check_file_target, new_file
from zoo.tables import LINES, PARQUET, TABLES, cell, has_bytes, is_renamed, join_columns, table_line
from zoo_runtime.files.parquet_types import BATCH, find_schema, make_table
from zoo_runtime.files.rows import RESUMES_BY_ID, UNIQUE_IDS, is_id, open_input, pyarrow_module
from zoo_runtime.files.run_record import RunRecord
from zoo_runtime.running.inputs import Answer

__all__ = ["EMBEDDING", "Results", "plain", "plain_id"]

EMBEDDING = "embedding"
"""The vector in a result. Such results keep the columns of their input in parquet."""


def plain(result: Any, *, nulls: bool = True) -> Any:
    """Convert a result to types that JSON supports; other types become strings.

    With ``nulls``, numbers that are not finite, which JSON does not have, become None.
    """
    if isinstance(result, np.ndarray | np.generic):
        is_plain = result.dtype != object and not (nulls and result.dtype.kind == "f" and not np.isfinite(result).all())
        return result.tolist() if is_plain else plain(result.tolist(), nulls=nulls)
    if isinstance(result, Mapping):
        return {str(key): plain(value, nulls=nulls) for key, value in result.items()}
    if isinstance(result, list | tuple):
        return [plain(value, nulls=nulls) for value in result]
    if isinstance(result, float) and nulls and not math.isfinite(result):
        return None
    return result if result is None or isinstance(result, str | int | float) else str(result)


def plain_id(id: Any) -> Any:
    """Convert the id of a row to a type that JSON supports; None for bytes."""
    return None if has_bytes(id) else plain(id)


def _digest(value: Any) -> str:
    """Return a digest of an input; of an image or a sound in a file, that of its name."""
    return hashlib.sha256(json.dumps(plain(value, nulls=False)).encode()).hexdigest()[:16]


class Results:
    """A file of results, JSON lines, CSV or parquet: the ``id`` of each input, its columns if asked for, its result.

    A new JSON lines file is flushed after every row, so that an interrupted run can be resumed. Another file, or one
    that replaces another, appears only once it is complete. A CSV file has the columns of all rows; lists and objects
    are JSON in it, and None is empty.

    Args:
        path: ``.jsonl``, ``.ndjson``, ``.csv``, ``.tsv`` or ``.parquet``.
        force: replace an existing file, but not a symbolic link.
        resume: continue an existing file. An incomplete last line is removed.
        types: pyarrow types of the input's columns, where known.
        keep: write the columns of the input before those of the result. Vectors in parquet always have them.
        id_column: the input's column of ids, by default ``id``.
        temporary: the caller renames the file once it is complete.

    Raises:
        UsageError: the file cannot be written, or already exists, or the ids of the one to continue are not unique.
        ArtifactError: the file to continue does not contain results.
    """

    def __init__(
        self,
        path: Path,
        *,
        force: bool = False,
        resume: bool = False,
        types: Mapping[str, Any] = MappingProxyType({}),
        keep: bool = False,
        id_column: str | None = None,
        temporary: bool = False,
    ) -> None:
        self.path = path
        self.types = types
        self._keep = keep
        self._id_column = id_column or "id"
        self._temporary = temporary
        self.metadata: dict[str, str] = {}
        """Key-value metadata for a parquet file."""
        self.record: RunRecord | None = None
        """The model, options, versions and inputs of this run, written beside a file that can be resumed."""
        self.parquet = path.suffix.lower() == PARQUET
        self._suffix = path.suffix.lower()
        if self._suffix not in (*LINES, *TABLES, PARQUET):
            raise UsageError("unknown file type", path, f"name it *{', *'.join((*LINES, *TABLES, PARQUET))}")
        if resume and force:
            raise UsageError("cannot both continue and replace the output", "--resume, --force", "choose one of them")
        if resume and self._suffix not in LINES:
            raise UsageError(f"cannot continue a {self._suffix[1:]} file", path, "write .jsonl")
        if self.parquet:
            pyarrow_module("parquet")
        with storage_errors(path):
            if path.is_dir():
                raise UsageError("is a directory", path, "name a file")
            self._exists = path.is_symlink() or path.exists()
        if self._exists and not (force or resume):
            raise UsageError("already exists", path, "continue it with --resume, or replace it with --force")
        if force:
            check_file_target(path, force=True)
        self.done: dict[str | int, int] = {}
        """Where each result that is already in the file begins, by its id."""
        self._end = self._read_earlier() if resume and self._exists else 0
        self._resume = resume and self._exists
        self._writer: Any = None
        self._waiting: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._names: dict[str, None] = {}
        """The columns of results in a parquet file, without those of the input."""
        self._example: dict[str, Any] | None = None
        self._unwritten: IO[bytes] | None = None
        """The rows of a CSV file as JSON lines, until the columns of all are known."""
        self.notes: dict[str, None] = {}
        """Remarks on columns of the input that are renamed or left out."""

    @property
    def is_resumable(self) -> bool:
        """Whether a run that is interrupted can be resumed."""
        return self._suffix in LINES and not self._temporary

    @property
    def needs_example(self) -> bool:
        """Whether the file has columns but no row, so that only :meth:`describe` can give it columns."""
        return self._suffix not in LINES and self._writer is None and not (self._waiting or self._names)

    def describe(self, result: Mapping[str, Any]) -> None:
        """Give a CSV or parquet file without rows the columns of a result, and of the input."""
        numbers = str(self.types.get(self._id_column, "int64")) not in ("string", "large_string")
        found = plain(result) | {"id": 1 if numbers else ""}
        self._names |= dict.fromkeys(found)
        self._example = self._join(self._kept(dict.fromkeys(self.types), found), found)

    def missing(self, inputs: Iterable[Answer]) -> Iterator[Answer]:
        """Yield the inputs, failed ones too, of which the file has no result.

        Raises :class:`UsageError` if a result is that of another input with the same id: rows were added, removed or
        changed.
        """
        for row in inputs:
            if row.error is not None or not self._has(row.id, row.columns, row.input):
                yield row

    def _has(self, id: Any, columns: Mapping[str, Any], given: Any) -> bool:
        """Return whether the file has the result of the input ``given``."""
        if not is_id(id) or id not in self.done:
            return False
        remedy = "resume with the same input, or start again with --force"
        with storage_errors(self.path), self.path.open("rb") as file:
            file.seek(self.done[id])
            earlier = json.loads(file.readline())
        for name, value in self._kept(columns, {}).items():
            kept = [earlier[key] for key in earlier if is_renamed(key, name)]
            if not has_bytes(value) and json.loads(json.dumps(plain(value))) not in kept:
                problem = f"the result with the id {id!r} is of another input: column {name!r} differs"
                raise UsageError(problem, self.path, remedy)
        recorded = None if self.record is None else self.record.digests.get(id)
        if recorded is None:
            problem = f"the input of the result with the id {id!r} is not recorded"
            raise UsageError(problem, self.path, "start again with --force")
        if recorded != _digest(given):
            raise UsageError(f"the result with the id {id!r} is of another input", self.path, remedy)
        return True

    @contextmanager
    def writing(self) -> Iterator[Results]:
        """Open the file, and complete it when the block ends. If the block raises, earlier contents are kept."""
        replaces = self._exists and not self._resume
        staged = (self._suffix not in LINES or replaces) and not self._temporary
        with ExitStack() as stack:
            place = stack.enter_context(new_file(self.path, force=replaces)) if staged else self.path
            if self._suffix in TABLES:
                self._unwritten = stack.enter_context(TemporaryFile())
            with storage_errors(self.path):
                place.parent.mkdir(parents=True, exist_ok=True)
                try:
                    self._file = place.open("r+b" if self._resume else "xb")
                except FileExistsError as error:
                    problem = "another command has created this file meanwhile"
                    raise UsageError(problem, self.path, "wait for that command, or choose another place") from error
            try:
                with storage_errors(self.path):
                    self._file.truncate(self._end)
                    self._file.seek(self._end)
                if self.record is not None and not staged:
                    if not self.done:
                        self.record.write()
                    self.record.open()
                yield self
                with storage_errors(self.path):
                    self._flush()
                    self._write_table()
                    if self._writer is not None:
                        self._writer.close()
                    self._file.flush()
                    os.fsync(self._file.fileno())
                    if not os.path.samestat(os.fstat(self._file.fileno()), place.stat()):
                        problem = "another command has replaced this file, with the results in it, meanwhile"
                        raise StorageError(problem, self.path, "run again, and name another file")
                    self._file.close()  # Windows does not rename an open file
                if self.record is not None:
                    self.record.close()
                if self.record is not None and staged:
                    self.record.remove()  # of the earlier results: new ones beside it would be taken for its run's
            except BaseException:
                self._abandon()
                with suppress(OSError):
                    if not (self._resume or place.stat().st_size):
                        place.unlink()
                        if self.record is not None and self.record.written:
                            self.record.remove()
                raise
        if self.record is not None and staged:
            self.record.write(force=True)

    def write(
        self, id: Any, result: Mapping[str, Any], columns: Mapping[str, Any] = MappingProxyType({}), value: Any = None
    ) -> None:
        """Add a row.

        Args:
            id: the id of its input.
            result: the result.
            columns: the columns of its input. Whether they are kept is decided by ``keep``.
            value: the input, which the record needs.
        """
        found = plain(result) | {"id": id if self.parquet else plain_id(id)}
        kept = self._kept(columns, found)
        with storage_errors(self.path):
            if self.parquet:
                self._names |= dict.fromkeys(found)
                self._waiting.append((kept, found))
                if len(self._waiting) == BATCH:
                    self._flush()
                return
            for name in [name for name, value in {**kept, self._id_column: id}.items() if has_bytes(value)]:
                kept.pop(name, None)
                note = f"column {name!r} of the input holds bytes, and is left out: write .parquet to keep it"
                self.notes[note] = None
            row = self._join(plain(kept), found)
            if self._unwritten is not None:
                self._names |= dict.fromkeys(row)
                self._unwritten.write(json.dumps(row).encode() + b"\n")
                return
            if self.record is not None and is_id(id):
                self.record.add(id, _digest(value))
            # UTF-8 cannot encode lone surrogates; backslashreplace writes them as JSON escapes
            self._file.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
            self._file.flush()

    def _kept(self, columns: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns of an input that stay beside its result. The one of its id is the result's ``id``."""
        if not (self._keep or (self.parquet and EMBEDDING in result)):
            return {}
        return {name: value for name, value in columns.items() if (name, self._id_column) != ("id", "id")}

    def _join(self, columns: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row of an input, its id first, and note columns with new names."""
        row = {"id": result["id"]} | join_columns(columns, result)
        for old, new in zip(columns, list(row)[1:], strict=False):
            if old != new:
                self.notes[f"column {old!r} of the input is named {new!r}: results have a column of its name"] = None
        return row

    def _write_table(self) -> None:
        """Write the rows of a CSV file, with the columns of all."""
        if self._unwritten is None:
            return
        self._unwritten.seek(0)
        names = [*(self._example or self._names)]
        rows = ([cell(row.get(name)) for name in names] for row in map(json.loads, self._unwritten))
        for values in chain([names], rows) if names else ():
            self._file.write(table_line(values, self._suffix).encode("utf-8", "backslashreplace"))

    def _flush(self) -> None:
        if not self.parquet or (not self._waiting and self._writer is not None):
            return
        arrow = pyarrow_module("lib")
        schema = self._writer.schema if self._writer is not None else None
        result_names = dict.fromkeys(self._names)
        records = [self._join(columns, result_names | found) for columns, found in self._waiting]
        records = records or ([self._example] if self._example else [])
        names = dict.fromkeys(name for row in records for name in row)
        try:
            if schema is not None and (late := sorted(names.keys() - set(schema.names))):
                raise ValueError(f"no earlier row has {', '.join(late)}")
            rows = [dict.fromkeys(names) | row for row in records]  # pyarrow takes the columns of the first row
            if schema is None:
                schema = self._schema(arrow, rows)
            table = make_table(rows[: len(self._waiting)], schema, self.path)
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
        names = dict.fromkeys(self._names)
        types = {name: kind for name, kind in join_columns(self._kept(self.types, names), names).items() if kind}
        if self._id_column in self.types:
            types["id"] = self.types[self._id_column]
        sizes = {len(row[EMBEDDING]) if isinstance(row.get(EMBEDDING), list) else None for row in rows}
        if None not in sizes and len(sizes) == 1:
            types[EMBEDDING] = arrow.list_(arrow.float32(), sizes.pop())
        return find_schema(rows, types, self.path)

    def _abandon(self) -> None:
        """Close the file, ignoring errors: the disk may be full."""
        with suppress(Exception):
            if self._writer is not None:
                self._writer.close()
        for file in (self._file, self.record):
            with suppress(OSError):
                if file is not None:
                    file.close()

    def _read_earlier(self) -> int:
        """Collect the ids of complete rows and return the offset where they end."""
        problem, remedy = "not a result of zoo run", "resume a file that zoo run wrote"
        end = 0
        with open_input(str(self.path)) as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    id = json.loads(line)["id"]
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    raise ArtifactError(problem, f"{self.path}, line {number}", remedy) from error
                if not is_id(id) or id in self.done:
                    raise UsageError(f"{RESUMES_BY_ID} (got {id!r})", f"{self.path}, line {number}", UNIQUE_IDS)
                self.done[id] = end
                end += len(line)
        if self.path.stat().st_size and not end and not _begins_result(self.path):
            raise ArtifactError(problem, self.path, remedy)
        return end


def _begins_result(path: Path) -> bool:
    """Whether the first line of a file, which is incomplete, may be the beginning of a result."""
    start = b'{"id": '
    with path.open("rb") as file:
        found = file.read(len(start))
    return start.startswith(found)
