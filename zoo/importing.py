"""Foreign checkpoints: a directory in the hub's layout becomes a model of ours, tensor for tensor or not at all."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from zoo import models, plugins
from zoo.errors import ArtifactError, UsageError
from zoo.registry import ModelSpec, config_class, load_reference
from zoo.tokenizer import find_tokenizer
from zoo.weights import DTYPES, INDEX, SINGLE, load_json, read_layout

__all__ = ["Checkpoint", "Rules", "import_checkpoint"]

LEGACY = "pytorch_model.bin"


@dataclass(frozen=True)
class Checkpoint:
    """A directory in the hub's layout: config.json, weights, and what lies beside them."""

    path: Path

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """config.json as it is."""
        return load_json(self.path / "config.json")

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """Every tensor by its name in the file, mapped and not read."""
        if (self.path / SINGLE).exists() or (self.path / INDEX).exists():
            return dict(self._read_safetensors())
        if (self.path / LEGACY).exists():
            return self._read_legacy()
        raise ArtifactError(f"no {SINGLE}, {INDEX} or {LEGACY}", self.path)

    def json(self, name: str) -> dict[str, Any]:
        """A JSON file beside the weights, empty when there is none."""
        return load_json(self.path / name) if (self.path / name).exists() else {}

    def _read_safetensors(self) -> Iterator[tuple[str, Tensor]]:
        layout = read_layout(self.path)
        with ExitStack() as stack:
            files = {
                file: stack.enter_context(safe_open(self.path / file, framework="pt"))
                for file in {tensor.file for tensor in layout.values()}
            }
            for name, tensor in layout.items():
                yield name, files[tensor.file].get_tensor(name)

    def _read_legacy(self) -> Mapping[str, Tensor]:
        try:
            data = torch.load(self.path / LEGACY, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch raises pickle's, zip's and its own errors
            raise ArtifactError("not a checkpoint of plain tensors", self.path / LEGACY) from error
        if not isinstance(data, dict) or not all(isinstance(value, Tensor) for value in data.values()):
            raise ArtifactError("not a mapping of names to tensors", self.path / LEGACY)
        return data


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How one family's checkpoints map to ours, as data."""

    config: Callable[[Checkpoint], dict[str, Any]]
    """Configuration values from the checkpoint; raises :class:`UsageError` for what it cannot represent."""
    names: Sequence[tuple[str, str]]
    """Regular expressions and replacements, applied in order to each tensor name."""
    ignored: Sequence[str] = ()
    """Regular expressions, matched in full: tensors that hold nothing learnt."""

    superseded: Sequence[tuple[str, str]] = ()
    """Pairs of names: the first is not read where the second is present."""

    def rename(self, name: str) -> str | None:
        """Our name of a tensor, or None for one that is ignored."""
        if any(re.fullmatch(pattern, name) for pattern in self.ignored):
            return None
        for pattern, replacement in self.names:
            name = re.sub(pattern, replacement, name)
        return name


def import_checkpoint(source: Path, target: Path, *, dtype: str | None = None, force: bool = False) -> ModelSpec:
    """Read a checkpoint and write a model directory.

    Args:
        source: a directory in the hub's layout.
        target: the model directory to make.
        dtype: convert the weights; by default they keep their own.
        force: replace an existing model directory.

    Raises:
        UsageError: no importer for this ``model_type``, or a configuration value that cannot be represented.
        ArtifactError: a file is missing or unsound, or tensors are missing, unexpected or misshapen; all are listed.
    """
    if not source.is_dir():
        raise ArtifactError("not a directory" if source.exists() else "no such directory", source)
    checkpoint = Checkpoint(source)
    loaded = plugins.active()
    importer = loaded.importer(str(checkpoint.config.get("model_type")), source / "config.json")
    plugin, architecture = loaded.architecture(importer.architecture)
    rules: Rules = load_reference(importer.rules, plugin)
    with plugins.blame(plugin, f"cannot import {source.name}"):
        config = config_class(plugin, architecture).from_dict(rules.config(checkpoint), source / "config.json")
    tokenizer = find_tokenizer(source)
    label = "file" if tokenizer else None
    spec = ModelSpec(target.name, plugin, architecture, config, tokenizer=label)
    model = models.build_on_meta(spec, dtype or _dtype(checkpoint))
    models.fill(model, _match(model, checkpoint, rules))
    origin = f"imported from {source.resolve().name}"
    models.save_spec(spec, model, target, tokenizer=tokenizer, force=force, source=origin)
    return spec


def _match(model: torch.nn.Module, checkpoint: Checkpoint, rules: Rules) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's tensors under the model's names, once it is certain that they are exactly the model's."""
    groups = models.tensor_groups(model)
    first = {alias: name for name, (_, aliases) in groups.items() for alias in aliases}
    found: dict[str, Tensor] = {}
    problems = []
    unread = {name for name, by in rules.superseded if by in checkpoint.tensors}
    for name, tensor in checkpoint.tensors.items():
        ours = rules.rename(name)
        if ours is None or name in unread:
            continue
        if ours not in first:
            problems.append(f"unexpected {name}")
            continue
        wanted, (like, _) = first[ours], groups[first[ours]]
        if tensor.shape != like.shape:
            problems.append(f"{name} has shape {tuple(tensor.shape)}, the configuration says {tuple(like.shape)}")
        elif wanted in found and not torch.equal(found[wanted], tensor):
            problems.append(f"{name} differs from the tensor it should share")
        else:
            found[wanted] = tensor.to(like.dtype)
    problems += [f"missing {name}" for name in groups if name not in found]
    if problems:
        raise ArtifactError(f"the weights do not fit the configuration ({'; '.join(problems)})", checkpoint.path)
    yield from found.items()


def _dtype(checkpoint: Checkpoint) -> str:
    names = {
        str(tensor.dtype).removeprefix("torch.") for tensor in checkpoint.tensors.values() if tensor.is_floating_point()
    }
    if len(names) != 1 or not names <= set(DTYPES):
        raise UsageError(f"the weights are {', '.join(sorted(names))}", checkpoint.path, "choose one with --dtype")
    return names.pop()
