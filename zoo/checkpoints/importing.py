"""Import of foreign checkpoints. Every tensor must be accounted for, or nothing is written."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo import plugins
from zoo.artifact import CARD, COMPANIONS, GENERATION, TOKENIZER, describe, new_model, write_json
from zoo.artifact.card import model_card
from zoo.artifact.provenance import Origin, base_name
from zoo.artifact.weights import DTYPES, dtype_name
from zoo.checkpoints.common import generation_config, read_common
from zoo.checkpoints.layout import Layout, Place
from zoo.checkpoints.original import Comparison, compare
from zoo.checkpoints.source import Checkpoint
from zoo.classes import ClassifierConfig
from zoo.config import Config
from zoo.errors import ArtifactError, PluginError, UsageError, Wording, argument
from zoo.models import create, persist
from zoo.models.count import parameter_count
from zoo.models.tensors import stored_tensors, tensor_groups
from zoo.plugins import Plugin
from zoo.registry import ModelSpec, config_class, load_reference
from zoo.tokenizers.load import find_tokenizer, write_tokenizer

__all__ = ["Imported", "TensorReader", "find_layout", "import_checkpoint", "read_configuration"]

_PART = 1 << 22
"""Elements checked at a time, to avoid temporaries as large as the tensor."""


@dataclass(frozen=True)
class Imported:
    """The result of importing a checkpoint."""

    spec: ModelSpec
    comparison: Comparison
    """Comparison with the original implementation, or why there is none."""


def import_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    name: str | None = None,
    revision: str | None = None,
    model_type: str | None = None,
    dtype: str | torch.dtype | None = None,
    settings: Sequence[str] = (),
    allow_missing: Sequence[str] = (),
    allow_keys: Sequence[str] = (),
    verify: bool | None = None,
    force: bool = False,
    progress: persist.Progress | None = None,
) -> Imported:
    """Read a checkpoint and write a model directory.

    Tensors are read and written one at a time.

    Args:
        source: a directory in the hub's layout, or a file of tensors.
        target: the model directory to create.
        name: hub id of the source, recorded as its origin; by default the last part of its path.
        revision: commit of the hub id.
        model_type: the importer; by default ``model_type`` of config.json.
        dtype: convert the weights to this dtype; by default their dtype is kept.
        settings: ``KEY=VALUE`` of zoo's configuration, for values that the checkpoint lacks.
        allow_missing: initialise missing tensors whose name, in the checkpoint or in zoo, matches these patterns.
        allow_keys: ignore unknown keys of config.json that match these patterns.
        verify: compare outputs with those of the original implementation; by default if that is installed.
        force: replace an existing model directory.
        progress: called with the number of weight bytes written so far and in total.

    Raises:
        UsageError: there is no importer for this model type, or a configuration value is not understood.
        ArtifactError: a file is missing or invalid, or tensors are missing, unexpected or of the wrong shape; all such
            tensors are listed.
        ParityError: the outputs differ from those of the original implementation.
    """
    source, target = Path(source), Path(target)
    checkpoint = Checkpoint.open(source)
    model_type = model_type or checkpoint.model_type
    plugin, becomes, layout = find_layout(model_type, checkpoint.config_file)
    owner, architecture = plugins.active().architecture(becomes)
    cls = config_class(owner, architecture)
    chosen = cls.parse_settings(settings, "--set")
    with plugins.blame(plugin, f"cannot import {source.name}"):
        config = read_configuration(layout, checkpoint, cls, chosen=chosen, allow_keys=allow_keys)
    tokenizer = find_tokenizer(checkpoint.path) if checkpoint.config else None
    spec = ModelSpec(base_name(target), owner, architecture, config, tokenizer="file" if tokenizer else None)
    model = create.build_on_meta(spec, dtype or _dtype(checkpoint))
    read = TensorReader(spec, model, layout, checkpoint, allow_missing)
    description = describe(spec, dtype=dtype_name(read.dtype))
    with new_model(target, description, force=force) as stage:
        tensors, aliases = stored_tensors(model)
        digest = persist.write_weights(stage, tensors, read, aliases=aliases, progress=progress)
        if tokenizer is not None:
            write_tokenizer(tokenizer, stage / TOKENIZER, getattr(config, "vocab_size", None))
        for companion in COMPANIONS:
            if checkpoint.json(companion):
                (stage / companion).write_bytes((checkpoint.path / companion).read_bytes())
        if generation := generation_config(checkpoint, config):
            write_json(stage / GENERATION, generation)
        missing = f"{len(read.initialised)} tensors were missing and initialised" if read.initialised else None
        comparison = compare(stage, spec, model, checkpoint, layout, wanted=verify, hindrance=missing)
        origin = Origin(
            kind="imported",
            source=name or base_name(source),
            revision=revision,
            format=model_type,
            license=checkpoint.license,
            # The reason for a missing comparison may quote another library, and with it local paths.
            comparison=str(comparison) if comparison.reason is None else "not compared with the original",
            changes=tuple(filter(None, (missing, f"converted to {dtype_name(dtype)}" if dtype else None))),
            weights=digest,
        )
        description["origin"] = origin.to_dict()
        (stage / CARD).write_text(
            model_card(spec, description["dtype"], origin, parameter_count(spec)), encoding="utf-8"
        )
    return Imported(spec, comparison)


def find_layout(model_type: str | None, where: object) -> tuple[Plugin, str, Layout]:
    """Return the plugin that imports a model type, the name of the resulting architecture, and the layout."""
    plugin, importer = plugins.active().importer(model_type, where)
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
    """Read zoo's configuration from a checkpoint; ``chosen`` values from the user take precedence.

    Raises:
        UsageError: a value is missing or not understood, or the checkpoint does not say whether the single number of
            its head is a probability.
    """
    where, known = checkpoint.config_file, {**read_common(checkpoint, cls), **(chosen or {})}
    values = layout.read_config(checkpoint, allowed=allow_keys, chosen=known)
    config = cls.from_dict(values, where)
    one = isinstance(config, ClassifierConfig) and config.num_classes == 1 and config.problem_type is not None
    if one and values.get("problem_type") is None:  # transformers trains for regression; its pipelines take a sigmoid
        names = "multi_label_classification for a probability (sigmoid), regression for a number"
        remedy = Wording(f"pass settings=['problem_type=NAME']: {names}", f"pass --set problem_type=NAME: {names}")
        raise UsageError("the head has one class, but no problem_type is stated", where, remedy)
    return config


class TensorReader:
    """Reader of the checkpoint's tensors by zoo's names. Construction checks that they are exactly the model's.

    Args:
        spec: the model's description.
        model: the model on the meta device.
        layout: the layout of the checkpoint.
        checkpoint: the checkpoint to read.
        allow_missing: initialise missing tensors whose name, in the checkpoint or in zoo, matches these patterns.

    Raises:
        ArtifactError: tensors are missing, unexpected or of the wrong shape, or copies of a shared tensor differ.
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
        self.groups = tensor_groups(model)
        self.like = {alias: tensor for tensor, aliases in self.groups.values() for alias in aliases}
        self.dtype = next(model.parameters()).dtype
        self.sources: dict[str, tuple[str, Place]] = {}
        """For each of zoo's tensors, its name in the checkpoint and its place there."""
        self._last: tuple[str, Mapping[str, Tensor]] = ("", {})
        origins = layout.origins(self.like, spec.config)
        expected = {origin.name for found in origins.values() for origin in found}
        matched = layout.match(checkpoint.tensors, expected, spec.config)
        files = {name: file for file, name in matched.items()}
        problems = [f"unexpected {file}" for file, name in matched.items() if name not in expected]
        problems += [f"{file} duplicates {files[name]}" for file, name in matched.items() if files[name] != file]
        missing = []
        for ours, (_, aliases) in self.groups.items():
            candidates = [origin for alias in aliases for origin in origins.get(alias, [])]
            if not candidates:
                raise PluginError(f"the layout of {checkpoint.model_type} checkpoints has no rule for {ours}")
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
        made = stored_tensors(create.build(spec, seed=0, dtype="float32"))[0] if absent else {}
        self.initialised = {name: made[name] for name in absent}

    def _compare(self, present: Sequence[tuple[str, Place]]) -> list[str]:
        """Return the problems with the stored copies of a tensor."""
        problems = []
        for file, origin in present:
            shape = self.checkpoint.tensors[file].shape
            wanted = origin.rule.shape([tuple(self.like[name].shape) for name in origin.group])
            if shape != wanted:
                problems.append(f"{file} has shape {shape}, but the configuration requires {wanted}")
        if problems or len(present) == 1:
            return problems
        (first, origin), *others = present
        value = self._ours(first, origin)
        return [
            f"{file} differs from {first}, but the two should be shared"
            for file, other in others
            if file != first and not all(map(torch.equal, value, self._ours(file, other)))
        ]

    def _ours(self, file: str, origin: Place) -> list[Tensor]:
        sizes = [self.like[name].shape[0] for name in origin.group] if len(origin.group) > 1 else [1]
        return origin.rule.to_ours(self.checkpoint.tensors[file].read(), sizes)

    def __call__(self, name: str) -> Tensor:
        """Return the values of one of zoo's tensors, in the model's dtype."""
        if name in self.initialised:
            return self.initialised[name].to(self.dtype)
        file, origin = self.sources[name]
        if self._last[0] != file:
            self._last = ("", {})  # frees its memory before the next tensor is read
            self._last = (file, dict(zip(origin.group, self._ours(file, origin), strict=True)))
        mine = next(alias for alias in self.groups[name][1] if alias in self._last[1])
        value = self._last[1][mine].to(self.groups[name][0].dtype)
        if value.is_floating_point() and not all(part.isfinite().all() for part in value.reshape(-1).split(_PART)):
            raise ArtifactError(f"{file} has values that are not finite in {value.dtype}", self.checkpoint.where)
        return value


def _dtype(checkpoint: Checkpoint) -> str:
    dtypes = {tensor.dtype for tensor in checkpoint.tensors.values() if tensor.dtype.is_floating_point}
    names = {dtype_name(dtype) for dtype in dtypes}
    if len(names) != 1 or not names <= set(DTYPES):
        raise UsageError(
            f"the weights have dtypes {', '.join(sorted(names))}",
            checkpoint.where,
            argument("dtype", text="choose one with {}"),
        )
    return names.pop()
