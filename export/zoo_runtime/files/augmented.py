"""Files of rows for training: each input's row, followed by one for each variant of its text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from zoo.errors import UsageError
from zoo_runtime.files.row_file import RowFile
from zoo_runtime.running.inputs import Answer

__all__ = ["AugmentedRows"]


class AugmentedRows(RowFile):
    """A file of rows for ``zoo train --data``.

    Args:
        path: as for :class:`RowFile`.
        column: the column of texts, which differs between the rows of an input. The others are the same.
        force: replace an existing file.
        types: pyarrow types of the columns, where known.

    Raises:
        UsageError: the file cannot be written, or already exists.
    """

    def __init__(
        self, path: Path, column: str, *, force: bool = False, types: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        super().__init__(path, force=force, types=types)
        self.column = column
        self.done = dict[str | int, int]()
        self.empty = 0
        """Number of variants left out because they have no text."""

    def missing(self, inputs: Iterable[Answer]) -> Iterator[Answer]:
        """Return all inputs, since the file is always new."""
        return iter(inputs)

    def write(self, id: Any, result: Mapping[str, Any], columns: Mapping[str, Any]) -> None:
        """Add the row of an input and those of its variants."""
        if self.column not in columns:
            raise UsageError("inputs without a text cannot be written as rows", self.path, "give texts, not token ids")
        texts = [variant["text"] for variant in result.get("variants", ())]
        if None in texts:
            raise UsageError("variants have no text without a tokenizer", self.path, "give --tokenizer FILE")
        self.empty += texts.count("")
        for text in (columns[self.column], *filter(None, texts)):
            self.add({**columns, self.column: text})
