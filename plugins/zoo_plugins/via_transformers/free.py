"""Classes of transformers that read images of any size: the sizes of their inputs and outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zoo import UsageError
from zoo_plugins.via_transformers.fields import ClassFields
from zoo_plugins.via_transformers.graphs import size_of_sides

__all__ = ["free_sizes"]

_STRIDE = 32
"""Sizes that differ by multiples of it are different in every map of a backbone."""
_SMALLEST = tuple(2**power for power in range(10))
"""Sides of images that are tried, in pixels."""


def free_sizes(c: ClassFields, model: nn.Module, device: str) -> dict[str, Any]:
    """Return the sizes of outputs, which are fixed or those of the image, and of the smallest image.

    Raises :class:`UsageError` for outputs of other sizes, and for a class that reads no small image.
    """
    allowed = size_of_sides(c)
    (height, width), step = (allowed.nearest(side) for side in (64, 96)), _STRIDE * allowed.multiple_of
    sizes = [(height, width), (height + step, width + 3 * step)]
    calls = [_shapes(c, model, size, device) for size in sizes]
    found: dict[str, list[int | str]] = {}
    for name in calls[0]:
        found[name] = [_dim(c, name, sizes, pair) for pair in zip(*(call[name] for call in calls), strict=True)]
    for side in _SMALLEST:
        try:
            smallest = allowed.nearest(side)
            _shapes(c, model, (smallest, smallest), device)
        except Exception:  # another library may raise anything
            continue
        return {"output_sizes": found, "min_image_size": smallest}
    raise UsageError(f"{c.model_class} reads no image of {smallest} x {smallest} pixels")


def _shapes(c: ClassFields, model: nn.Module, size: tuple[int, int], device: str) -> dict[str, tuple[int, ...]]:
    """Return the sizes of the outputs for an image of a height and width, after the batch."""
    with torch.no_grad():
        outputs = model(pixel_values=torch.zeros(1, c.num_channels or 0, *size, device=device))
    return {name: tuple(value.shape[1:]) for name, value in outputs.items()}


def _dim(c: ClassFields, name: str, sizes: list[tuple[int, int]], pair: tuple[int, ...]) -> int | str:
    """Return the size of an output for images of two sizes: a number, or the side of the image that it is."""
    if pair[0] == pair[1]:
        return pair[0]
    for side, values in zip(("height", "width"), zip(*sizes, strict=True), strict=True):
        if values == pair:
            return side
    raise UsageError(f"{c.model_class} returns {name} of neither a fixed size nor that of the image")
