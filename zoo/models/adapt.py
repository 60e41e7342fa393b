"""Change a model's configuration or task, keeping its weights. Importing this module imports torch.

Tensors whose shape does not change are copied bit for bit. With another task, those of the head may be added and
dropped; see :meth:`zoo.Config.with_task`. The others are converted by the architecture, whose model class may have the
method ``adapt_tensor`` of :class:`zoo.contract.AdaptsTensors`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zoo import plugins
from zoo.artifact import (
    CARD,
    COMPANIONS,
    TOKENIZER,
    ModelDirectory,
    check_model_target,
    describe,
    new_model,
    write_json,
)
from zoo.artifact.card import model_card
from zoo.artifact.provenance import base_name
from zoo.artifact.weights import load_json
from zoo.errors import UsageError
from zoo.models import persist
from zoo.models.count import parameter_count
from zoo.models.heads import HeadChange, convert
from zoo.models.tensors import stored_tensors
from zoo.registry import ModelSpec

__all__ = ["Adapted", "adapt", "adapt_directory"]

Shape = tuple[int, ...]
_FOLLOWING = {
    "preprocessor_config.json": ("image_size", ("size", "crop_size")),
    "processor_config.json": ("image_size", ("size", "crop_size")),
    "tokenizer_config.json": ("max_seq_len", ("model_max_length",)),
}
"""Companion files, each with a setting and the values in the file that depend on it."""


@dataclass(frozen=True)
class Adapted:
    """The result of adapting a model directory."""

    spec: ModelSpec
    settings: Mapping[str, tuple[Any, Any]]
    """Old and new value of each configuration value that changed."""
    shapes: Mapping[str, tuple[Shape, Shape]]
    """Old and new shape of each converted tensor."""
    head: HeadChange
    """Tensors that were initialised or dropped. All others are copied bit for bit."""


def adapt(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    name: str | None = None,
    task: str | None = None,
    seed: int = 0,
    strict: bool = False,
    force: bool = False,
    **config: Any,
) -> Path:
    """Write a model directory with the weights of ``source`` and a changed configuration.

    If a task is given, tensors of the head may be dropped and initialised, which config.json and the model card record.

    The tokenizer and the companion files of an imported model are copied; image sizes and text lengths in them are
    updated. Exports are not copied, because they belong to the old model.

    Args:
        source: a model directory.
        directory: the target; it must not exist unless ``force``. It may be ``source``.
        name: for config.json and the model card; the directory's name by default.
        task: the task of the new model, which may be the old one's, for instance to change the number of classes.
        seed: for the tensors of a new head.
        strict: refuse to drop and to initialise tensors.
        force: replace an existing model directory, unless it holds files that zoo did not write.
        config: configuration values that replace the model's.

    Raises:
        UsageError: the target exists, a key or value is invalid, or a tensor outside the head would be added, lost, or
            given a shape to which the architecture cannot convert it; all such tensors are listed.
        ArtifactError: ``source`` is not a valid model directory.
        StorageError: the file system refused; the target is unchanged.

    >>> from zoo import create_model, load, save
    >>> model = create_model("vit-tiny")
    >>> larger = load(adapt(save(model, "vit"), "larger", image_size=12))
    >>> larger.config.image_size, larger.embeddings.position.shape
    (12, torch.Size([1, 37, 64]))
    """
    adapt_directory(source, directory, name=name, task=task, seed=seed, strict=strict, values=config, force=force)
    return Path(directory)


def adapt_directory(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    name: str | None = None,
    task: str | None = None,
    seed: int = 0,
    strict: bool = False,
    values: Mapping[str, Any] | None = None,
    settings: Sequence[str] = (),
    force: bool = False,
    progress: persist.Progress | None = None,
) -> Adapted:
    """:func:`adapt` with ``KEY=VALUE`` settings that override ``values``; returns the changes.

    A task in the settings is like ``task``.
    """
    source, target = Path(source), Path(target)
    check_model_target(target, force=force)
    stored = ModelDirectory.open(source, rehash=True)
    old = stored.spec
    with plugins.blame(old.plugin, f"cannot configure {old.name}", fault=UsageError):
        before = old.config.to_dict()
        new_values = {**(values or {}), **type(old.config).parse_settings(settings, "--set")}
        task = task or new_values.get("task")
        if task is not None:
            config = old.config.with_task(task, new_values, source)
        else:
            config = type(old.config).from_dict(before | new_values, source)
    if TOKENIZER in stored.files:
        from zoo.tokenizers.files.load import read_tokenizer
        from zoo.tokenizers.special import check_ids

        check_ids(config, read_tokenizer(stored.file(TOKENIZER)), stored.file(TOKENIZER), new_values)
    spec = replace(old, name=name or base_name(target), config=config)
    changed = {key: (before[key], value) for key, value in config.to_dict().items() if value != before[key]}

    held = stored_tensors(persist.load_directory(stored))[0]
    converted = convert(old, spec, held, dtype=stored.dtype, move=task is not None, seed=seed, where=source)
    if strict:
        converted.head.require_none(source)
    tensors, aliases = stored_tensors(converted.model)

    description = describe(spec, dtype=stored.dtype)
    with new_model(target, description, force=force) as stage:
        digest = persist.write_weights(
            stage, tensors, converted.tensors.__getitem__, aliases=aliases, progress=progress
        )
        for file in stored.files.keys() & {TOKENIZER, *COMPANIONS}:
            shutil.copyfile(source / file, stage / file)
            _follow(stage / file, changed)
        changes = [f"{key} {now!r} instead of {before!r}" for key, (before, now) in changed.items()]
        changes += [f"tensor {key} adapted from {before} to {now}" for key, (before, now) in converted.shapes.items()]
        changes += converted.head.changes()
        origin = stored.origin.derive(
            "adapted",
            source=old.name,
            changes=tuple(changes),
            seed=seed if converted.head.new else None,
            weights=digest,
        )
        description["origin"] = origin.to_dict()
        (stage / CARD).write_text(model_card(spec, stored.dtype, origin, parameter_count(spec)), encoding="utf-8")
    return Adapted(spec, changed, converted.shapes, converted.head)


def _follow(file: Path, changed: Mapping[str, tuple[Any, Any]]) -> None:
    """Update the image sizes or text length in a companion file if the configuration changed them.

    Image sizes are scaled, so that for example the ratio of resizing to 256 pixels and cropping to 224 is kept.
    """
    key, names = _FOLLOWING.get(file.name, ("", ()))
    old, new = changed.get(key, (None, None))
    if not (type(old) is int and type(new) is int):  # a third party's field of this name may have any type
        return
    content = load_json(file)
    inner, followed = content.get("image_processor"), dict[str, Any]()
    if key == "image_size" and isinstance(inner, dict):  # of a processor
        followed = {"image_processor": {**inner, **_scaled(inner, names, old, new)}}
    elif key == "image_size":
        followed = _scaled(content, names, old, new)
    else:
        followed = {name: new for name in names if content.get(name) == old}
    if followed:
        write_json(file, {**content, **followed})


def _scaled(content: Mapping[str, Any], names: Sequence[str], old: int, new: int) -> dict[str, Any]:
    return {name: _scale(content[name], old, new) for name in names if name in content}


def _scale(value: Any, old: int, new: int) -> Any:
    if isinstance(value, dict):
        return {key: _scale(item, old, new) for key, item in value.items()}
    return value * new // old if type(value) is int else value
