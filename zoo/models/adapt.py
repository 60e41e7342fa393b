"""Change a model's configuration, keeping its weights. Importing this module imports torch.

Tensors whose shape does not change are copied bit for bit. The others are converted by the architecture, whose model
class may have a method ::

    def adapt_tensor(self, name: str, tensor: Tensor, old: Config) -> Tensor | None

It is called on a model of the new configuration without weights (on the meta device), with the name of a stored
tensor, its values in float64 and the old configuration. It returns values of the new shape, or None if it has no rule
for the tensor, or raises :class:`zoo.UsageError` with the reason why the tensor cannot be converted. The values are
rounded to the dtype of the weights.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

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
from zoo.config import Config
from zoo.errors import UsageError
from zoo.models import create, persist
from zoo.models.count import parameter_count
from zoo.models.tensors import stored_tensors
from zoo.registry import ModelSpec

__all__ = ["Adapted", "adapt", "adapt_directory"]

Shape = tuple[int, ...]
_FOLLOWING = {
    "preprocessor_config.json": ("image_size", ("size", "crop_size")),
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
    """Old and new shape of each converted tensor. All others are copied bit for bit."""


def adapt(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    name: str | None = None,
    force: bool = False,
    **config: Any,
) -> Path:
    """Write a model directory with the weights of ``source`` and a changed configuration.

    The tokenizer and the companion files of an imported model are copied; image sizes and text lengths in them are
    updated. Exports are not copied, because they belong to the old model.

    Args:
        source: a model directory.
        directory: the target; it must not exist unless ``force``. It may be ``source``.
        name: for config.json and the model card; the directory's name by default.
        force: replace an existing model directory, unless it holds files that zoo did not write.
        config: configuration values that replace the model's.

    Raises:
        UsageError: the target exists, a key or value is invalid, or a tensor would be added, lost, or given a shape to
            which the architecture cannot convert it; all such tensors are listed.
        ArtifactError: ``source`` is not a valid model directory.
        StorageError: the file system refused; the target is unchanged.

    >>> from zoo import create_model, load, save
    >>> model = create_model("vit-tiny")
    >>> larger = load(adapt(save(model, "vit"), "larger", image_size=12))
    >>> larger.config.image_size, larger.embeddings.position.shape
    (12, torch.Size([1, 37, 64]))
    """
    adapt_directory(source, directory, name=name, values=config, force=force)
    return Path(directory)


def adapt_directory(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    name: str | None = None,
    values: Mapping[str, Any] | None = None,
    settings: Sequence[str] = (),
    force: bool = False,
    progress: persist.Progress | None = None,
) -> Adapted:
    """:func:`adapt` with ``KEY=VALUE`` settings that override ``values``; returns the changes."""
    source, target = Path(source), Path(target)
    check_model_target(target, force=force)
    stored = ModelDirectory.open(source, rehash=True)
    old = stored.spec
    with plugins.blame(old.plugin, f"cannot configure {old.name}"):
        before = old.config.to_dict()
        cls = type(old.config)
        config = cls.from_dict({**before, **(values or {}), **cls.parse_settings(settings, "--set")}, source)
    spec = replace(old, name=name or base_name(target), config=config)
    changed = {key: (before[key], value) for key, value in config.to_dict().items() if value != before[key]}

    held = stored_tensors(persist.load_directory(stored))[0]
    model = create.build_on_meta(spec, stored.dtype)
    wanted, aliases = stored_tensors(model)
    made = _changed_tensors(spec, model, old.config, held, wanted, source)
    shapes = {key: (tuple(held[key].shape), tuple(wanted[key].shape)) for key in made}

    description = describe(spec, dtype=stored.dtype)
    with new_model(target, description, force=force) as stage:
        digest = persist.write_weights(stage, wanted, {**held, **made}.__getitem__, aliases=aliases, progress=progress)
        for file in stored.files.keys() & {TOKENIZER, *COMPANIONS}:
            shutil.copyfile(source / file, stage / file)
            _follow(stage / file, changed)
        changes = [f"{key} {now!r} instead of {before!r}" for key, (before, now) in changed.items()]
        changes += [f"tensor {key} adapted from {before} to {now}" for key, (before, now) in shapes.items()]
        origin = stored.origin.derive("adapted", source=old.name, changes=tuple(changes), weights=digest)
        description["origin"] = origin.to_dict()
        (stage / CARD).write_text(model_card(spec, stored.dtype, origin, parameter_count(spec)), encoding="utf-8")
    return Adapted(spec, changed, shapes)


def _changed_tensors(
    spec: ModelSpec,
    model: nn.Module,
    old: Config,
    held: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    where: Path,
) -> dict[str, Tensor]:
    """Convert the tensors whose shape changes; raise unless every tensor of the new model is available."""
    made: dict[str, Tensor] = {}
    problems = [f"{name} would be lost" for name in held if name not in wanted]
    problems += [f"{name} would be new" for name in wanted if name not in held]
    for name, like in wanted.items():
        if name not in held or held[name].shape == like.shape:
            continue
        reason = ""
        try:
            value = _adapt_tensor(spec, model, name, held[name].detach(), old)
        except UsageError as error:
            value, reason = None, f" ({error})"
        if value is not None and value.shape == like.shape:
            made[name] = value.to(like.dtype)
        else:
            problems.append(f"{name} has shape {tuple(held[name].shape)}, not {tuple(like.shape)}{reason}")
    if problems:
        raise UsageError(f"the weights do not fit these settings: {'; '.join(problems)}", where)
    return made


def _adapt_tensor(spec: ModelSpec, model: nn.Module, name: str, tensor: Tensor, old: Config) -> Tensor | None:
    """Convert a tensor by the architecture's rule; None if it has none."""
    method = getattr(model, "adapt_tensor", None)
    if method is None:
        return None
    with plugins.blame(spec.plugin, f"cannot adapt {name}"):
        value = method(name, tensor.double() if tensor.is_floating_point() else tensor.clone(), old)
        if not isinstance(value, Tensor | None):
            raise TypeError(f"adapt_tensor returned {type(value).__name__}, not a tensor or None")
    return value


def _follow(file: Path, changed: Mapping[str, tuple[Any, Any]]) -> None:
    """Update the image sizes or text length in a companion file if the configuration changed them.

    Image sizes are scaled, so that for example the ratio of resizing to 256 pixels and cropping to 224 is kept.
    """
    key, names = _FOLLOWING.get(file.name, ("", ()))
    old, new = changed.get(key, (None, None))
    if not (type(old) is int and type(new) is int):  # a third party's field of this name may have any type
        return
    content = load_json(file)
    if key == "image_size":
        followed = {name: _scale(content[name], old, new) for name in names if name in content}
    else:
        followed = {name: new for name in names if content.get(name) == old}
    if followed:
        write_json(file, {**content, **followed})


def _scale(value: Any, old: int, new: int) -> Any:
    if isinstance(value, dict):
        return {key: _scale(item, old, new) for key, item in value.items()}
    return value * new // old if type(value) is int else value
