"""Shared by the tests that compute a decoder's equations in numpy: random models and texts, and common functions."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["block_weights", "random_ids", "randomized", "rms", "silu", "softmax"]


Model = TypeVar("Model", bound=nn.Module)


def randomized(model: Model, scale: float = 0.5) -> Model:
    """Return a model in float64, for evaluation, with normal noise of this deviation added to all parameters."""
    model.double().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return model


def random_ids(rows: int, length: int) -> Tensor:
    """Return tokens of a vocabulary of 23."""
    return torch.randint(23, (rows, length), generator=torch.Generator().manual_seed(1))


def block_weights(weights: dict[str, np.ndarray], layer: int) -> dict[str, np.ndarray]:
    """Return the weights of a block by their names in it."""
    prefix = f"blocks.{layer}."
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def rms(x: np.ndarray, eps: float) -> np.ndarray:
    """Divide the vectors of the last axis by their root mean square."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max())
    return powers / powers.sum()
