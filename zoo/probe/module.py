"""Execution of declared graphs by the PyTorch module itself, on numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zoo.contract import Graph
from zoo.nn import call_graph
from zoo.probe.dtypes import BFLOAT16
from zoo.probe.inputs import Feeds
from zoo.probe.pipeline import Arrays

__all__ = ["TorchExecutor", "as_array", "as_tensor", "noisy", "perturb", "weights_of"]

Array = np.ndarray[Any, Any]

_NOISE = 0.2
"""Standard deviation of the noise on biases and norms. Noise on a matrix is scaled for products of unit variance."""


def as_tensor(array: Array) -> Tensor:
    """Convert an array to a tensor, sharing memory if the array is contiguous."""
    array = np.ascontiguousarray(array)
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_array(tensor: Tensor) -> Array:
    """Convert a CPU tensor to an array that shares its memory."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(BFLOAT16)
    return tensor.numpy()


def weights_of(model: nn.Module) -> list[Tensor]:
    """Return the floating-point parameters and persistent buffers of a model, tied ones once."""
    found = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    return [tensor for tensor in found.values() if tensor.is_floating_point()]


def noisy(weight: Tensor, generator: torch.Generator, size: float | None = None) -> Tensor:
    """Add noise to a weight, so that biases are not 0, norms not 1, and attention not uniform.

    Weights that are all positive stay positive, because a model may take their root or logarithm.

    Args:
        weight: the weight.
        generator: the source of the noise.
        size: its standard deviation, by default 0.2 for vectors and less for matrices.
    """
    if size is None:
        size = weight.shape[-1] ** -0.5 if weight.ndim > 1 else _NOISE
    noise = torch.randn(weight.shape, generator=generator).mul_(size)
    return weight * noise.exp_() if bool((weight > 0).all()) else weight + noise


def perturb(model: nn.Module, seed: int = 0) -> None:
    """Add noise to every weight of a model, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in weights_of(model):
            weight.copy_(noisy(weight, generator))


class TorchExecutor:
    """Runs graphs by calling the unmodified module, in its own dtype."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.real = next(model.parameters()).dtype
        self.dtype: np.dtype[Any] = as_array(torch.empty(0, dtype=self.real)).dtype

    def __call__(self, graph: Graph, feeds: Feeds) -> Arrays:
        tensors = {name: as_tensor(value) for name, value in feeds.items()}
        tensors = {
            name: tensor.to(self.real) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()
        }
        with torch.inference_mode():
            return {name: as_array(tensor) for name, tensor in call_graph(self.model, graph, tensors).items()}
