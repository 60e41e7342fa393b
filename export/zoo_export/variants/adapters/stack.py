"""Stacks of low-rank adapters: reading adapters for a model, and the safetensors file that holds all of them.

For each dense layer ``NAME`` that any of n adapters changes, ``model.adapters.safetensors`` has, in float32,

    ``NAME.lora_A``  (n + 1, rank, inputs)
    ``NAME.lora_B``  (n + 1, outputs, rank)

Number 0 is zero, which is the model itself, and adapters follow in their order. A rank is the largest of any adapter in
that layer; smaller ones, and layers that an adapter does not change, are filled with zeros. The factor alpha / rank is
part of B. The weights of the model are not in the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from zoo.arrays import Array
from zoo.artifact import ADAPTER, ADAPTERS, TOKENIZER, ModelDirectory
from zoo.artifact.digests import digest_file
from zoo.artifact.weights import read_header
from zoo.checkpoints.peft import Update
from zoo.errors import ArtifactError, UsageError
from zoo.models import persist
from zoo.training.adapters.low_rank import add_updates
from zoo.training.adapters.merge import Found, read_changes
from zoo_runtime.onnx_runtime.adapters import BASE

__all__ = [
    "FILE",
    "LORA_A",
    "LORA_B",
    "Adapter",
    "factors",
    "layers_of",
    "read_adapters",
    "read_stacked",
    "stack",
    "write_stacks",
]

FILE = f"model.{ADAPTERS}.safetensors"
LORA_A, LORA_B = ".lora_A", ".lora_B"
_WEIGHT = ".weight"
_NAME = re.compile(r"\w[\w.-]*")

_NONE = np.zeros(0, np.float32)


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter of a model."""

    name: str
    updates: Mapping[str, Update]
    """By the name of the weight."""
    sha256: str
    """Digest of its tensors' file."""

    def facts(self) -> dict[str, Any]:
        """Return the values for the evidence."""
        ranks = [len(update.a) for update in self.updates.values()]
        return {"sha256": self.sha256, "layers": len(ranks), "rank": max(ranks)}


def read_adapters(stored: ModelDirectory, given: Mapping[str, Path]) -> list[Adapter]:
    """Read the adapters in these directories, by name, for a model.

    Raises:
        UsageError: a name is invalid, or an adapter changes more than the weights of dense layers.
        ArtifactError: a directory holds no adapter of this model, or one that was trained on other weights.
    """
    if stored.dtype != "float32":
        raise UsageError(f"adapters need a float32 model, this one is {stored.dtype}", stored.path)
    model = persist.load_directory(stored)
    adapters = []
    for name, directory in given.items():
        if not _NAME.fullmatch(name) or name == BASE:
            problem = f"bad name of an adapter: {name!r}"
            raise UsageError(problem, directory, f"give NAME=DIR with a name of letters and digits other than {BASE!r}")
        read = read_changes(stored, model, directory)
        _check(stored, read, directory)
        add_updates(persist.load_directory(stored), read.changes.updates, directory)  # raises for other layers
        updates = read.changes.updates
        updates = {weight: _compact(update) for weight, update in updates.items() if update.b.any()} or updates
        adapters.append(Adapter(name, updates, digest_file(directory / ADAPTER)))
    return adapters


def _compact(update: Update) -> Update:
    """Return an equal update without the ranks whose column of B is zero, as in parts of a fused layer."""
    used = (update.b != 0).any(dim=0)
    return Update(update.a[used], update.b[:, used], update.scale)


def _check(stored: ModelDirectory, read: Found, directory: Path) -> None:
    """Raise :class:`UsageError` for an adapter that updates of dense layers cannot represent."""
    remedy = f"merge it instead: zoo adapt {stored.path} --merge {directory} -o DIR"
    if read.changes.whole:
        raise UsageError(f"the adapter replaces {', '.join(read.changes.whole)}", directory, remedy)
    if read.spec.config != stored.spec.config:
        raise UsageError("the adapter changes the configuration of the model", directory, remedy)
    if not read.changes.updates:
        raise ArtifactError("the adapter changes no layer", directory)
    if read.own is not None and TOKENIZER in stored.files:
        digest = stored.files[TOKENIZER]["sha256"]
        if read.own.files.get(TOKENIZER, {"sha256": digest})["sha256"] != digest:
            raise UsageError("the adapter was trained with another tokenizer", directory, remedy)


def stack(adapters: Sequence[Adapter], order: Sequence[str]) -> dict[str, Array]:
    """Return the stacks of adapters, for layers in the order of their weights' names ``order``."""
    updated = {name for adapter in adapters for name in adapter.updates}
    stacks: dict[str, Array] = {}
    for weight in sorted(updated, key=list(order).index):
        updates = {number: adapter.updates.get(weight) for number, adapter in enumerate(adapters, 1)}
        factors_by_number = {number: factors(update) for number, update in updates.items() if update is not None}
        rank = max(len(a) for a, _ in factors_by_number.values())
        (_, inputs), (outputs, _) = (factor.shape for factor in next(iter(factors_by_number.values())))
        all_a = np.zeros((len(adapters) + 1, rank, inputs), np.float32)
        all_b = np.zeros((len(adapters) + 1, outputs, rank), np.float32)
        for number, (a, b) in factors_by_number.items():
            all_a[number, : len(a)], all_b[number, :, : len(a)] = a, b
        layer = weight.removesuffix(_WEIGHT)
        stacks[layer + LORA_A], stacks[layer + LORA_B] = all_a, all_b
    return stacks


def factors(update: Update) -> tuple[Array, Array]:
    """Return A (rank, inputs) and B times the scale (outputs, rank)."""
    return update.a.float().numpy(), (update.b.double() * update.scale).float().numpy()


def write_stacks(directory: Path, adapters: Sequence[Adapter], order: Sequence[str]) -> None:
    """Write the file of stacks."""
    save_file(stack(adapters, order), directory / FILE, {"format": "zoo.adapters"})


def layers_of(names: Iterable[str]) -> Iterator[str]:
    """Yield the names of the layers that have stacks."""
    return (name.removesuffix(LORA_A) for name in names if name.endswith(LORA_A))


def read_stacked(directory: Path, names: Sequence[str]) -> list[Adapter]:
    """Read adapters back from their file of stacks.

    Args:
        directory: a model directory.
        names: the adapters, in order.

    Raises:
        ArtifactError: the file is damaged, or does not hold as many adapters.
    """
    path = directory / FILE
    layout = read_header(path)
    tensors: Mapping[str, Array] = load_file(path)
    pairs = {layer: (tensors[layer + LORA_A], tensors.get(layer + LORA_B, _NONE)) for layer in layers_of(layout)}
    sound = all(a.ndim == b.ndim == 3 and len(a) == len(b) == len(names) + 1 for a, b in pairs.values())
    if not sound or len(layout) != 2 * len(pairs):
        raise ArtifactError("not the stacks of these adapters", path)
    digest = digest_file(path)
    return [
        Adapter(name, {f"{layer}{_WEIGHT}": _update(a[number], b[number]) for layer, (a, b) in pairs.items()}, digest)
        for number, name in enumerate(names, 1)
    ]


def _update(a: Array, b: Array) -> Update:
    factors: tuple[Tensor, Tensor] = torch.from_numpy(a), torch.from_numpy(b)
    return Update(*factors, 1.0)
