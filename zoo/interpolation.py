"""Interpolation of maps to another size, as ``torch.nn.functional.interpolate`` does it. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from zoo.arrays import Array

__all__ = ["Interpolation", "interpolate", "likeliest_classes"]

Interpolation = Literal["bilinear", "bicubic", "bilinear_corners"]
"""``bilinear_corners`` aligns the centres of the pixels in the corners, the others the corners themselves."""
_CUBIC = -0.75
"""Keys's parameter in PyTorch."""
_STRIP = 2**23
"""Numbers that are computed at a time."""


def interpolate(values: Array, size: tuple[int, int], method: Interpolation) -> Array:
    """Return maps (..., h, w) interpolated to a height and width, in their dtype."""
    rows, columns = (_taps(*pair, method) for pair in zip(values.shape[-2:], size, strict=True))
    return _apply(_apply(values, rows, -2), columns, -1)


def likeliest_classes(logits: Array, size: tuple[int, int], method: Interpolation = "bilinear") -> Array:
    """Return the class of each pixel, (H, W), of the highest interpolated logit: (C, h, w) to a height and width.

    The logits are interpolated a few rows at a time.
    """
    height, width = size
    (indices, weights), columns = _taps(logits.shape[-2], height, method), _taps(logits.shape[-1], width, method)
    step = max(1, _STRIP // (len(logits) * width))
    parts = [
        _apply(_apply(logits, (indices[at : at + step], weights[at : at + step]), -2), columns, -1).argmax(0)
        for at in range(0, height, step)
    ]
    result: Array = np.concatenate(parts)
    return result


def _taps(old: int, new: int, method: Interpolation) -> tuple[Array, Array]:
    """Return the places, (new, k), that each new place is made of, and their weights."""
    if method == "bilinear_corners":
        places = np.arange(new) * ((old - 1) / (new - 1) if new > 1 else 0.0)
    else:
        places = (np.arange(new) + 0.5) * (old / new) - 0.5
    if method == "bicubic":
        first = np.floor(places)
        offset = (places - first)[:, None] + np.array([1.0, 0.0, -1.0, -2.0])
        indices, weights = first[:, None] + np.arange(-1, 3), _cubic(np.abs(offset))
    else:
        places = np.maximum(places, 0.0)
        first = np.floor(places)
        indices = first[:, None] + np.arange(2)
        weights = np.stack((1 - (places - first), places - first), -1)
    return indices.clip(0, old - 1).astype(int), weights


def _cubic(distance: Array) -> Array:
    """Return the weights of the cubic convolution of Keys 1981 at a distance up to 2."""
    a, x = _CUBIC, distance
    near, far = ((a + 2) * x - (a + 3)) * x * x + 1, ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    result: Array = np.where(x <= 1, near, far)
    return result


def _apply(values: Array, taps: tuple[Array, Array], axis: int) -> Array:
    """Return weighted sums of the places of one of the last two axes."""
    indices, weights = taps
    weights = weights.astype(values.dtype)
    result: Array = sum(_terms(values, indices, weights if axis == -1 else weights[..., None], axis))  # type: ignore[assignment]
    return result


def _terms(values: Array, indices: Array, weights: Array, axis: int) -> Iterator[Array]:
    for place in range(indices.shape[1]):
        yield values.take(indices[:, place], axis) * weights[:, place]
