"""Files of predictions: each row of the data with its target, and the answer of each evaluated variant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zoo.errors import UsageError
from zoo.storage import is_same_file
from zoo.tables import PARQUET, has_bytes, join_columns
from zoo.training.criterion import Row
from zoo_runtime.files.parquet_types import check_rows
from zoo_runtime.files.row_file import RowFile
from zoo_runtime.files.rows import column_types

__all__ = ["Prediction", "PredictionFile"]

Prediction = Mapping[str, Any]
"""``target``, if there is one, ``prediction``, and numbers that go with it."""
_MISSING = object()


class PredictionFile:
    """A file with a row for each row of the data that has an example.

    Args:
        path: ``.jsonl``, ``.ndjson``, ``.csv``, ``.tsv`` or ``.parquet``.
        data: files and directories of the data, which it must not replace.
        force: replace an existing file.

    Raises:
        UsageError: the file cannot be written, already exists, or is the data.
    """

    def __init__(self, path: Path, data: Iterable[str], *, force: bool = False) -> None:
        files = [Path(item) for item in data]
        for item in files:
            if is_same_file(item, path) or (
                item.is_dir() and path.exists() and item.resolve() in path.resolve().parents
            ):
                raise UsageError("is part of the data", f"--predictions {path}", "choose another name")
        self._file = RowFile(path, force=force, encode=True)
        self.path = path
        types = [column_types(str(item)) for item in files if item.is_file()] if self._file.suffix == PARQUET else []
        self._types: Mapping[str, Any] = types[0] if types and all(found == types[0] for found in types) else {}

    def check(self, rows: Iterable[Row]) -> None:
        """Raise :class:`StorageError` if the file cannot hold the columns of the data.

        Args:
            rows: as for :meth:`write`.
        """
        if self._file.suffix != PARQUET:
            return
        names = dict.fromkeys(name for row in rows for name in _columns(row))
        check_rows((dict.fromkeys(names) | _columns(row) for row in rows), self._types, self.path)

    def write(self, rows: Iterable[Row], found: Mapping[str, Sequence[Prediction]]) -> int:
        """Write the file, and return the number of rows.

        Columns are those of the data, ``target``, and for each variant its predictions: ``prediction_torch`` and so
        on. Bytes, such as those of images, are left out, and a target that is a column of this name is not repeated.

        Args:
            rows: the rows of the data that have an example, iterated twice.
            found: the target and the predictions for all rows, by name of a variant.
        """
        targets = [item.get("target", _MISSING) for item in next(iter(found.values()))]
        names, repeated = dict[str, None](), True
        for row, target in zip(rows, targets, strict=True):
            columns = _columns(row)
            names |= dict.fromkeys(columns)
            repeated = repeated and columns.get("target", _MISSING) == target
        added = {
            f"{key}_{name}": None for name, items in found.items() for item in items for key in item if key != "target"
        }
        own = [*added] if repeated else ["target", *added]
        types = join_columns({name: self._types.get(name) for name in names}, dict.fromkeys(own))
        self._file.types = {name: kind for name, kind in types.items() if kind is not None}
        with self._file.writing() as file:
            for number, (row, target) in enumerate(zip(rows, targets, strict=True)):
                answers = {
                    f"{key}_{name}": value
                    for name, items in found.items()
                    for key, value in items[number].items()
                    if key != "target"
                }
                result = added | answers if repeated else {"target": target} | added | answers
                file.add(join_columns(dict.fromkeys(names) | _columns(row), result))
        return file.rows


def _columns(row: Row) -> dict[str, Any]:
    """Return the columns of a row by their names in the data."""
    columns: Mapping[str, Any] = getattr(row, "columns", row)
    return {name: value for name, value in columns.items() if not has_bytes(value)}
