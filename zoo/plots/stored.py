"""A model as plots read it: its modules without weights, and the stored tensors that are asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from zoo.arrays import Array
from zoo.artifact import ModelDirectory
from zoo.contract import LearnsPositions
from zoo.errors import ArtifactError, PluginError, UsageError
from zoo.models import create
from zoo.models.declarations import matching_tensors
from zoo.registry import ModelSpec

__all__ = ["StoredModel", "as_floats"]

Module = TypeVar("Module", bound=nn.Module)


class StoredModel:
    """The modules of a preset or of a model directory, and the weights of the directory.

    Args:
        source: a model directory, or the description of a preset, which has no weights.
    """

    def __init__(self, source: str | os.PathLike[str] | ModelSpec) -> None:
        self.stored = None if isinstance(source, ModelSpec) else ModelDirectory.open(Path(source))
        self.spec: ModelSpec = source if self.stored is None else self.stored.spec  # type: ignore[assignment]
        self.name = self.spec.name if self.stored is None else str(self.stored.description["name"])
        self.model = create.build_on_meta(self.spec)

    def find(self, kind: type[Module]) -> list[tuple[str, Module]]:
        """Return the modules of a class, with their paths."""
        return [(path, module) for path, module in self.model.named_modules() if isinstance(module, kind)]

    def position_tensors(self) -> Iterator[str]:
        """Yield the names of the stored tables of positions: :class:`zoo.contract.LearnsPositions`.

        Raises:
            PluginError: ``position_tensors`` of a module is not a tuple of names of tensors.
        """
        modules: Iterator[tuple[str, nn.Module]] = self.model.named_modules()
        for path, module in modules:
            if isinstance(module, LearnsPositions):
                where = f"{type(module).__qualname__}.position_tensors"
                try:
                    for _, name, _ in matching_tensors(module, module.position_tensors, tuple, where):
                        yield f"{path}.{name}" if path else name
                except PluginError as error:
                    raise PluginError(f"{self.spec.plugin}: {error.what}", where) from error

    def read(self, name: str) -> Tensor:
        """Return a stored tensor.

        Raises:
            UsageError: a preset has no weights.
            ArtifactError: the tensor is not stored.
        """
        if self.stored is None:
            raise UsageError(f"the preset {self.name} has no weights", None, f"zoo build {self.name}")
        place = self.stored.layout.get(name)
        if place is None:
            raise ArtifactError(f"no tensor {name}", self.stored.path)
        try:
            with safe_open(self.stored.file(place.file), framework="pt") as reader:
                tensor: Tensor = reader.get_tensor(name)
        except SafetensorError as error:
            raise ArtifactError(f"not valid safetensors ({error})", self.stored.path / place.file) from error
        return tensor

    def fill(self, path: str, module: nn.Module) -> None:
        """Give a module its stored tensors."""
        for name, _ in module.state_dict().items():
            tensor = self.read(f"{path}.{name}" if path else name)
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, nn.Parameter(tensor, requires_grad=False))


def as_floats(tensor: Tensor) -> Array:
    """Return a tensor as an array of float64."""
    return tensor.detach().to(torch.float64).numpy()
