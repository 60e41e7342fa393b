"""Exact search in a parquet file of vectors, such as ``zoo run`` writes for embeddings. N rows of D numbers."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from zoo.arrays import Array
from zoo.artifact import ModelDirectory
from zoo.errors import ArtifactError, UsageError, nearest
from zoo_runtime.files.results import EMBEDDING
from zoo_runtime.files.rows import open_parquet, pyarrow_module

__all__ = ["Match", "check_source", "search_vectors", "source"]

_BATCH = 8192
"""Rows in memory at a time."""


class Match(NamedTuple):
    """A row and its similarity to the query."""

    score: float
    """The cosine of the angle between both vectors; 0 if either is zero."""
    row: int
    """Its place in the file, from 1."""
    columns: dict[str, Any]
    """Its other columns."""


def search_vectors(
    path: str | os.PathLike[str], query: Array, *, top_k: int = 10, column: str = EMBEDDING
) -> list[Match]:
    """Return the rows whose vectors are most similar to a query, best first, earlier rows first among equals.

    Every row is compared, in float64; the file is read in batches of its row groups.

    Args:
        path: a parquet file.
        query: a vector (D,).
        top_k: maximum number of rows.
        column: the column of vectors (N, D), lists of floating-point numbers.

    Raises:
        ArtifactError: the file is missing or damaged, or a row has no vector or one that is not finite.
        UsageError: there is no such column of vectors, or they have another size than the query.
    """
    unit = _units(query[None].astype(np.float64))[0]
    scores, rows = np.empty(0), np.empty(0, np.int64)
    with open_parquet(str(path)) as file:
        _check_column(file.schema_arrow, column, path)
        seen = 0
        for vectors in _vectors(file, column, len(unit), path):
            scores = np.concatenate([scores, _units(vectors) @ unit])
            rows = np.concatenate([rows, np.arange(seen, seen + len(vectors))])
            best = np.lexsort((rows, -scores))[:top_k]
            scores, rows = scores[best], rows[best]
            seen += len(vectors)
        columns = dict(_columns(file, np.sort(rows), column, path))
    if missing := set(rows.tolist()) - columns.keys():
        raise ArtifactError(f"row {min(missing) + 1} has values in {column!r} alone", path)
    return [Match(float(score), row + 1, columns[row]) for score, row in zip(scores, rows.tolist(), strict=True)]


_MODEL = "zoo.model"


def source(stored: ModelDirectory) -> dict[str, str]:
    """Return the metadata of a file of vectors: a digest of the model's weights and configuration."""
    described = json.dumps([stored.config_digest(), stored.weight_digests()], sort_keys=True)
    return {_MODEL: hashlib.sha256(described.encode()).hexdigest()}


def check_source(path: str | os.PathLike[str], stored: ModelDirectory) -> None:
    """Raise :class:`UsageError` if a file says that another model, or other weights, made its vectors."""
    with open_parquet(str(path)) as file:
        made_by = (file.schema_arrow.metadata or {}).get(_MODEL.encode())
    if made_by is not None and made_by.decode(errors="replace") != source(stored)[_MODEL]:
        remedy = "search with the model that made the vectors, or make them again"
        raise UsageError(f"the vectors of {path} were made by another model or other weights", stored.path, remedy)


def _check_column(schema: Any, column: str, path: object) -> None:
    types = pyarrow_module("types")
    if column not in schema.names:
        raise UsageError(f"no column {column!r}", path, nearest(column, schema.names))
    kind = schema.field(column).type
    lists = types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind)
    if not lists or not types.is_floating(kind.value_type):
        raise UsageError(f"column {column!r} has no vectors, but {kind}", path, "name a column of lists of numbers")


def _vectors(file: Any, column: str, size: int, path: object) -> Iterator[Array]:
    """Yield the vectors of each batch, (rows, D) in float64."""
    seen = 0
    for batch in _batches(file, path, columns=[column]):
        lists = batch.column(0)
        if lists.null_count:
            raise ArtifactError(f"row {seen + lists.is_null().index(True).as_py() + 1} has no vector", path)
        sizes = pyarrow_module("compute").list_value_length(lists).to_numpy(zero_copy_only=False)
        if (wrong := np.flatnonzero(sizes != size)).size:
            problem = f"row {seen + wrong[0] + 1} has a vector of {sizes[wrong[0]]} numbers, the query has {size}"
            raise UsageError(problem, path, "search with the model that made the vectors")
        numbers = lists.flatten().to_numpy(zero_copy_only=False).astype(np.float64).reshape(len(lists), size)
        if (wrong := np.flatnonzero(~np.isfinite(numbers).all(-1))).size:
            raise ArtifactError(f"row {seen + wrong[0] + 1} has a vector that is not finite", path)
        yield numbers
        seen += len(lists)
    groups = map(file.metadata.row_group, range(file.num_row_groups))
    stored = sum(
        group.column(number).num_values
        for group in groups
        for number in range(group.num_columns)
        if file.schema.column(number).path.partition(".")[0] == column
    )
    if stored != seen * size:
        raise ArtifactError(f"the footer says {seen} rows, but {stored} numbers in {column!r}", path)


def _columns(file: Any, rows: Array, column: str, path: object) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the other columns of ``rows``, which are in order."""
    others = [name for name in file.schema_arrow.names if name != column]
    start = 0
    for group in range(file.num_row_groups):
        size = file.metadata.row_group(group).num_rows
        here = rows[(rows >= start) & (rows < start + size)]
        if here.size:
            seen = start
            for batch in _batches(file, path, columns=others, row_groups=[group]):
                inside = here[(here >= seen) & (here < seen + len(batch))]
                values = batch.take(pyarrow_module("lib").array(inside - seen)).to_pylist()
                yield from zip(inside.tolist(), values if others else [{}] * len(inside), strict=True)
                seen += len(batch)
        start += size


def _batches(file: Any, path: object, **options: Any) -> Iterator[Any]:
    try:
        yield from file.iter_batches(_BATCH, **options)
    except Exception as error:  # pyarrow raises its own classes
        raise ArtifactError(f"cannot be read ({error})", path) from error


def _units(vectors: Array) -> Array:
    """Scale vectors (rows, D) to unit length; zero stays zero."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    units: Array = vectors / np.where(lengths > 0, lengths, 1)
    return units
