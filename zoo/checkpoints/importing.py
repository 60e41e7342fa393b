"""Foreign checkpoints become models of ours, tensor for tensor or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo import models, plugins
from zoo.artifact import CARD, COMPANIONS, GENERATION, TOKENIZER, describe, new_model, write_json
from zoo.card import model_card
from zoo.checkpoints.common import generation_config, read_common
from zoo.checkpoints.layout import Layout, Origin
from zoo.checkpoints.original import Comparison, compare
from zoo.checkpoints.source import Checkpoint
from zoo.config import Config
from zoo.errors import ArtifactError, PluginError, UsageError
from zoo.plugins import Plugin
from zoo.registry import ModelSpec, config_class, load_reference
from zoo.tokenizer import find_tokenizer, write_tokenizer
from zoo.weights import DTYPES

__all__ = ["Imported", "TensorReader", "find_layout", "import_checkpoint", "read_configuration"]

_PART = 1 << 22
"""Elements that are looked at together: what is computed of a whole tensor takes as much memory again."""


@dataclass(frozen=True)
class Imported:
    """A model directory that was made from a checkpoint."""

    spec: ModelSpec
    comparison: Comparison
    """With the original implementation, or why there is none."""


def import_checkpoint(
    source: Path,
    target: Path,
    *,
    name: str | None = None,
    kind: str | None = None,
    dtype: str | None = None,
    settings: Sequence[str] = (),
    allow_missing: Sequence[str] = (),
    allow_keys: Sequence[str] = (),
    verify: bool | None = None,
    force: bool = False,
) -> Imported:
    """Read a checkpoint and write a model directory.

    Tensors are read and written one at a time.

    Args:
        source: a directory in the hub's layout, or a file of tensors.
        target: the model directory to make.
        name: what the model card calls the source; by default what its path ends with.
        kind: the importer; by default what config.json calls ``model_type``.
        dtype: convert the weights; by default they keep their own.
        settings: ``KEY=VALUE`` of our configuration, for what the checkpoint does not say.
        allow_missing: patterns of tensors, by their names or ours, that may be missing; they are initialised.
        allow_keys: patterns of keys of config.json that are passed over though nothing is known of them.
        verify: compare outputs with those of the original implementation; by default where that is installed.
        force: replace an existing model directory.

    Raises:
        UsageError: no importer for this kind, or a configuration value that is not understood.
        ArtifactError: a file is missing or unsound, or tensors are missing, unexpected or misshapen; all are listed.
        ParityError: the model's outputs are not those of the original implementation.
    """
    checkpoint = Checkpoint.open(source)
    plugin, becomes, layout = find_layout(kind or checkpoint.kind, checkpoint.config_file)
    owner, architecture = plugins.active().architecture(becomes)
    cls = config_class(owner, architecture)
    chosen = cls.parse_settings(settings, "--set")
    with plugins.blame(plugin, f"cannot import {source.name}"):
        config = read_configuration(layout, checkpoint, cls, chosen=chosen, allow_keys=allow_keys)
    tokenizer = find_tokenizer(checkpoint.path) if checkpoint.config else None
    spec = ModelSpec(target.name, owner, architecture, config, tokenizer="file" if tokenizer else None)
    model = models.build_on_meta(spec, dtype or _dtype(checkpoint))
    read = TensorReader(spec, model, layout, checkpoint, allow_missing)
    description = describe(spec, dtype=str(read.dtype).removeprefix("torch."), seed=None)
    with new_model(target, description, force=force) as stage:
        tensors, aliases = models.stored_tensors(model)
        models.write_weights(stage, tensors, read, aliases=aliases)
        if tokenizer is not None:
            write_tokenizer(tokenizer, stage / TOKENIZER, getattr(config, "vocab_size", None))
        for companion in COMPANIONS:
            if checkpoint.json(companion):
                (stage / companion).write_bytes((checkpoint.path / companion).read_bytes())
        if generation := generation_config(checkpoint, config):
            write_json(stage / GENERATION, generation)
        missing = f"{len(read.initialised)} tensors were missing and initialised" if read.initialised else None
        comparison = compare(stage, spec, model, checkpoint, layout, wanted=verify, hindrance=missing)
        origin = f"imported from {name or source.resolve().name}, {comparison}"
        card = model_card(spec, description, models.count_parameters(model), origin)
        (stage / CARD).write_text(card, encoding="utf-8")
    return Imported(spec, comparison)


def find_layout(kind: str | None, where: object) -> tuple[Plugin, str, Layout]:
    """The plugin that reads checkpoints of a kind, the architecture that they become, and how they are laid out."""
    plugin, importer = plugins.active().importer(kind, where)
    layout = load_reference(importer.layout, plugin)
    if not isinstance(layout, Layout):
        raise PluginError(f"{plugin}: {importer.layout} is not a zoo.checkpoints.Layout")
    return plugin, importer.architecture, layout


def read_configuration(
    layout: Layout,
    checkpoint: Checkpoint,
    cls: type[Config],
    *,
    chosen: Mapping[str, Any] | None = None,
    allow_keys: Sequence[str] = (),
) -> Config:
    """Our configuration of a checkpoint; ``chosen`` are values that people gave."""
    known = {**read_common(checkpoint, cls), **(chosen or {})}
    return cls.from_dict(layout.read_config(checkpoint, allowed=allow_keys, chosen=known), checkpoint.config_file)


class TensorReader:
    """The checkpoint's tensors by our names, once it is certain that they are exactly the model's.

    Args:
        spec: the model.
        model: on the meta device.
        layout: how the checkpoint is laid out.
        checkpoint: where from.
        allow_missing: patterns of tensors, by either name, that are initialised where they are missing.

    Raises:
        ArtifactError: tensors that are missing, unexpected, misshapen, or differ where they should be one.
    """

    def __init__(
        self,
        spec: ModelSpec,
        model: nn.Module,
        layout: Layout,
        checkpoint: Checkpoint,
        allow_missing: Sequence[str] = (),
    ) -> None:
        self.spec, self.checkpoint = spec, checkpoint
        self.groups = models.tensor_groups(model)
        self.like = {alias: tensor for tensor, aliases in self.groups.values() for alias in aliases}
        self.dtype = next(model.parameters()).dtype
        self.sources: dict[str, tuple[str, Origin]] = {}
        """For each of our tensors, a name in the checkpoint and what lies there."""
        self._last: tuple[str, Mapping[str, Tensor]] = ("", {})
        origins = layout.origins(self.like, spec.config)
        expected = {origin.name for found in origins.values() for origin in found}
        matched = layout.match(checkpoint.tensors, expected, spec.config)
        files = {name: file for file, name in matched.items()}
        problems = [f"unexpected {file}" for file, name in matched.items() if name not in expected]
        problems += [f"{file} is there as {files[name]} too" for file, name in matched.items() if files[name] != file]
        missing = []
        for ours, (_, aliases) in self.groups.items():
            candidates = [origin for alias in aliases for origin in origins.get(alias, [])]
            if not candidates:
                raise PluginError(f"the layout of {checkpoint.kind} checkpoints says nothing of {ours}")
            present = [(files[origin.name], origin) for origin in candidates if origin.name in files]
            if present:
                self.sources[ours] = present[0]
                problems += self._compare(present)
                continue
            theirs = layout.written_name(candidates[0].name, spec.config)
            if not any(fnmatchcase(name, pattern) for name in (ours, theirs) for pattern in allow_missing):
                missing.append(f"missing {theirs}")
        problems = [*dict.fromkeys(missing), *problems]
        if problems:
            what = f"the weights do not fit the configuration ({'; '.join(problems)})"
            raise ArtifactError(what, checkpoint.where)
        absent = [name for name in self.groups if name not in self.sources]
        made = models.stored_tensors(models.build(spec, seed=0, dtype="float32"))[0] if absent else {}
        self.initialised = {name: made[name] for name in absent}

    def _compare(self, present: Sequence[tuple[str, Origin]]) -> list[str]:
        """What is wrong with the places where one of our tensors lies."""
        problems = []
        for file, origin in present:
            shape = self.checkpoint.tensors[file].shape
            wanted = origin.rule.shape([tuple(self.like[name].shape) for name in origin.group])
            if shape != wanted:
                problems.append(f"{file} has shape {shape}, the configuration says {wanted}")
        if problems or len(present) == 1:
            return problems
        (first, origin), *others = present
        value = self._ours(first, origin)
        return [
            f"{file} differs from {first}, the tensor it should share"
            for file, other in others
            if file != first and not all(map(torch.equal, value, self._ours(file, other)))
        ]

    def _ours(self, file: str, origin: Origin) -> list[Tensor]:
        sizes = [self.like[name].shape[0] for name in origin.group] if len(origin.group) > 1 else [1]
        return origin.rule.to_ours(self.checkpoint.tensors[file].read(), sizes)

    def __call__(self, name: str) -> Tensor:
        """The values of one of our tensors, in the model's dtype."""
        if name in self.initialised:
            return self.initialised[name].to(self.dtype)
        file, origin = self.sources[name]
        if self._last[0] != file:
            self._last = ("", {})  # leaves memory before the next enters
            self._last = (file, dict(zip(origin.group, self._ours(file, origin), strict=True)))
        mine = next(alias for alias in self.groups[name][1] if alias in self._last[1])
        value = self._last[1][mine].to(self.groups[name][0].dtype)
        if value.is_floating_point() and not all(part.isfinite().all() for part in value.reshape(-1).split(_PART)):
            raise ArtifactError(f"{file} has values that are no finite numbers of {value.dtype}", self.checkpoint.where)
        return value


def _dtype(checkpoint: Checkpoint) -> str:
    dtypes = {tensor.dtype for tensor in checkpoint.tensors.values() if tensor.dtype.is_floating_point}
    names = {str(dtype).removeprefix("torch.") for dtype in dtypes}
    if len(names) != 1 or not names <= set(DTYPES):
        raise UsageError(f"the weights are {', '.join(sorted(names))}", checkpoint.where, "choose one with --dtype")
    return names.pop()
