"""Optimisers, groups of parameters, and schedules of the learning rate. Importing this module imports torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zoo.errors import UsageError, nearest
from zoo.training.settings import TrainingSettings

__all__ = ["freeze", "learning_rate", "make_optimizer", "schedule_factor"]


def freeze(model: nn.Module, globs: tuple[str, ...]) -> None:
    """Exclude parameters whose names match a glob from training.

    Raises :class:`UsageError` if a glob matches no parameter, or if all parameters are frozen.
    """
    names = [name for name, _ in model.named_parameters()]
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
            raise UsageError(f"no parameter matches {glob!r}", "freeze", nearest(glob, names))
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, glob) for glob in globs):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError("all parameters are frozen", "freeze")


def _decays(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, bool]]:
    """Yield each trained parameter with its name, and whether its weight decays: matrices that are no embeddings."""
    embeddings = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, parameter, parameter.ndim >= 2 and id(parameter) not in embeddings


def _depths(model: nn.Module) -> dict[str, int]:
    """Return the number of the block, from 1, of each parameter in a block; 0 for embeddings, and the largest after.

    Blocks are the members of the model's longest ``nn.ModuleList``. Parameters of modules that are declared before it
    count as below the first block, those declared after it as above the last.
    """
    lists = {name: part for name, part in model.named_modules() if isinstance(part, nn.ModuleList)}
    blocks = max(lists, key=lambda name: len(lists[name]), default="")
    depths, seen = {}, False
    for name, _ in model.named_parameters():
        match = re.match(rf"{re.escape(blocks)}\.(\d+)\.", name) if blocks else None
        seen = seen or match is not None
        depths[name] = int(match[1]) + 1 if match else (len(lists[blocks]) + 1 if seen else 0)
    return depths


def make_optimizer(model: nn.Module, settings: TrainingSettings) -> torch.optim.Optimizer:
    """Return the optimiser of a model's trained parameters.

    Weight decay applies to matrices only. With ``layer_decay``, each group has the factor of its block as ``scale``.
    """
    depths = _depths(model) if settings.layer_decay != 1 else {}
    top = max(depths.values(), default=0)
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter, decays in _decays(model):
        scale = settings.layer_decay ** (top - depths.get(name, top))
        groups.setdefault((decays, scale), []).append(parameter)
    parameters = [
        {"params": members, "weight_decay": settings.weight_decay if decays else 0.0, "scale": scale}
        for (decays, scale), members in groups.items()
    ]
    rate, betas = settings.learning_rate, (settings.beta1, settings.beta2)
    match settings.optimizer:
        case "adamw":
            return torch.optim.AdamW(parameters, rate, betas, settings.epsilon, fused=True)
        case "adam":
            return torch.optim.Adam(parameters, rate, betas, settings.epsilon, fused=True)
        case "sgd":
            sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
            return torch.optim.SGD(parameters, rate, settings.beta1, fused=not sharded)  # torch has no such kernel
        case "adafactor":
            return torch.optim.Adafactor(parameters, rate)


def schedule_factor(settings: TrainingSettings, step: int, steps: int) -> float:
    """Return the learning rate of a step, counted from 0, of ``steps`` as a fraction of the largest one.

    ``inverse-sqrt`` is that of Vaswani et al. 2017, equation 3, which has its largest rate after the warm-up.
    """
    number, warmup = step + 1, max(settings.warmup_steps, 1)
    if number < warmup:
        return number / warmup
    if settings.schedule == "constant":
        return 1.0
    if settings.schedule == "inverse-sqrt":
        return math.sqrt(warmup / number)
    least = settings.min_learning_rate / settings.learning_rate
    progress = min(1.0, (number - warmup) / max(1, steps - warmup + 1))
    remaining = 1 - progress if settings.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return least + (1 - least) * remaining


def learning_rate(optimizer: torch.optim.Optimizer, settings: TrainingSettings, step: int, steps: int) -> float:
    """Set the learning rate of a step in every group, and return that of groups whose factor is 1."""
    rate = settings.learning_rate * schedule_factor(settings, step, steps)
    for group in optimizer.param_groups:
        group["lr"] = rate * group["scale"]
    return rate
