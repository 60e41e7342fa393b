"""Published weights of presets. Importing this module imports torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zoo import memo
from zoo.artifact import MANIFEST, ModelDirectory
from zoo.checkpoints.configuration import find_layout
from zoo.checkpoints.hub import fetch
from zoo.checkpoints.importing import Imported, import_checkpoint
from zoo.checkpoints.source import Checkpoint
from zoo.errors import UsageError, storage_errors
from zoo.models import create, persist
from zoo.models.dtypes import torch_dtype
from zoo.models.heads import retask
from zoo.registry import ModelSpec, registry

__all__ = ["create_model", "get_weights"]


def create_model(
    name: str, *, pretrained: bool = False, seed: int = 0, dtype: str | torch.dtype | None = None, **config: Any
) -> nn.Module:
    """Create a model from a preset: freshly initialised, or with its published weights.

    Args:
        name: a preset, see :func:`zoo.list_models`.
        pretrained: download the published weights on first use. They are kept as a model directory in zoo's cache.
        seed: the same seed gives the same new weights, of the model or of its head.
        dtype: ``float32``, ``float16`` or ``bfloat16``, as a name or a torch dtype; by default that of the published
            weights, or ``float32``.
        config: configuration values that replace the preset's. For published weights they may change the task and its
            head, as :func:`zoo.adapt` does.

    Raises:
        UsageError: unknown name, key or value; the preset has no published weights, or they do not fit the values.
        ArtifactError: the weights cannot be downloaded, or are not valid.
        PluginError: no plugin, or more than one, provides the architecture.

    >>> model = create_model("gpt-tiny", seed=1, num_layers=3)
    >>> model(torch.tensor([[104, 105]])).shape
    torch.Size([1, 2, 260])
    """
    if not pretrained:
        return create.initialise(name, seed=seed, dtype="float32" if dtype is None else dtype, **config)
    stored = ModelDirectory.open(_directory(name))
    model = persist.load_directory(stored)
    if config:
        model = retask(stored.spec, model, config, seed).model
    return model if dtype is None else model.to(torch_dtype(dtype))


def get_weights(
    name: str,
    target: str | os.PathLike[str],
    *,
    task: str | None = None,
    seed: int = 0,
    offline: bool = False,
    verify: bool | None = None,
    force: bool = False,
    progress: persist.Progress | None = None,
) -> Imported:
    """Download the published weights of a preset, and write a model directory.

    Interrupted downloads are continued. The origin of the model names the commit.

    Args:
        name: a preset with a source.
        target: the model directory to create.
        task: the task of the model, by default that of the checkpoint: see :func:`import_checkpoint`.
        seed: for the tensors of a new head.
        offline: use the hub's cache only.
        verify: compare outputs with those of the original implementation; by default if that is installed.
        force: replace an existing model directory.
        progress: called with the number of weight bytes written so far and in total.

    Raises:
        UsageError: the preset is unknown or has no published weights, or the target exists.
        ArtifactError: the checkpoint cannot be downloaded or is invalid, or its architecture is not the preset's.
    """
    spec, hub_name, revision = _source(name)
    path = fetch(hub_name, revision=revision, offline=offline)
    checkpoint = Checkpoint.open(path)
    architecture = find_layout(checkpoint.model_type, checkpoint.config_file)[1].rpartition(":")[2]
    if architecture != spec.architecture.name:
        what = f"the weights are for {architecture}, the preset for {spec.architecture.name}"
        raise UsageError(what, f"source of {name}", "correct the preset's source")
    return import_checkpoint(
        path,
        target,
        name=hub_name,
        revision=path.name,
        task=task,
        seed=seed,
        verify=verify,
        force=force,
        progress=progress,
    )


def _directory(name: str) -> Path:
    """Return a model directory in zoo's cache with the published weights of a preset, made on first use.

    Raises :class:`UsageError` as :func:`get_weights` does, or if the cache is disabled.
    """
    spec, _, revision = _source(name)
    cache = memo.directory()
    if cache is None:
        raise UsageError("published weights are kept in the cache, which is disabled", memo.VARIABLE, "use zoo get")
    target = cache / "models" / f"{spec.name}@{(revision or 'main').replace('/', '-')}"
    if not (target / MANIFEST).exists():
        with storage_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        get_weights(name, target, verify=False)
    return target


def _source(name: str) -> tuple[ModelSpec, str, str | None]:
    """Return a preset, and the name and revision of its weights on the hub."""
    spec = registry().resolve(name)
    if spec.source is None:
        raise UsageError("the preset has no published weights", name, "zoo list shows which have some")
    hub_name, _, revision = spec.source.partition("@")
    return spec, hub_name, revision or None
