"""Tokenised examples on disk, memory-mapped: integers and floats of any length, by field."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from zoo.arrays import Array
from zoo.errors import ArtifactError

__all__ = ["Blocks", "Example", "Examples", "ExamplesWriter", "StoredExamples"]

Example = Mapping[str, Array]
"""The fields of an example, each an array of one dimension."""
_INDEX = "examples.json"


class Examples(Protocol):
    """A sequence of examples."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...

    @property
    def lengths(self) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """The number of elements in the longest field of each example; None if all are equal."""


class ExamplesWriter:
    """Writes examples to a directory, one at a time, in constant memory. All must have the same fields and dtypes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = ExitStack()
        self._files: dict[str, tuple[Any, Any]] = {}
        self._dtypes: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        self.count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()
        if kind is None:
            index = {"count": self.count, "fields": self._dtypes}
            (self._directory / _INDEX).write_text(json.dumps(index), encoding="utf-8")

    def add(self, example: Example) -> None:
        """Add an example. Raises :class:`ValueError` if its fields are not those of the first example."""
        if not self.count:
            for name, values in example.items():
                self._open(name, values.dtype)
        dtypes = {name: values.dtype.str for name, values in example.items()}
        if dtypes != self._dtypes:
            raise ValueError("has other columns, or another kind of numbers, than the first row")
        for name, values in example.items():
            data, ends = self._files[name]
            data.write(np.ascontiguousarray(values).data)
            self._sizes[name] += len(values)
            ends.write(np.int64(self._sizes[name]).tobytes())
        self.count += 1

    def _open(self, name: str, dtype: np.dtype[Any]) -> None:
        data, ends = (
            self._stack.enter_context((self._directory / f"{name}.{part}").open("wb")) for part in ("values", "ends")
        )
        self._files[name], self._dtypes[name], self._sizes[name] = (data, ends), dtype.str, 0


class StoredExamples:
    """Examples that :class:`ExamplesWriter` wrote. Only the parts in use are read into memory."""

    def __init__(self, directory: Path) -> None:
        try:
            index = json.loads((directory / _INDEX).read_text(encoding="utf-8"))
            self._count: int = index["count"]
            self._fields = {name: self._map(directory, name, dtype) for name, dtype in index["fields"].items()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ArtifactError(f"not a directory of examples ({error})", directory) from error

    def _map(self, directory: Path, name: str, dtype: str) -> tuple[Array, Array]:
        ends = np.memmap(directory / f"{name}.ends", np.int64, "r", shape=(self._count,))
        values = directory / f"{name}.values"
        size = int(ends[-1])
        if values.stat().st_size != size * np.dtype(dtype).itemsize:
            raise ValueError(f"{values.name} is truncated")
        return (np.memmap(values, dtype, "r", shape=(size,)) if size else np.empty(0, dtype)), ends

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Example:
        return {
            name: values[int(ends[index - 1]) if index else 0 : int(ends[index])]
            for name, (values, ends) in self._fields.items()
        }

    @property
    def lengths(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The number of elements in the longest field of each example."""
        return np.max([np.diff(ends, prepend=0) for _, ends in self._fields.values()], axis=0)

    @property
    def fields(self) -> Collection[str]:
        """The names of the fields."""
        return self._fields.keys()

    def stream(self, field: str) -> Array:
        """Return a field of all examples, one after the other."""
        return self._fields[field][0]


class Blocks:
    """A stream of tokens cut into blocks of equal length, each with the token that follows it: (length + 1,)."""

    lengths = None

    def __init__(self, tokens: Array, length: int, *, field: str = "input_ids") -> None:
        self._tokens = tokens
        self._length = length
        self._field = field

    def __len__(self) -> int:
        return max(0, len(self._tokens) - 1) // self._length

    @property
    def rest(self) -> int:
        """Number of tokens after the last block."""
        return max(0, len(self._tokens) - 1) % self._length

    def __getitem__(self, index: int) -> Example:
        start = index * self._length
        return {self._field: self._tokens[start : start + self._length + 1]}
