"""Tables in text files: comma- and tab-separated values."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zoo.errors import ArtifactError

__all__ = ["TABLES", "read_table"]

TABLES = {".csv": ",", ".tsv": "\t"}
"""Suffixes of files, and the separators of their values."""


def read_table(path: Path) -> Iterator[dict[str, Any] | str]:
    """Yield the rows of a CSV file with a header, or what is wrong with them."""
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
