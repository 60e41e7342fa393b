"""Low-rank adapters in the files of the PEFT library, with the names of a hub layout or with zoo's own.

Importing this module imports torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from zoo.artifact import ADAPTER, ADAPTER_CONFIG, write_json
from zoo.artifact.weights import load_json
from zoo.checkpoints.layout import Layout, Place, Rule
from zoo.config import Config
from zoo.errors import ArtifactError, UsageError
from zoo.models.tensors import tensor_groups

__all__ = ["AdapterNames", "Changes", "Update", "read_adapter", "write_adapter"]

_PREFIX = "base_model.model."
_WEIGHT = ".weight"
_FACTOR = re.compile(r"(.+)\.lora_(A|B)\.weight")
_USED = ("alpha_pattern", "lora_alpha", "peft_type", "r", "use_rslora")
_INERT = (
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
    "megatron_config", "megatron_core", "modules_to_save", "peft_version", "qalora_group_size", "rank_pattern",
    "revision", "target_modules", "task_type",
)  # fmt: skip
"""Keys that do not affect what the tensors in the file add to a model."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",), "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}  # fmt: skip
"""Values of other keys that are supported, beside empty ones. Other initialisations change the base model."""


@dataclass(frozen=True, eq=False)
class Update:
    """The update of the weight of a dense layer, (outputs, inputs): ``scale * b @ a``."""

    a: Tensor
    """(rank, inputs)"""
    b: Tensor
    """(outputs, rank)"""
    scale: float

    def added_to(self, weight: Tensor) -> Tensor:
        """Return the sum with a weight, computed in float64 and rounded to the weight's dtype."""
        return (weight.double() + self.scale * (self.b.double() @ self.a.double())).to(weight.dtype)


@dataclass(frozen=True)
class Changes:
    """The changes of an adapter to a model, by the name of the tensor."""

    updates: Mapping[str, Update]
    whole: Mapping[str, Tensor]
    """Tensors that replace those of the model, such as a new head."""


class AdapterNames:
    """The correspondence of a model's tensors with the names in the files of an adapter.

    Args:
        model: the model, possibly on the meta device.
        config: its configuration.
        layout: the hub layout whose names the files have; None for zoo's own names.
    """

    def __init__(self, model: nn.Module, config: Config, layout: Layout | None) -> None:
        self._config, self._layout = config, layout
        groups = tensor_groups(model)
        self.first = {alias: first for first, (_, names) in groups.items() for alias in names}
        """The first name of each tensor, by all its names."""
        self.shapes = {alias: tuple(groups[first][0].shape) for alias, first in self.first.items()}
        self._places = (
            {name: [Place(name, (name,), Rule(name, name))] for name in self.shapes}
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

    def place(self, name: str) -> Place:
        """Return the place of one of zoo's tensors."""
        return self._places[name][0]

    def written(self, place: Place) -> str:
        """Return the name of a tensor in the files of the base model."""
        return place.name if self._layout is None else self._layout.written_name(place.name, self._config)

    def find(self, names: Iterable[str]) -> dict[str, Place | None]:
        """Return the places that names in the files of the base model stand for; None for unknown ones."""
        known = {place.name: place for places in self._places.values() for place in places}
        if self._layout is None:
            return {name: known.get(name) for name in names}
        matched = self._layout.match(names, known, self._config)
        return {name: known.get(matched.get(name, name)) for name in names}


def write_adapter(stage: Path, names: AdapterNames, changes: Changes, *, base: str, rank: int, dropout: float) -> None:
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
        found = _fused(parts, sizes)
        tensors[f"{_PREFIX}{module}.lora_A.weight"] = found.a.contiguous()
        tensors[f"{_PREFIX}{module}.lora_B.weight"] = place.rule.join(found.b.split(sizes)).contiguous()
        ranks[module] = len(found.a)
    heads: dict[str, Place] = {names.written(place): place for place in map(names.place, changes.whole)}
    for name, place in heads.items():
        tensors[_PREFIX + name] = place.rule.to_theirs(
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


def read_adapter(directory: Path, names: AdapterNames) -> Changes:
    """Read an adapter that PEFT or :func:`write_adapter` wrote, for a model.

    Raises:
        ArtifactError: a file is missing or damaged, or the tensors are not those of an adapter of this model.
        UsageError: the adapter is of a kind that zoo does not read.
    """
    config = _read_config(directory / ADAPTER_CONFIG)
    tensors = _read_tensors(directory / ADAPTER)
    factors: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    problems: list[str] = []
    for key, value in tensors.items():
        name = key.removeprefix(_PREFIX)
        factor = _FACTOR.fullmatch(name)
        if factor is not None and value.ndim == 2:
            factors.setdefault(factor[1], {})[factor[2]] = value
        elif "lora_" in name:
            problems.append(f"{key} is not supported")
        else:
            whole[name] = value
    found = names.find([*(module + _WEIGHT for module in factors), *whole])
    updates: dict[str, Update] = {}
    replaced: dict[str, Tensor] = {}
    for module, pair in factors.items():
        place = found[module + _WEIGHT]
        problem = _problem(module, pair, place, names)
        if place is None or problem is not None:
            problems.append(str(problem))
            continue
        parts = place.rule.split(pair["B"], [names.shapes[name][0] for name in place.group])
        scale = _scale(config, module, len(pair["A"]))
        for name, b in zip(place.group, parts, strict=True):
            if names.first[name] in updates:
                problems.append(f"{module} is an update of {names.first[name]}, which has another one")
            updates[names.first[name]] = Update(pair["A"], b, scale)
    for name, value in whole.items():
        place = found[name]
        if place is None:
            problems.append(f"the model has no {name}")
            continue
        shapes = [names.shapes[item] for item in place.group]
        if tuple(value.shape) != place.rule.shape(shapes):
            problems.append(f"{name} has shape {tuple(value.shape)}, not {place.rule.shape(shapes)}")
            continue
        values = place.rule.to_ours(value, [shape[0] for shape in shapes] if len(shapes) > 1 else [1])
        replaced |= {names.first[item]: part for item, part in zip(place.group, values, strict=True)}
    if problems:
        raise ArtifactError(f"not an adapter of this model ({'; '.join(problems)})", directory)
    return Changes(updates, replaced)


def _problem(module: str, pair: Mapping[str, Tensor], place: Place | None, names: AdapterNames) -> str | None:
    """Return why the factors of a layer do not fit the model, or None."""
    if place is None:
        return f"the model has no {module}"
    shapes = [names.shapes[name] for name in place.group]
    if any(len(shape) != 2 for shape in shapes) or place.rule.leading_axes:
        return f"{module} is no dense layer"
    wanted = (sum(shape[0] for shape in shapes), shapes[0][1])
    if pair.keys() != {"A", "B"}:
        return f"{module} has only one of lora_A and lora_B"
    (rank, inputs), (outputs, columns) = pair["A"].shape, pair["B"].shape
    if (outputs, inputs) != wanted or rank != columns or not rank:
        return f"{module} has factors of shapes {(outputs, columns)} and {(rank, inputs)} for a weight of {wanted}"
    return None


def _read_config(file: Path) -> dict[str, Any]:
    config = load_json(file)
    if config.get("peft_type") != "LORA":
        raise UsageError(f"peft_type {config.get('peft_type')!r} is not supported, only 'LORA'", file)
    for key, value in config.items():
        supported = key in _USED or key in _INERT or not value or value in _NEUTRAL.get(key, ())
        if not supported:
            raise UsageError(f"{key} {value!r} is not supported", file)
    rank, alpha, pattern = config.get("r"), config.get("lora_alpha"), config.get("alpha_pattern") or {}
    numbers = (alpha, *(pattern.values() if isinstance(pattern, dict) else ("",)))
    if type(rank) is not int or rank < 1 or not all(type(item) in (int, float) for item in numbers):
        raise ArtifactError("r must be a positive integer, and lora_alpha and those of alpha_pattern numbers", file)
    try:
        for key in pattern:
            re.compile(key)
    except re.error as error:
        raise ArtifactError(f"alpha_pattern has a key that is no regular expression ({error})", file) from error
    return config


def _read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as reader:
            tensors: dict[str, Tensor] = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise ArtifactError("missing", file) from error
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"not valid safetensors ({error})", file) from error
    for name, value in tensors.items():
        if not value.is_floating_point() or not value.double().isfinite().all():  # float8 has no isfinite
            raise ArtifactError(f"{name} has values that are not finite floating-point numbers", file)
    if not tensors:
        raise ArtifactError("holds no tensors", file)
    return tensors


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return the factor of a layer's update, as PEFT computes it; ``use_rslora`` is that of Kalajdzievski 2023."""
    pattern: Mapping[str, float] = config.get("alpha_pattern") or {}
    matching = (value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module))
    alpha = float(next(matching, config["lora_alpha"]))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
