"""The module itself, as something that runs a declared graph on arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zoo.contract import Graph
from zoo.nn import call_graph
from zoo_export.grid import Feeds
from zoo_export.pipeline import Arrays
from zoo_export.values import BFLOAT16

__all__ = ["TorchExecutor", "as_array", "as_tensor", "noisy"]

Array = np.ndarray[Any, Any]

_NOISE = 0.2
"""Standard deviation of the noise on biases and norms; that on a matrix gives its product unit variance."""


def as_tensor(array: Array) -> Tensor:
    """An array as a tensor; they share memory where the array is contiguous."""
    array = np.ascontiguousarray(array)
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_array(tensor: Tensor) -> Array:
    """A tensor on the CPU as an array; they share memory."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(BFLOAT16)
    return tensor.numpy()


def noisy(weight: Tensor, generator: torch.Generator) -> Tensor:
    """A weight with noise: no bias is 0, no norm 1, and no token attends to all others alike."""
    size = weight.shape[-1] ** -0.5 if weight.ndim > 1 else _NOISE
    return weight + torch.randn(weight.shape, generator=generator).mul_(size)


class TorchExecutor:
    """Runs graphs by calling the unmodified module, in whatever dtype it has."""

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
