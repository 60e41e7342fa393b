"""Low-rank adapters (Hu et al. 2021) of the dense layers of a model. Importing this module imports torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.artifact import ModelDirectory, describe
from zoo.artifact.weights import digest_layout
from zoo.checkpoints.exporting import choose_layout, imported_layout
from zoo.checkpoints.peft import AdapterChanges, AdapterNames, Update, write_adapter
from zoo.errors import UsageError, argument, nearest
from zoo.models.create import build_on_meta
from zoo.models.tensors import other_owners
from zoo.registry import ModelSpec
from zoo.storage import scratch_folder
from zoo.training.plan import TrainingPlan
from zoo.training.settings import LowRankSettings

__all__ = ["Adapters", "LowRankLinear", "adapt", "add_adapters", "add_updates"]


class LowRankLinear(nn.Module):
    """A dense layer whose weight W acts as W + scale * B A, with the weight and the bias of another one.

    A is initialised as by PEFT, uniformly with the bound 1 / sqrt(inputs) (He et al. 2015, with a slope of sqrt(5)),
    and B is 0, so that the layer first computes what the other one does.
    """

    def __init__(self, dense: nn.Linear, settings: LowRankSettings) -> None:
        super().__init__()
        self.weight = dense.weight
        self.bias = dense.bias
        self.lora_A = nn.Parameter(dense.weight.detach().new_empty(settings.rank, dense.in_features))
        self.lora_B = nn.Parameter(dense.weight.detach().new_zeros(dense.out_features, settings.rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.dropout = nn.Dropout(settings.dropout)
        self.scale = settings.scale

    def forward(self, x: Tensor) -> Tensor:
        update = F.linear(F.linear(self.dropout(x), self.lora_A), self.lora_B)
        return F.linear(x, self.weight, self.bias) + self.scale * update


def add_adapters(model: nn.Module, settings: LowRankSettings, fresh: Collection[str], seed: int) -> None:
    """Replace dense layers of a model by adapted ones, and freeze all other parameters but ``fresh`` ones.

    Args:
        model: changed in place; parameters keep their names.
        settings: the adapters, and which layers get one.
        fresh: names of parameters that are trained themselves.
        seed: determines the initial adapters.

    Raises:
        UsageError: no dense layer matches a target, one shares its weight with another layer, or the model has norms
            whose statistics change in training.
    """
    for name, part in model.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            raise UsageError(f"training changes the statistics of {name}, which adapters cannot hold", argument("lora"))
    dense = {name: part for name, part in model.named_modules() if type(part) is nn.Linear}
    candidates = {name: part for name, part in dense.items() if f"{name}.weight" not in fresh}
    targets = _targets(model, list(candidates), settings.targets)
    for name in targets:
        others = other_owners(model, f"{name}.weight")
        if others:
            raise UsageError(f"{name} has the weight {others[0]}, so an adapter could not be merged", "targets")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in fresh)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _replace_layers(model, {id(candidates[name]): LowRankLinear(candidates[name], settings) for name in targets})


def _replace_layers(model: nn.Module, adapted: Mapping[int, LowRankLinear]) -> None:
    """Replace dense layers, given by their identity, under all their names."""
    for name, part in list(model.named_modules(remove_duplicate=False)):
        if id(part) in adapted:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, adapted[id(part)])


def add_updates(model: nn.Module, updates: Mapping[str, Update], where: object) -> None:
    """Replace dense layers of a model by layers with given updates, which are not merged into the weights.

    Args:
        model: changed in place; parameters keep their names.
        updates: by the name of the weight.
        where: the adapter, for errors.

    Raises:
        UsageError: a weight is not that of a dense layer, or another layer shares it.
    """
    adapted = {}
    for name, update in updates.items():
        layer = model.get_submodule(name.rpartition(".")[0])
        others = other_owners(model, name)
        if others or type(layer) is not nn.Linear or layer.weight is not model.get_parameter(name):
            why = f"is also {others[0]}" if others else "is not the weight of a dense layer"
            raise UsageError(f"{name} {why}, so it cannot have an adapter beside it", where)
        low_rank = LowRankLinear(layer, LowRankSettings(rank=len(update.a)))
        low_rank.lora_A.data, low_rank.lora_B.data = (
            factor.to(layer.weight, copy=True) for factor in (update.a, update.b)
        )
        low_rank.scale = update.scale
        adapted[id(layer)] = low_rank
    _replace_layers(model, adapted)


def _targets(model: nn.Module, dense: list[str], globs: tuple[str, ...]) -> list[str]:
    """Return the names of the dense layers that are adapted."""
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in dense):
            raise UsageError(f"no dense layer matches {glob!r}", "targets", nearest(glob, dense))
    if globs:
        return [name for name in dense if any(fnmatchcase(name, glob) for glob in globs)]
    lists = tuple(f"{name}." for name, part in model.named_modules() if isinstance(part, nn.ModuleList))
    names = [name for name in dense if name.startswith(lists)]
    if not names:
        raise UsageError("the model has no dense layers in lists of blocks", "targets", nearest("", dense))
    return names


@dataclass(frozen=True)
class Adapters:
    """The adapters of a run, and how they are written."""

    settings: LowRankSettings
    base: str
    """Hub id or name of the model that they adapt."""
    weights: str
    """Digest of its weights."""
    fresh: tuple[str, ...]
    """Tensors that the base model lacks; they are written whole."""
    layout: str | None
    """The hub layout whose names are written; None for zoo's own names."""
    names: AdapterNames

    def write(self, stage: Path, model: nn.Module, read: Callable[[str], Tensor]) -> None:
        """Write the adapters of a model in PEFT's files. ``read`` returns the values of a tensor."""
        updates = {
            f"{name}.weight": Update(read(f"{name}.lora_A"), read(f"{name}.lora_B"), scale)
            for name, scale in _adapted(model).items()
        }
        changes = AdapterChanges(updates, {name: read(name) for name in self.fresh})
        write_adapter(
            stage, self.names, changes, base=self.base, rank=self.settings.rank, dropout=self.settings.dropout
        )

    def record(self) -> dict[str, Any]:
        """Return what config.json says of the base model."""
        return {"base": self.base, "weights": self.weights, "layout": self.layout}

    def digests(self) -> dict[str, str]:
        """Return the digest of the base model, which determines a run."""
        return {"base model": self.weights}


def adapt(plan: TrainingPlan, spec: ModelSpec, model: nn.Module, fresh: tuple[str, ...]) -> Adapters | None:
    """Add the adapters of a plan, if it has any, to a model.

    Args:
        plan: its model is a model directory.
        spec: the model that is trained.
        model: changed in place.
        fresh: tensors that the model of the directory lacks.
    """
    if plan.lora is None:
        return None
    base = ModelDirectory.open(plan.model)
    add_adapters(model, plan.lora, fresh, plan.settings.seed)
    updated = [f"{name}.weight" for name in _adapted(model)]
    layout, names = _names(base, spec, updated, fresh)
    source = (base.origin.source if base.origin.kind == "imported" else None) or base.spec.name
    return Adapters(plan.lora, source, digest_layout(base.path, base.layout), fresh, layout, names)


def _names(
    base: ModelDirectory, spec: ModelSpec, updated: list[str], fresh: tuple[str, ...]
) -> tuple[str | None, AdapterNames]:
    """Return the hub layout that can represent the model and its adapters, if there is one, and the names."""
    described = replace(base, description={**base.description, **describe(spec, dtype=base.dtype)})
    preferred = imported_layout(base)
    plain = build_on_meta(spec)
    with scratch_folder() as folder:
        try:
            name, layout, _ = choose_layout(described, plain, folder, preferred)
            names = AdapterNames(plain, spec.config, layout)
            if names.can_hold(updated, fresh):
                return name, names
        except UsageError:
            pass
    return None, AdapterNames(plain, spec.config, None)


def _adapted(model: nn.Module) -> dict[str, float]:
    """Return the names of the adapted layers of a model, each with the factor of its update."""
    return {name: part.scale for name, part in model.named_modules() if isinstance(part, LowRankLinear)}
