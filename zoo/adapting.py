"""Models of another configuration from the weights of a model. This module computes: importing it imports torch.

A tensor whose shape stays is kept bit for bit. One whose shape changes becomes what its architecture says: the model
may have a method ::

    def adapt_tensor(self, name: str, tensor: Tensor, old: Config) -> Tensor | None

which is called on a model of the new configuration, without weights (on the meta device), with the name of a stored
tensor, its values in float64 and the configuration that they were made with. It returns the values of the new shape,
or None where it knows of none, or raises :class:`zoo.UsageError` with the reason why there can be none. What it returns
is rounded to the dtype of the weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from zoo import models, plugins
from zoo.artifact import CARD, COMPANIONS, TOKENIZER, ModelDirectory, describe, is_model, new_model, write_json
from zoo.card import model_card, origin_in
from zoo.config import Config
from zoo.errors import UsageError
from zoo.registry import ModelSpec
from zoo.storage import check_target
from zoo.weights import load_json

__all__ = ["Adapted", "adapt", "adapt_directory"]

Shape = tuple[int, ...]
_FOLLOWING = {
    "preprocessor_config.json": ("image_size", ("size", "crop_size")),
    "tokenizer_config.json": ("max_seq_len", ("model_max_length",)),
}
"""Files whose values follow a setting: which one, and which values."""


@dataclass(frozen=True)
class Adapted:
    """A model directory that was made from another one."""

    spec: ModelSpec
    settings: Mapping[str, tuple[Any, Any]]
    """Each value of the configuration that changed: before and now."""
    shapes: Mapping[str, tuple[Shape, Shape]]
    """Each tensor whose shape changed: before and now. All others are the same bits."""


def adapt(
    source: str | Path, directory: str | Path, *, name: str | None = None, force: bool = False, **config: Any
) -> Path:
    """Write a model directory of another configuration with the weights of a model.

    The tokenizer and the files that an imported model brought along stay; sizes of images and lengths of texts in them
    follow the configuration. What was exported does not come along: it is of the old model.

    Args:
        source: a model directory.
        directory: where; it must not exist unless ``force``. It may be ``source``.
        name: for config.json and the model card; the directory's name by default.
        force: replace an existing model directory.
        config: configuration values that replace the model's.

    Raises:
        UsageError: the target exists, a key or value is not understood, or a tensor would be new, lost, or of another
            shape that the architecture cannot give it; all such tensors are listed.
        ArtifactError: ``source`` is not a sound model directory.
        StorageError: the file system refused; what was there before still is.

    >>> from zoo import create_model, load, save
    >>> model = create_model("vit-tiny")
    >>> larger = load(adapt(save(model, "vit"), "larger", image_size=12))
    >>> larger.config.image_size, larger.embeddings.position.shape
    (12, torch.Size([1, 37, 64]))
    """
    adapt_directory(source, directory, name=name, values=config, force=force)
    return Path(directory)


def adapt_directory(
    source: str | Path,
    target: str | Path,
    *,
    name: str | None = None,
    values: Mapping[str, Any] | None = None,
    settings: Sequence[str] = (),
    force: bool = False,
) -> Adapted:
    """:func:`adapt` with ``KEY=VALUE`` settings on top of the values, and what became of it."""
    source, target = Path(source), Path(target)
    check_target(target, force=force, replaceable=is_model)
    stored = ModelDirectory.open(source)
    old = stored.spec
    with plugins.blame(old.plugin, f"cannot configure {old.name}"):
        before = old.config.to_dict()
        cls = type(old.config)
        config = cls.from_dict({**before, **(values or {}), **cls.parse_settings(settings, "--set")}, source)
    spec = ModelSpec(name or target.resolve().name, old.plugin, old.architecture, config, tokenizer=old.tokenizer)
    changed = {key: (before[key], value) for key, value in config.to_dict().items() if value != before[key]}

    held = models.stored_tensors(models.load_directory(stored))[0]
    model = models.build_on_meta(spec, stored.dtype)
    wanted, aliases = models.stored_tensors(model)
    made = _changed_tensors(spec, model, old.config, held, wanted, source)
    shapes = {key: (tuple(held[key].shape), tuple(wanted[key].shape)) for key in made}

    description = describe(spec, dtype=stored.dtype, seed=None)
    with new_model(target, description, force=force) as stage:
        models.write_weights(stage, wanted, {**held, **made}.__getitem__, aliases=aliases)
        for file in stored.files.keys() & {TOKENIZER, *COMPANIONS}:
            shutil.copyfile(source / file, stage / file)
            _follow(stage / file, changed)
        origin = _origin(stored, changed, shapes)
        card = model_card(spec, description, models.count_parameters(model), origin)
        (stage / CARD).write_text(card, encoding="utf-8")
    return Adapted(spec, changed, shapes)


def _changed_tensors(
    spec: ModelSpec,
    model: nn.Module,
    old: Config,
    held: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    where: Path,
) -> dict[str, Tensor]:
    """The tensors whose shape changes, once it is certain that every tensor of the new model can be had."""
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
    """What the architecture makes of a tensor."""
    method = getattr(model, "adapt_tensor", None)
    if method is None:
        return None
    with plugins.blame(spec.plugin, f"cannot adapt {name}"):
        value = method(name, tensor.double() if tensor.is_floating_point() else tensor.clone(), old)
        if not isinstance(value, Tensor | None):
            raise TypeError(f"adapt_tensor returned {type(value).__name__}, not a tensor or None")
    return value


def _follow(file: Path, changed: Mapping[str, tuple[Any, Any]]) -> None:
    """Change what a file says to other libraries of the size of images or the length of texts, where that changed.

    Sizes of images keep their proportion to the model's: what was resized to 256 pixels and cropped to 224 goes on so.
    """
    key, names = _FOLLOWING.get(file.name, ("", ()))
    old, new = changed.get(key, (None, None))
    if not (type(old) is int and type(new) is int):  # a stranger's field of this name may be anything
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


def _origin(
    stored: ModelDirectory, changed: Mapping[str, tuple[Any, Any]], shapes: Mapping[str, tuple[Shape, Shape]]
) -> str:
    """Where the weights come from, for the model card: what was done to them, and what the old card says."""
    parts = [f"{key} {now!r} instead of {before!r}" for key, (before, now) in changed.items()]
    parts += [f"tensor {key} adapted from {before} to {now}" for key, (before, now) in shapes.items()]
    origin = f"those of {stored.spec.name}, with {', '.join(parts) or 'no change'}"
    if CARD not in stored.files:
        return origin
    known = origin_in((stored.path / CARD).read_text(encoding="utf-8", errors="replace"))
    return f"{origin}; there: {known}" if known else origin
