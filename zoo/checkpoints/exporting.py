"""Models of ours as checkpoints in the hub's layout, which read back as they were, bit for bit, or do not exist."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo import models, plugins, storage
from zoo.artifact import CARD, COMPANIONS, TOKENIZER, ModelDirectory, write_json
from zoo.checkpoints.common import write_common, write_token_files
from zoo.checkpoints.importing import TensorReader, find_layout, read_configuration
from zoo.checkpoints.layout import Layout, Origin
from zoo.checkpoints.original import Comparison, compare
from zoo.checkpoints.source import Checkpoint, SourceTensor
from zoo.errors import ParityError, UsageError

__all__ = ["Exported", "export_checkpoint"]


@dataclass(frozen=True)
class Exported:
    """A checkpoint that was made from a model directory."""

    kind: str
    """The family whose layout it has."""
    files: list[str]
    comparison: Comparison
    """With the implementation it was made for, or why there is none."""


def export_checkpoint(
    directory: Path, target: Path, *, kind: str | None = None, verify: bool | None = None, force: bool = False
) -> Exported:
    """Write a model's weights, configuration and tokenizer as the original implementation has them.

    Args:
        directory: a model directory.
        target: the directory to make.
        kind: the family; by default the first that can say all of the configuration.
        verify: load it with the original implementation and compare; by default where that is installed.
        force: replace what was written there before.

    Raises:
        UsageError: no layout of that kind, none that can say the configuration, or the target exists.
        ParityError: what was written does not read back as it was, or the original gives other outputs.
    """
    stored = ModelDirectory.open(directory)
    model = models.build_on_meta(stored.spec, stored.dtype)
    with storage.new_directory(target, force=force, replaceable=_replaceable) as stage:
        kind, layout, tensors = _choose(stored, model, stage, kind)
        like = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
        models.write_weights(stage, like, lambda name: tensors[name].read(), aliases={})
        checkpoint = Checkpoint(stage)
        _read_back(stored, model, layout, checkpoint)
        comparison = compare(stored.path, stored.spec, model, checkpoint, layout, wanted=verify)
        files = sorted(str(path.relative_to(stage)) for path in stage.rglob("*") if path.is_file())
    return Exported(kind, files, comparison)


def _replaceable(path: Path) -> bool:
    """Whether a directory may be replaced: a checkpoint, and no model directory."""
    return (path / "config.json").is_file() and not (path / "manifest.json").exists()


def _choose(
    stored: ModelDirectory, model: nn.Module, stage: Path, kind: str | None
) -> tuple[str, Layout, dict[str, SourceTensor]]:
    """A family whose layout says all of this model; everything but its tensors is written to the stage."""
    spec = stored.spec
    names = (spec.architecture.name, f"{spec.plugin.distribution}:{spec.architecture.name}")
    kinds = [
        item.name for plugin in plugins.active().loaded() for item in plugin.importers if item.architecture in names
    ]
    if kind is not None and kind not in kinds:
        raise UsageError(f"{kind!r} is no layout of {names[0]} models", "--kind", f"known: {', '.join(kinds)}")
    reasons = []
    for name in kinds if kind is None else [kind]:
        layout = find_layout(name, stored.path)[2]
        try:
            tensors = _tensors(stored, model, layout)
            _write_files(stored, layout, stage)
            again = read_configuration(layout, Checkpoint(stage, planned=tensors), type(spec.config))
        except UsageError as reason:
            reasons.append(f"{name}: {reason}")
        else:
            values = spec.config.to_dict()
            lost = [f"{key} {values[key]!r}" for key, value in again.to_dict().items() if value != values[key]]
            if not lost:
                return name, layout, tensors
            reasons.append(f"{name}: it cannot say {', '.join(lost)}")
        for path in stage.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    found = "; ".join(reasons) or "no plugin knows one"
    raise UsageError(f"no layout of checkpoints holds this {names[0]} model ({found})", stored.path)


def _write_files(stored: ModelDirectory, layout: Layout, stage: Path) -> None:
    """What lies beside the weights."""
    config = stored.spec.config
    files: dict[str, Any] = {}
    if TOKENIZER in stored.files:
        files |= write_token_files(config, stored.path / TOKENIZER)
    files |= layout.files(config) if layout.files is not None else {}
    hub = {**layout.write_config(config, stored.path), **write_common(config), "dtype": stored.dtype}
    for name, content in {**files, "config.json": hub}.items():
        (stage / name).parent.mkdir(exist_ok=True)
        write_json(stage / name, content)
    for name in (TOKENIZER, CARD, *COMPANIONS):
        if name in stored.files:
            (stage / name).write_bytes((stored.path / name).read_bytes())


def _tensors(stored: ModelDirectory, model: nn.Module, layout: Layout) -> dict[str, SourceTensor]:
    """The checkpoint's tensors, made of ours as they are asked for."""
    config, groups, held = stored.spec.config, models.tensor_groups(model), Checkpoint(stored.path)
    first = {alias: name for name, (_, aliases) in groups.items() for alias in aliases}
    origins = layout.origins(first, config)
    found: dict[str, SourceTensor] = {}
    for ours, (like, aliases) in groups.items():
        places = [origin for alias in aliases for origin in origins.get(alias, [])]
        if not places:
            raise UsageError(f"it has no place for {ours}", stored.path)
        origin = places[0]
        shapes = [tuple(groups[first[name]][0].shape) for name in origin.group]
        read = partial(_read, held, origin, [first[name] for name in origin.group])
        found[layout.written_name(origin.name, config)] = SourceTensor(origin.rule.shape(shapes), like.dtype, read)
    return found


def _read(ours: Checkpoint, origin: Origin, names: Sequence[str]) -> Tensor:
    return origin.rule.to_theirs([ours.tensors[name].read() for name in names])


def _read_back(stored: ModelDirectory, model: nn.Module, layout: Layout, checkpoint: Checkpoint) -> None:
    """Import what was written, tensor by tensor, and compare its bits."""
    ours = Checkpoint(stored.path).tensors
    again = TensorReader(stored.spec, model, layout, checkpoint)
    for name in models.tensor_groups(model):
        written, kept = (tensor.contiguous().view(torch.uint8) for tensor in (again(name), ours[name].read()))
        if not torch.equal(written, kept):
            raise ParityError(f"{name} does not come back as it is", stored.path, "the layout is wrong")
