"""Merging of low-rank adapters into the weights of their model. Importing this module imports torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from zoo.artifact import ADAPTER, MANIFEST, ModelDirectory, check_model_target
from zoo.artifact.provenance import Origin, base_name, fold_names
from zoo.artifact.weights import digest_layout
from zoo.checkpoints.configuration import find_layout
from zoo.checkpoints.exporting import layout_names
from zoo.checkpoints.peft import AdapterChanges, AdapterNames
from zoo.checkpoints.peft_reading import read_adapter
from zoo.errors import ArtifactError, UsageError
from zoo.models import persist
from zoo.models.attachments import attach
from zoo.models.heads import retask
from zoo.models.tensors import other_owners
from zoo.registry import ModelSpec
from zoo.registry.nearby import no_directory

__all__ = ["Found", "Merged", "merge", "merge_adapter", "merge_directory", "read_changes"]


@dataclass(frozen=True)
class Found:
    """An adapter that was read for a model."""

    spec: ModelSpec
    """The adapted model, which may have another task than the model of the directory."""
    model: nn.Module
    """The module of ``spec`` with the weights of the directory, without the adapter."""
    changes: AdapterChanges
    own: ModelDirectory | None
    """The directory of an adapter that zoo wrote; None for one of PEFT."""


@dataclass(frozen=True)
class Merged:
    """A model with merged adapters."""

    spec: ModelSpec
    model: nn.Module
    origin: Origin
    updated: tuple[str, ...]
    """Weights to which an update was added."""
    replaced: tuple[str, ...]
    """Tensors that the adapter holds whole."""
    equal: tuple[str, ...] = ()
    """Tensors that the adapter holds as they are in the model."""


def merge_adapter(
    base: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    force: bool = False,
) -> Path:
    """Write a model directory with the weights of another one, to which the updates of low-rank adapters are added.

    Args:
        base: the directory of the model that the adapters belong to.
        adapter: a directory that :func:`train` or the PEFT library wrote.
        directory: the target; it must not exist unless ``force``. It may be ``base``.
        force: replace an existing model directory, unless it holds files that zoo did not write.

    Raises:
        UsageError: the target exists, or the adapters are of a kind that zoo does not read.
        ArtifactError: a directory is invalid, or the adapters are those of another model.
        StorageError: the file system refused; the target is unchanged.
    """
    merge_directory(Path(base), Path(adapter), Path(directory), force=force)
    return Path(directory)


def merge_directory(
    base: Path, adapter: Path, target: Path, *, force: bool = False, progress: persist.Progress | None = None
) -> Merged:
    """:func:`merge_adapter`, and return what was merged."""
    check_model_target(target, force=force)
    stored = ModelDirectory.open(base, rehash=True)
    merged = merge(stored, persist.load_directory(stored), adapter)
    spec = replace(merged.spec, name=base_name(target))
    persist.save_spec(spec, merged.model, target, force=force, origin=merged.origin, progress=progress)
    return replace(merged, spec=spec)


def merge(stored: ModelDirectory, model: nn.Module, adapter: Path) -> Merged:
    """Merge an adapter that zoo or PEFT wrote into the loaded model of a directory, which may be changed in place.

    Sums are computed in float64 and rounded to the dtype of the model. An adapter that zoo wrote must have been trained
    on the same weights; PEFT records no digest of them, so there only names and shapes are compared.

    Raises :class:`ArtifactError` or :class:`UsageError` as :func:`merge_adapter`.
    """
    read = read_changes(stored, model, adapter)
    changes, own = read.changes, read.own
    _apply(read.model, changes, adapter)
    updated, replaced = tuple(changes.updates), tuple(changes.whole)
    if own is None:
        done = [f"adapter {base_name(adapter)} merged"]
        if changes.equal:
            done.append(f"its copy of {', '.join(fold_names(changes.equal))} left out, equal to the model's")
        origin = stored.origin.derive("adapted", source=stored.spec.name, changes=tuple(done))
        return Merged(stored.spec, model, origin, updated, replaced, changes.equal)
    attach(read.model, persist.read_companions(own))
    origin = replace(own.origin, changes=(*own.origin.changes, "low-rank adapters merged"))
    spec = replace(read.spec, description=own.spec.description, tokenizer=own.spec.tokenizer)
    return Merged(spec, read.model, origin, updated, replaced, changes.equal)


def read_changes(stored: ModelDirectory, model: nn.Module, adapter: Path) -> Found:
    """Read an adapter that zoo or PEFT wrote for the loaded model of a directory, which is not changed.

    Raises :class:`ArtifactError` or :class:`UsageError` as :func:`merge_adapter`.
    """
    if not adapter.is_dir():
        raise no_directory(adapter)
    if (adapter / MANIFEST).exists():
        return _read_own(stored, model, ModelDirectory.open(adapter, weights=False))
    return Found(stored.spec, model, _read_foreign(stored, model, adapter), None)


def _read_own(stored: ModelDirectory, model: nn.Module, adapter: ModelDirectory) -> Found:
    """Read an adapter that zoo wrote."""
    record = adapter.description.get("adapter")
    if ADAPTER not in adapter.files or not isinstance(record, dict):
        raise ArtifactError("holds a model, not an adapter", adapter.path)
    if record.get("weights") != digest_layout(stored.path, stored.layout):
        what = f"the adapter was trained on other weights, those of {record.get('base')}"
        raise ArtifactError(what, adapter.path, f"give their model instead of {stored.path}")
    retasked = retask(stored.spec, model, adapter.spec.config.to_dict(), 0)
    changes = read_adapter(adapter.path, _names(record.get("layout"), retasked.spec, retasked.model, adapter.path))
    missing = ", ".join(sorted(set(retasked.head.new) - {*changes.whole, *changes.equal}))
    if missing:
        raise ArtifactError(f"lacks {missing}", adapter.path)
    return Found(retasked.spec, retasked.model, changes, adapter)


def _names(layout: Any, spec: ModelSpec, model: nn.Module, where: Path) -> AdapterNames:
    """Return the names of a hub layout; without one, zoo's own."""
    return AdapterNames(model, spec.config, None if layout is None else find_layout(layout, where)[2])


def _read_foreign(stored: ModelDirectory, model: nn.Module, adapter: Path) -> AdapterChanges:
    """Read an adapter with the names of any layout that becomes this architecture, or with zoo's own."""
    layouts: Sequence[str | None] = (*layout_names(stored), None)
    errors = []
    for layout in layouts:
        try:
            return read_adapter(adapter, _names(layout, stored.spec, model, adapter))
        except ArtifactError as error:
            errors.append(error)
    raise errors[0]


def _apply(model: nn.Module, changes: AdapterChanges, where: Path) -> None:
    """Change the weights of a model.

    Raises :class:`UsageError` if another layer shares one of them and the adapter does not change it there too.
    """
    for name in (*changes.updates, *changes.whole):
        others = other_owners(model, name)
        if others and name not in changes.shared:
            raise UsageError(f"{name} is also {others[0]}, so the adapter cannot be merged into it", where)
    for name, update in changes.updates.items():
        parameter = model.get_parameter(name)
        parameter.data = update.added_to(parameter.data)
    for name, value in changes.whole.items():
        parameter = model.get_parameter(name)
        parameter.data = value.to(parameter.dtype, copy=True)
