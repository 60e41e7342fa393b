"""Shared by the tests that compute a decoder's equations in numpy: random models and texts, and common functions."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from zoo.nn import Cache

__all__ = [
    "block_weights",
    "check_padding",
    "check_parts",
    "random_ids",
    "randomized",
    "rms",
    "rms_decoder",
    "silu",
    "softmax",
]


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


def check_parts(model: Any, cuts: tuple[int, ...]) -> None:
    """Calls on parts of two texts, cut after these numbers of tokens, give the same as one call."""
    tokens, cache = random_ids(2, 37), Cache.empty(model.config.num_layers)
    parts = [model(tokens[:, start:stop], None, cache) for start, stop in pairwise((0, *cuts, 37))]
    assert_close(torch.cat(parts, 1), model(tokens))


def check_padding(model: nn.Module, side: str) -> None:
    """Nine tokens of padding on a side of a text change nothing."""
    tokens, padding = random_ids(1, 20), torch.zeros(1, 9, dtype=torch.long)
    parts = [padding, tokens] if side == "left" else [tokens, padding]
    mask = torch.cat([torch.full_like(part, part is tokens) for part in parts], 1)
    found = model(torch.cat(parts, 1), mask)
    assert_close(found[:, 9:] if side == "left" else found[:, :20], model(tokens))


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


def rms_decoder(
    model: Any,
    tokens: list[int],
    attend: Callable[[dict[str, np.ndarray], np.ndarray, int], np.ndarray],
    feed_forward: Callable[[dict[str, np.ndarray], np.ndarray], np.ndarray],
) -> np.ndarray:
    """Return the logits (T, V) of a decoder with RMS norms before its sub-layers.

    Args:
        model: the decoder.
        tokens: the ids of a text.
        attend: returns the attention of states (T, E), given the weights of the block and its number.
        feed_forward: returns the feed-forward network or experts of one token (E), given the weights of the block.
    """
    c = model.config
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    x = weights["token_embedding.weight"][tokens]
    for layer in range(c.num_layers):
        w = block_weights(weights, layer)
        x = x + attend(w, rms(x, c.norm_eps) * w["norm_1.weight"], layer)
        x = x + np.stack([feed_forward(w, token) for token in rms(x, c.norm_eps) * w["norm_2.weight"]])
    head = weights["token_embedding.weight"] if c.tie_embeddings else weights["head.weight"]
    return rms(x, c.norm_eps) * weights["norm.weight"] @ head.T
