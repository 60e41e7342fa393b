"""Tables in files: comma- and tab-separated values, and parquet."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zoo.errors import ArtifactError
from zoo.reading import check_plain

__all__ = ["TABLES", "check_footer", "read_table"]

TABLES = {".csv": ",", ".tsv": "\t"}
"""Suffixes of files, and the separators of their values."""
_FIELD = 2**31 - 1
"""Largest number of characters of a value in a CSV file: as in JSON lines, limits are those of what reads the rows."""
_BUFFER = 2**16
"""Bytes of a column that are read at a time; otherwise a whole row group is."""


def read_table(path: Path) -> Iterator[dict[str, Any] | str]:
    """Yield the rows of a CSV file with a header, or what is wrong with them."""
    csv.field_size_limit(_FIELD)
    check_plain(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=TABLES[path.suffix.lower()], strict=True)
            header = next(reader, [])
            if twice := next((name for name in header if header.count(name) > 1), None):
                raise ArtifactError(f"the column {twice!r} occurs twice", path)
            for row in reader:
                if len(row) == len(header):
                    yield dict(zip(header, row, strict=True))
                elif row:
                    yield f"{len(row)} fields, the header has {len(header)}"
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ArtifactError(f"cannot read ({error})", path) from error


def check_footer(parquet: Any, path: str | Path) -> None:
    """Compare the numbers of rows in the metadata of a parquet file. pyarrow drops what exceeds those of a row group.

    Args:
        parquet: the module ``pyarrow.parquet``.
        path: the file.

    Raises:
        ArtifactError: the row groups have other rows than the file, or than their columns.
        Exception: of pyarrow, if the file cannot be read.
    """
    with parquet.ParquetFile(path, buffer_size=_BUFFER) as file:
        metadata = file.metadata
        for number in range(metadata.num_row_groups):  # where this raises, RowGroupMetaData.column ends the process
            next(file.iter_batches(1, row_groups=[number]), None)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    counted = sum(group.num_rows for group in groups)
    if counted != metadata.num_rows:
        raise ArtifactError(f"the footer says {metadata.num_rows} rows, but its row groups have {counted}", path)
    for group in groups:
        for number in range(group.num_columns):
            values, repeated = group.column(number).num_values, metadata.schema.column(number).max_repetition_level
            if values < group.num_rows or (values > group.num_rows and not repeated):
                name = metadata.schema.column(number).path
                raise ArtifactError(f"a row group has {group.num_rows} rows, but {values} values of {name}", path)
