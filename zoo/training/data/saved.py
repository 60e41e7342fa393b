"""Data that the datasets library has saved: the directory of a ``Dataset``, or of a ``DatasetDict`` with its splits."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zoo.errors import ArtifactError, MissingPackageError, UsageError, nearest
from zoo.tables import check_names

__all__ = ["is_saved", "read_saved", "saved_split", "saved_splits"]

_BATCH = 1024


def is_saved(path: Path) -> bool:
    """Return whether a directory was written by ``Dataset.save_to_disk``."""
    return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()


def saved_splits(path: Path) -> tuple[str, ...]:
    """Return the names of the splits in a directory that ``DatasetDict.save_to_disk`` wrote; none for others.

    Raises :class:`ArtifactError` if the list of splits is malformed.
    """
    index = path / "dataset_dict.json"
    if not index.is_file():
        return ()
    try:
        return tuple(map(str, json.loads(index.read_text(encoding="utf-8"))["splits"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(f"not the splits of a saved data set ({error})", index) from error


def saved_split(path: Path, split: str) -> Path:
    """Return the directory of a split, or the path itself if it is not a saved ``DatasetDict``.

    Raises :class:`UsageError` if there is no such split.
    """
    splits = saved_splits(path)
    if not splits:
        return path
    if split not in splits:
        raise UsageError(f"{path.name} has no split {split!r}", "data", nearest(split, splits))
    return path / split


def read_saved(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a saved data set. Classes are given by name, images as their files.

    Raises:
        MissingPackageError: the datasets package is not installed.
        ArtifactError: the directory cannot be read.
    """
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        what, remedy = "a saved data set needs the package datasets", "pip install attention-zoo[datasets]"
        raise MissingPackageError(what, path, remedy) from error
    try:
        dataset = datasets.load_from_disk(str(path)).with_format(None)
        check_names(dataset.data.column_names, path)
        for name, feature in dataset.features.items():
            if isinstance(feature, datasets.Image):
                dataset = dataset.cast_column(name, datasets.Image(decode=False))
        named = _class_names(datasets, dataset.features)
        for batch in dataset.iter(_BATCH):
            for values in zip(*batch.values(), strict=True):
                row = dict(zip(batch, values, strict=True))
                yield row | {name: convert(row[name]) for name, convert in named.items() if row[name] is not None}
    except ArtifactError:
        raise
    except Exception as error:  # datasets and pyarrow raise their own classes
        raise ArtifactError(f"not a saved data set ({error})", path) from error


def _class_names(datasets: Any, features: Mapping[str, Any]) -> dict[str, Callable[[Any], Any]]:
    """Return functions from the numbers of classes, or lists of these, to names, for the columns that hold them."""
    converters: dict[str, Callable[[Any], Any]] = {}
    for name, feature in features.items():
        item = getattr(feature, "feature", feature)
        if isinstance(item, datasets.ClassLabel):
            converters[name] = item.int2str
    return converters
