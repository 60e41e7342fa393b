"""Export of models as checkpoints in the hub's layout, written only if they read back bit for bit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo import plugins
from zoo.artifact import CARD, COMPANIONS, PROMPTS, TOKENIZER, ModelDirectory, write_json
from zoo.artifact.card import checkpoint_card
from zoo.artifact.outputs import new_output
from zoo.artifact.prefixes import MATRYOSHKA
from zoo.artifact.weights import SINGLE, load_json
from zoo.checkpoints.common import write_common, write_token_files
from zoo.checkpoints.configuration import find_layout, read_configuration
from zoo.checkpoints.images import PROCESSOR
from zoo.checkpoints.layout import Layout
from zoo.checkpoints.original import Comparison, compare
from zoo.checkpoints.reader import TensorReader
from zoo.checkpoints.rules import TensorPlace
from zoo.checkpoints.sentences import cross_encoder_files
from zoo.checkpoints.source import Checkpoint, SourceTensor, source_tensors
from zoo.checkpoints.stacks import split_stacks
from zoo.classes import ClassifierConfig, default_names
from zoo.config import Config
from zoo.contract import standard_fields
from zoo.errors import ParityError, UsageError, argument
from zoo.models import create, persist
from zoo.models.count import parameter_count
from zoo.models.tensors import tensor_groups
from zoo.reading import read_bytes

__all__ = [
    "Exported", "choose_layout", "export_checkpoint", "imported_layout", "layout_names", "write_dense_layers",
]  # fmt: skip


@dataclass(frozen=True)
class Exported:
    """The result of exporting a checkpoint."""

    model_type: str
    """The model type whose layout was written."""
    files: list[str]
    comparison: Comparison
    """Comparison with the original implementation, or why there is none."""


def export_checkpoint(
    directory: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    model_type: str | None = None,
    max_shard_bytes: int | None = None,
    verify: bool | None = None,
    force: bool = False,
) -> Exported:
    """Write a model's weights, configuration and tokenizer in the layout of the original implementation.

    Args:
        directory: a model directory.
        target: the directory to create.
        model_type: the layout to write; by default that from which the model was imported, or the first that can
            represent the configuration.
        max_shard_bytes: larger weights are split into shards; 5 GB by default.
        verify: load the checkpoint with the original implementation and compare; by default if that is installed.
        force: replace a checkpoint that this function wrote, if its files are unchanged and none were added.

    Raises:
        ArtifactError: the weights are not this model's.
        UsageError: the layout is unknown, no layout can represent the configuration, or the target exists.
        ParityError: the checkpoint does not read back bit for bit, or the original's outputs differ.
    """
    stored, target = ModelDirectory.open(Path(directory), rehash=True), Path(target)
    model = create.build_on_meta(stored.spec, stored.dtype)
    persist.check_layout(model, stored.layout, stored.path)
    with new_output(target, "publish --layout hub", force=force) as stage:
        model_type, layout, tensors = choose_layout(stored, model, stage, model_type)
        like = write_dense_layers(stage, tensors)
        checkpoint = Checkpoint(stage)
        persist.write_weights(
            stage,
            like,
            lambda name: tensors[name].read(),
            aliases={},
            max_shard_bytes=max_shard_bytes or persist.MAX_SHARD_BYTES,
        )
        _read_back(stored, model, layout, checkpoint)
        weights = persist.read_tensors(stored.path, {tensor.file for tensor in stored.layout.values()})
        comparison = compare(weights, stored.spec, model, checkpoint, layout, wanted=verify)
        files = sorted(str(path.relative_to(stage)) for path in stage.rglob("*") if path.is_file())
    return Exported(model_type, files, comparison)


def write_dense_layers(stage: Path, tensors: Mapping[str, SourceTensor]) -> dict[str, Tensor]:
    """Write the dense layers of a sentence encoder to their folders. Return the other tensors, without values.

    Args:
        stage: the folder of the checkpoint, with its configuration.
        tensors: the tensors of the checkpoint, by name.
    """
    like = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    for number, folder in enumerate(Checkpoint(stage).dense_folders):
        names = {name.removeprefix(f"Dense.{number}."): name for name in like if name.startswith(f"Dense.{number}.")}
        layer = {name: like.pop(whole) for name, whole in names.items()}
        persist.write_tensors(stage / folder / SINGLE, layer, partial(_read_as, tensors, names), {"format": "pt"})
    return like


def layout_names(stored: ModelDirectory) -> list[str]:
    """Return the model types whose layouts become models of this architecture, that of the import first."""
    spec, imported = stored.spec, _imported_format(stored)
    architecture = (spec.architecture.name, f"{spec.plugin.distribution}:{spec.architecture.name}")
    importers = (item for plugin in plugins.active().loaded() for item in plugin.importers)
    names = [item.name for item in importers if item.architecture in architecture]
    return sorted(names, key=lambda name: name != imported)


def imported_layout(stored: ModelDirectory) -> str | None:
    """Return the hub layout from which a model was imported, perhaps before it was trained, or None."""
    imported = _imported_format(stored)
    return imported if imported in layout_names(stored) else None


def _imported_format(stored: ModelDirectory) -> str | None:
    origin = stored.origin
    while origin.kind != "imported" and origin.parent is not None:
        origin = origin.parent
    return origin.format


def choose_layout(
    stored: ModelDirectory, model: nn.Module, stage: Path, model_type: str | None = None
) -> tuple[str, Layout, dict[str, SourceTensor]]:
    """Choose a layout that can represent this model, and write everything but the tensors to the stage.

    Without ``model_type``, all of :func:`layout_names` are tried in their order.

    Raises :class:`UsageError` if there is none.
    """
    spec, model_types = stored.spec, layout_names(stored)
    if model_type is not None and model_type not in model_types:
        raise UsageError(
            f"{model_type!r} is not a layout of {spec.architecture.name} models",
            argument("model_type"),
            f"known: {', '.join(model_types)}",
        )
    reasons = []
    for name in model_types if model_type is None else [model_type]:
        layout = find_layout(name, stored.path)[2]
        try:
            tensors = _tensors(stored, model, layout)
            _write_files(stored, layout, stage)
            again = read_configuration(layout, Checkpoint(stage, planned=tensors), type(spec.config))
        except UsageError as reason:
            reasons.append(f"{name}: {reason}")
        else:
            values = _values(spec.config)
            stored_values = {key: value for key, value in _values(again).items() if key not in again.unstored_fields}
            lost = [f"{key} {values[key]!r}" for key, value in stored_values.items() if value != values[key]]
            if not lost:
                return name, layout, tensors
            reasons.append(f"{name}: cannot represent {', '.join(lost)}")
        for path in stage.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    faults = "; ".join(reasons) or "no plugin provides one"
    raise UsageError(f"no checkpoint layout can represent this {spec.architecture.name} model ({faults})", stored.path)


def _values(config: Config) -> dict[str, Any]:
    """Return the values of a configuration, without names of classes that are those of classes without names."""
    values = config.to_dict()
    unnamed = isinstance(config, ClassifierConfig) and config.labels == default_names(config.num_classes)
    return {**values, "labels": ()} if unnamed else values


def _write_files(stored: ModelDirectory, layout: Layout, stage: Path) -> None:
    """Write the files beside the weights."""
    config = stored.spec.config
    files: dict[str, Any] = {}
    if TOKENIZER in stored.files:
        files |= write_token_files(config, stored.path / TOKENIZER)
    files |= layout.files(config) if layout.files is not None else {}
    if PROCESSOR not in stored.files and _has_preparation(stored):
        files.pop(PROCESSOR, None)
    said = load_json(stored.path / PROMPTS) if PROMPTS in stored.files else {}
    hub = {**layout.write_config(config, stored.path), **write_common(config), "dtype": stored.dtype}
    hub |= {key: said[key] for key in MATRYOSHKA if key in said}
    for name, content in {**files, "config.json": hub}.items():
        (stage / name).parent.mkdir(exist_ok=True)
        if isinstance(content, str):
            (stage / name).write_text(content, encoding="utf-8")
        else:
            write_json(stage / name, content)
    library = "timm" if "pretrained_cfg" in hub else "transformers"
    library = "sentence-transformers" if "modules.json" in files else library
    card = checkpoint_card(
        stored.spec, stored.dtype, stored.origin, parameter_count(stored.spec), library=library,
        model_type=str(hub.get("model_type") or hub.get("architecture") or stored.spec.architecture.name),
    )  # fmt: skip
    (stage / CARD).write_text(card, encoding="utf-8")
    for name in (TOKENIZER, *COMPANIONS):
        if name in stored.files:
            (stage / name).write_bytes(read_bytes(stored.path / name))
    for name, content in cross_encoder_files(said, config.task, standard_fields(config).problem_type).items():
        write_json(stage / name, content)


def _has_preparation(stored: ModelDirectory) -> bool:
    """Return whether a model has a processor_config.json that says how images or sound are prepared."""
    name = "processor_config.json"
    return name in stored.files and not {"image_processor", "feature_extractor"}.isdisjoint(
        load_json(stored.path / name)
    )


def _tensors(stored: ModelDirectory, model: nn.Module, layout: Layout) -> dict[str, SourceTensor]:
    """Return the checkpoint's tensors, converted from zoo's on demand."""
    config, groups = stored.spec.config, tensor_groups(model)
    first = {alias: name for name, (_, aliases) in groups.items() for alias in aliases}
    origins, computed = layout.origins(first, config), layout.computed(config)
    tensors: dict[str, SourceTensor] = {}
    for ours, (like, aliases) in groups.items():
        if ours in computed:
            continue
        places = [origin for alias in aliases for origin in origins.get(alias, [])]
        if not places:
            raise UsageError(f"no rule for tensor {ours}", stored.path)
        origin = places[0]
        if absent := [name for name in origin.group if name not in first]:
            raise UsageError(f"{origin.name} cannot hold {ours} without {', '.join(absent)}", stored.path)
        shapes = [tuple(groups[first[name]][0].shape) for name in origin.group]
        read = partial(_read, stored, origin, [first[name] for name in origin.group])
        tensors[layout.written_name(origin.name, config)] = SourceTensor(origin.rule.shape(shapes), like.dtype, read)
    return dict(layout.divided(split_stacks(tensors), config))


def _read_as(tensors: Mapping[str, SourceTensor], names: Mapping[str, str], name: str) -> Tensor:
    return tensors[names[name]].read()


def _read(stored: ModelDirectory, origin: TensorPlace, names: Sequence[str]) -> Tensor:
    ours = source_tensors(stored.path, {name: stored.layout[name] for name in names})
    return origin.rule.to_theirs([ours[name].read() for name in names])


def _read_back(stored: ModelDirectory, model: nn.Module, layout: Layout, checkpoint: Checkpoint) -> None:
    """Import the written checkpoint tensor by tensor, and compare it bit for bit."""
    ours = source_tensors(stored.path, stored.layout)
    again = TensorReader(stored.spec, model, layout, checkpoint)
    for name in tensor_groups(model):
        written, ours_bytes = (tensor.reshape(-1).view(torch.uint8) for tensor in (again(name), ours[name].read()))
        if not torch.equal(written, ours_bytes):
            raise ParityError(f"{name} does not read back bit for bit", stored.path, "the layout is wrong")
