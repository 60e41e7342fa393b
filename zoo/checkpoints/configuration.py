"""The configuration of a model that is imported: which layout reads it, and its values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from zoo import plugins
from zoo.checkpoints.common import read_common
from zoo.checkpoints.files import processor_file, reading_values
from zoo.checkpoints.layout import Layout
from zoo.checkpoints.source import Checkpoint
from zoo.checkpoints.tokens import CheckpointTokenizer
from zoo.classes import ClassifierConfig, default_names
from zoo.config import Config
from zoo.contract import Importer
from zoo.errors import ArtifactError, MissingPackageError, PluginError, UsageError, Wording, argument
from zoo.plugins import Plugin
from zoo.registry import load_reference

__all__ = ["find_layout", "read_configuration", "read_configurations"]


def find_layout(model_type: str | None, where: object) -> tuple[Plugin, str, Layout]:
    """Return the plugin that imports a model type, the name of the resulting architecture, and the layout."""
    plugin, importer = _find_importer(model_type, where)
    layout = load_reference(importer.layout, plugin)
    if not isinstance(layout, Layout):
        raise PluginError(f"{plugin}: {importer.layout} is not a zoo.checkpoints.Layout")
    return plugin, importer.architecture, layout


def _find_importer(model_type: str | None, where: object) -> tuple[Plugin, Importer]:
    """Return the importer with the name of a model type, or else the one that reads it.

    Raises :class:`UsageError` if there is none, and :class:`PluginError` if there are several.
    """
    try:
        return plugins.active().importer(model_type, where)
    except UsageError as unknown:
        if model_type is None:
            raise
        found: list[tuple[Plugin, Importer]] = []
        missing: MissingPackageError | None = None
        for plugin in plugins.active().loaded():
            for importer in plugin.importers:
                try:
                    found += [(plugin, importer)] if _reads(plugin, importer, model_type) else []
                except MissingPackageError as error:
                    missing = error
        if len(found) > 1:
            raise plugins.clash("importer", model_type, [plugin for plugin, _ in found], where) from unknown
        if not found and missing is not None:
            raise UsageError(unknown.what, where, f"zoo has no layout for it, and {missing}") from missing
        if not found:
            raise
        return found[0]


def _reads(plugin: Plugin, importer: Importer, model_type: str) -> bool:
    """Return whether an importer reads a model type that it is not named after."""
    if importer.reads is None:
        return False
    with plugins.blame(plugin, f"cannot say whether the importer {importer.name} reads {model_type!r}"):
        return bool(load_reference(importer.reads, plugin)(model_type))


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
    config, stated = _read_values(layout, checkpoint, cls, chosen or {}, allow_keys)
    _require_problem_type(config, stated, checkpoint.config_file)
    return config


def read_configurations(
    layout: Layout,
    checkpoint: Checkpoint,
    cls: type[Config],
    chosen: Mapping[str, Any],
    task: str | None,
    allow_keys: Sequence[str],
) -> tuple[Config, Config | None]:
    """Return the configuration of the checkpoint's own task, and that for another task or None."""
    if task is None:
        return read_configuration(layout, checkpoint, cls, chosen=chosen, allow_keys=allow_keys), None
    where = checkpoint.config_file
    cls.check_field("task", task, argument("task", task))
    head = {key: value for key, value in chosen.items() if key in cls.head_fields and key != "task"}
    shared = {key: value for key, value in chosen.items() if key not in head}
    config, stated = _read_values(layout, checkpoint, cls, shared, allow_keys)
    moved = config.with_task(task, head, where)
    if layout.read_extra is not None and task != config.task:  # where a layout keeps the pooler depends on the task
        extra = layout.read_extra(checkpoint, {**config.to_dict(), "task": task})
        left = [key for key in cls.head_fields if key not in head and getattr(moved, key) == getattr(config, key)]
        moved = moved.with_task(task, {key: extra[key] for key in left if key in extra and key != "task"}, where)
    if task == config.task and not head.keys() & {"num_classes", "problem_type"}:
        _require_problem_type(config, stated, where)
    return config, moved if moved != config else None


def _read_values(
    layout: Layout, checkpoint: Checkpoint, cls: type[Config], chosen: Mapping[str, Any], allow_keys: Sequence[str]
) -> tuple[Config, str | None]:
    """Read zoo's configuration, and the problem type that is stated or None."""
    _require_dtype(checkpoint.config, checkpoint.config_file)
    common = read_common(checkpoint, cls, CheckpointTokenizer.find(checkpoint, layout))
    if "image_mean" in cls.field_types():
        with reading_values(processor_file(checkpoint.path)):
            common |= layout.read_images(checkpoint)
    values = layout.read_config(checkpoint, allowed=allow_keys, chosen={**common, **chosen})
    config, stated = cls.from_dict(values, checkpoint.config_file), values.get("problem_type")
    is_theirs = "model_type" in checkpoint.config
    if is_theirs and isinstance(config, ClassifierConfig) and config.problem_type is not None and not config.labels:
        config = replace(config, labels=default_names(config.num_classes))
    return config, stated


def _require_dtype(values: Mapping[str, Any], where: object, prefix: str = "") -> None:
    """Raise :class:`ArtifactError` for a dtype that torch does not have, with which no original can be loaded."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            _require_dtype(value, where, f"{prefix}{key}.")
        elif key in ("dtype", "torch_dtype") and value not in (None, "auto"):
            known = isinstance(value, str) and isinstance(
                getattr(torch, value.removeprefix("torch."), None), torch.dtype
            )
            if not known:
                raise ArtifactError(f"{prefix}{key} {value!r:.40} is no dtype of torch", where)


def _require_problem_type(config: Config, stated: str | None, where: object) -> None:
    """Raise :class:`UsageError` if a head has one class and no problem type is stated."""
    one = isinstance(config, ClassifierConfig) and config.num_classes == 1 and config.problem_type is not None
    if one and stated is None:  # transformers trains for regression; its pipelines take a sigmoid
        names = "multi_label_classification for a probability (sigmoid), regression for a number"
        remedy = Wording(f"pass settings=['problem_type=NAME']: {names}", f"pass --set problem_type=NAME: {names}")
        raise UsageError("the head has one class, but no problem_type is stated", where, remedy)
