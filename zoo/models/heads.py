"""Models for another task or with another head: the trunk is kept bit for bit. Importing this module imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from zoo import plugins
from zoo.artifact.provenance import fold_names
from zoo.config import Config
from zoo.contract import AdaptsTensors
from zoo.errors import UsageError, Wording, argument
from zoo.models import create, persist
from zoo.models.attachments import attach, attachments
from zoo.models.tensors import stored_tensors
from zoo.registry import ModelSpec

__all__ = ["Converted", "HeadChange", "Retasked", "convert", "retask"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class HeadChange:
    """Tensors that were replaced when a model got another head."""

    new: tuple[str, ...] = ()
    """Initialised tensors, by zoo's names."""
    dropped: tuple[str, ...] = ()
    """Tensors that were left out, by their names in the source; ``*`` stands for a whole part of it."""

    def changes(self) -> tuple[str, ...]:
        """Describe the replaced tensors for the record of the weights' origin."""
        new, dropped = fold_names(self.new), fold_names(self.dropped)
        return (*(f"fresh {name}" for name in new), *(f"without {name}" for name in dropped))

    def require_none(self, where: object) -> None:
        """Raise :class:`UsageError`, which lists all replaced tensors, if there are any."""
        parts = [("would be new", self.new), ("would be dropped", self.dropped)]
        problems = "; ".join(f"{', '.join(fold_names(names))} {what}" for what, names in parts if names)
        if problems:
            raise UsageError(problems, where, argument("strict", text="leave out {} to accept this"))


@dataclass(frozen=True)
class Converted:
    """The weights of a model after a change of its configuration."""

    model: nn.Module
    """On the meta device."""
    tensors: Mapping[str, Tensor]
    """The values of every stored tensor."""
    shapes: Mapping[str, tuple[Shape, Shape]]
    """Old and new shape of each tensor that the architecture converted."""
    head: HeadChange


def convert(
    old: ModelSpec, new: ModelSpec, held: Mapping[str, Tensor], *, dtype: str, move: bool, seed: int, where: object
) -> Converted:
    """Fit stored tensors to a changed configuration.

    Tensors whose name and shape do not change are kept. Others of the trunk are converted by the architecture's
    ``adapt_tensor``. If ``move``, fields of the head may add, drop and reshape tensors; new ones are initialised.

    Args:
        old: the model that holds the tensors.
        new: the model to fit them to.
        held: the stored tensors.
        dtype: their dtype.
        move: whether the head may be replaced.
        seed: for the new tensors.
        where: the source, for errors.

    Raises:
        UsageError: a tensor of the trunk would be added, lost or given a shape to which the architecture cannot convert
            it; all such tensors are listed.
    """
    model = create.build_on_meta(new, dtype)
    required = stored_tensors(model)[0]
    trunk = replace(new, config=_with_head_of(new.config, old.config)) if move else new
    same_head = create.build_on_meta(trunk, dtype) if move else model
    expected = stored_tensors(same_head)[0]
    before = old.config.to_dict()
    changed = {key for key, value in new.config.to_dict().items() if value != before[key]}
    only_head = not move and changed <= {*new.config.head_fields}
    remedy = argument("task", text="pass {} to replace the head") if only_head else None
    converted = _convert_trunk(trunk, same_head, old.config, held, expected, where, remedy)
    values = {**held, **converted}
    replaced = new.config.replaced_modules if new.config.task != old.config.task else ()
    tensors = {
        name: values[name]
        for name, like in required.items()
        if name in expected and expected[name].shape == like.shape and name.partition(".")[0] not in replaced
    }
    fresh = tuple(name for name in required if name not in tensors)
    if fresh:
        built = stored_tensors(create.build(new, seed=seed, dtype=dtype))[0]
        tensors |= {name: built[name] for name in fresh}
    dropped = tuple(name for name in expected if name not in required or name in fresh)
    shapes = {name: (tuple(held[name].shape), tuple(value.shape)) for name, value in converted.items()}
    return Converted(model, tensors, shapes, HeadChange(fresh, dropped))


def _with_head_of(config: Config, other: Config) -> Config:
    """Return a configuration with the head of another one."""
    values, head = config.to_dict(), other.to_dict()
    return type(config).from_dict(values | {key: head[key] for key in config.head_fields if key in head})


def _convert_trunk(
    spec: ModelSpec,
    model: nn.Module,
    old: Config,
    held: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    where: object,
    remedy: Wording | None,
) -> dict[str, Tensor]:
    """Convert the tensors whose shape changes; raise unless every tensor of the model is available."""
    converted: dict[str, Tensor] = {}
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
            converted[name] = value.to(like.dtype)
        else:
            problems.append(f"{name} has shape {tuple(held[name].shape)}, not {tuple(like.shape)}{reason}")
    if problems:
        raise UsageError(f"the weights do not fit these settings: {'; '.join(problems)}", where, remedy)
    return converted


def _adapt_tensor(spec: ModelSpec, model: nn.Module, name: str, tensor: Tensor, old: Config) -> Tensor | None:
    """Convert a tensor by the architecture's rule; None if it has none."""
    if not isinstance(model, AdaptsTensors):
        return None
    with plugins.blame(spec.plugin, f"cannot adapt {name}"):
        value = model.adapt_tensor(name, tensor.double() if tensor.is_floating_point() else tensor.clone(), old)
        if not isinstance(value, Tensor | None):
            raise TypeError(f"adapt_tensor returned {type(value).__name__}, not a tensor or None")
    return value


@dataclass(frozen=True)
class Retasked:
    """A model for another task."""

    spec: ModelSpec
    model: nn.Module
    head: HeadChange


def retask(spec: ModelSpec, model: nn.Module, values: Mapping[str, Any], seed: int) -> Retasked:
    """Return a model with changed configuration values, which shares the tensors that it keeps with the old one.

    Raises :class:`UsageError` for an unknown value, or as :func:`convert`.
    """
    with plugins.blame(spec.plugin, f"cannot configure {spec.name}", fault=UsageError):
        config = spec.config.with_task(str(values.get("task", spec.task)), values, spec.name)
    if config == spec.config:
        return Retasked(spec, model, HeadChange())
    new = replace(spec, config=config)
    held = stored_tensors(model)[0]
    real = next(model.parameters()).dtype
    dtype = "float32" if real == torch.float64 else persist.common_dtype(model)  # no model is built in float64
    converted = convert(spec, new, held, dtype=dtype, move=True, seed=seed, where=spec.name)
    tensors = {name: item.to(real) if item.is_floating_point() else item for name, item in converted.tensors.items()}
    persist.fill(converted.model, tensors.items())
    return Retasked(new, attach(converted.model, attachments(model)), converted.head)
