"""Low-rank adapters in the files of the PEFT library, with the names of a hub layout or with zoo's own.

:mod:`zoo.checkpoints.peft_reading` reads them.

Importing this module imports torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from zoo.artifact import ADAPTER, ADAPTER_CONFIG, write_json
from zoo.checkpoints.layout import Layout
from zoo.checkpoints.rules import Rule, TensorPlace
from zoo.config import Config
from zoo.models.tensors import tensor_groups

__all__ = ["AdapterChanges", "AdapterNames", "Update", "write_adapter"]

PREFIX = "base_model.model."
_WEIGHT = ".weight"


@dataclass(frozen=True, eq=False)
class Update:
    """The update of the weight of a dense layer, (outputs, inputs), or of an embedding, (tokens, width):
    ``scale * b @ a``."""

    a: Tensor
    """(rank, inputs) or (rank, width)"""
    b: Tensor
    """(outputs, rank) or (tokens, rank)"""
    scale: float

    def added_to(self, weight: Tensor) -> Tensor:
        """Return the sum with a weight, computed in float64 and rounded to the weight's dtype."""
        return (weight.double() + self.scale * (self.b.double() @ self.a.double())).to(weight.dtype)


@dataclass(frozen=True)
class AdapterChanges:
    """The changes of an adapter to a model, by the name of the tensor."""

    updates: Mapping[str, Update]
    whole: Mapping[str, Tensor]
    """Tensors that replace those of the model, such as a new head."""
    shared: frozenset[str] = frozenset()
    """Changed tensors that several layers of the model share, and that change in the same way for all of them."""
    equal: tuple[str, ...] = ()
    """Tensors that the adapter holds as they are in the model, and that therefore change nothing."""


class AdapterNames:
    """The correspondence of a model's tensors with the names in the files of an adapter.

    Args:
        model: the model, possibly on the meta device.
        config: its configuration.
        layout: the hub layout whose names the files have; None for zoo's own names.
    """

    def __init__(self, model: nn.Module, config: Config, layout: Layout | None) -> None:
        self._config = config
        self._layout = layout
        groups = tensor_groups(model)
        self.first = {alias: first for first, (_, names) in groups.items() for alias in names}
        """The first name of each tensor, by all its names."""
        self.shapes = {alias: tuple(groups[first][0].shape) for alias, first in self.first.items()}
        self.values = {first: tensor for first, (tensor, _) in groups.items()}
        """Each tensor of the model, by its first name."""
        self.owners = {alias: model.get_submodule(alias.rpartition(".")[0]) for alias in self.first}
        """The module of each tensor, by all its names."""
        self._places = (
            {name: [TensorPlace(name, (name,), Rule(name, name))] for name in self.shapes}
            if layout is None
            else layout.origins(self.shapes, config)
        )

    def can_hold(self, updated: Iterable[str], whole: Collection[str]) -> bool:
        """Return whether files with these names can hold updates of some of zoo's weights, and other whole tensors."""
        if any(name not in self._places for name in (*updated, *whole)):
            return False
        dense = [self.place(name) for name in updated]
        return all(place.name.endswith(_WEIGHT) and not place.rule.leading_axes for place in dense) and all(
            self.first[item] in whole for name in whole for item in self.place(name).group
        )

    def are_all(self, names: Collection[str]) -> bool:
        """Return whether these names of one tensor cover every module that shares it."""
        first = self.first[next(iter(names))]
        sharing = {id(self.owners[alias]) for alias, tensor in self.first.items() if tensor == first}
        return sharing == {id(self.owners[name]) for name in names}

    def place(self, name: str) -> TensorPlace:
        """Return the place of one of zoo's tensors."""
        return self._places[name][0]

    def written(self, place: TensorPlace) -> str:
        """Return the name of a tensor in the files of the base model."""
        return place.name if self._layout is None else self._layout.written_name(place.name, self._config)

    def find(self, names: Iterable[str]) -> dict[str, TensorPlace | None]:
        """Return the places that names in the files of the base model stand for; None for unknown ones."""
        by_name = {place.name: place for places in self._places.values() for place in places}
        if self._layout is None:
            return {name: by_name.get(name) for name in names}
        matched = self._layout.match(names, by_name, self._config)
        return {name: by_name.get(matched.get(name, name)) for name in names}


def write_adapter(
    stage: Path, names: AdapterNames, changes: AdapterChanges, *, base: str, rank: int, dropout: float
) -> None:
    """Write the two files of an adapter.

    Where the layout holds several of zoo's weights in one, their updates become one whose rank is the sum of theirs.

    Args:
        stage: the directory to write to.
        names: the names to write.
        changes: the adapter.
        base: hub id or name of the base model.
        rank: the usual rank; others are listed.
        dropout: recorded for further training.
    """
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    places = {names.written(place): place for place in map(names.place, changes.updates)}
    for weight, place in places.items():
        module = weight.removesuffix(_WEIGHT)
        parts = [changes.updates.get(names.first[name]) for name in place.group]
        sizes = [names.shapes[name][0] for name in place.group]
        fused = _fused(parts, sizes)
        tensors[f"{PREFIX}{module}.lora_A.weight"] = fused.a.contiguous()
        tensors[f"{PREFIX}{module}.lora_B.weight"] = place.rule.join(fused.b.split(sizes)).contiguous()
        ranks[module] = len(fused.a)
    heads: dict[str, TensorPlace] = {names.written(place): place for place in map(names.place, changes.whole)}
    for name, place in heads.items():
        tensors[PREFIX + name] = place.rule.to_theirs(
            [changes.whole[names.first[item]] for item in place.group]
        ).contiguous()
    scale = next(iter(changes.updates.values())).scale
    others = {module: value for module, value in ranks.items() if value != rank}
    save_file(tensors, stage / ADAPTER, {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "task_type": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _number(scale * rank),
        "rank_pattern": others,
        "alpha_pattern": {module: _number(scale * value) for module, value in others.items()},
        "lora_dropout": dropout,
        "bias": "none",
        "fan_in_fan_out": any(place.rule.transposed for place in places.values()),
        "target_modules": sorted(ranks),
        "modules_to_save": sorted({name.rpartition(".")[0] for name in heads}) or None,
    }
    write_json(stage / ADAPTER_CONFIG, config)


def _number(value: float) -> float:
    return int(value) if value.is_integer() else value


def _fused(parts: Sequence[Update | None], sizes: Sequence[int]) -> Update:
    """Return the update of weights that are concatenated along their first axes, of these sizes."""
    present = [part for part in parts if part is not None]
    if len(parts) == 1:
        return present[0]
    blocks = [part.b if part is not None else torch.zeros(size, 0) for part, size in zip(parts, sizes, strict=True)]
    return Update(torch.cat([part.a for part in present]), torch.block_diag(*blocks), present[0].scale)
