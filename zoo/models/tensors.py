"""The distinct tensors of a model, their bytes and their digests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from zoo.artifact.weights import digest_tensors
from zoo.models.dtypes import STORED_DTYPES

__all__ = ["bytes_of", "other_owners", "stored_tensors", "tensor_groups", "tensors_digest",
           "weights_digest"]  # fmt: skip


def tensor_groups(model: nn.Module) -> dict[str, tuple[Tensor, tuple[str, ...]]]:
    """Return each distinct tensor of a model, by its first name, with all its names."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return {aliases[0]: (tensors[key], tuple(aliases)) for key, aliases in names.items()}


def stored_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return each distinct tensor by its first name, and a mapping of its other names to the first."""
    groups = tensor_groups(model)
    aliases = {alias: names[0] for _, names in groups.values() for alias in names[1:]}
    return {name: tensor for name, (tensor, _) in groups.items()}, aliases


def other_owners(model: nn.Module, name: str) -> list[str]:
    """Return the other names of a tensor that belong to another module, as those of a head tied to an embedding."""
    owners = {alias: model.get_submodule(alias.rpartition(".")[0]) for alias in _aliases(model, name)}
    return [alias for alias, owner in owners.items() if owner is not owners[name]]


def _aliases(model: nn.Module, name: str) -> tuple[str, ...]:
    return next(names for _, names in tensor_groups(model).values() if name in names)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the values as safetensors stores them, copied only if the tensor is not contiguous or not on the CPU."""
    data: memoryview = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data


def weights_digest(model: nn.Module) -> str:
    """Return the digest of a model's weights, as :func:`write_weights` does."""
    return tensors_digest(stored_tensors(model)[0])


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return one digest for the names, dtypes, shapes and values of tensors."""
    return digest_tensors({name: _digest_tensor(tensor) for name, tensor in tensors.items()})


def _digest_tensor(tensor: Tensor) -> tuple[str, tuple[int, ...], str]:
    return STORED_DTYPES[tensor.dtype], tuple(tensor.shape), hashlib.sha256(bytes_of(tensor)).hexdigest()
