"""Images that a checkpoint's processor turns into grids of patches, as images again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.limits import IMAGE_PIXELS

__all__ = ["GRID", "check_grid", "feature_side", "pixels_of"]

GRID = "image_grid_thw"
"""The output of a processor that has the frames, rows and columns of patches of each image."""


def feature_side(processor: Any) -> int | None:
    """Return the side of a feature of an image in pixels, for an image processor that makes patches; else None."""
    patch, merge = (getattr(processor, name, None) for name in ("patch_size", "merge_size"))
    return patch * merge if isinstance(patch, int) and isinstance(merge, int) else None


def check_grid(processor: Any, where: Path) -> None:
    """Raise :class:`zoo.ArtifactError` if an image processor makes patches of images that are too large to be tried."""
    size, frames = dict(processor.size or {}), getattr(processor, "temporal_patch_size", None) or 1
    stated = [size.get(key) or 0 for key in ("shortest_edge", "longest_edge")]
    pixels = max(*stated, (feature_side(processor) or 0) ** 2)
    IMAGE_PIXELS.check(pixels * frames, f"images of {pixels:,} pixels in {frames:,} frames", where)


def pixels_of(processor: Any, found: Mapping[str, Any]) -> Array:
    """Return the images, or tiles, of an image processor's result, (images, channels, height, width).

    Raises ``ValueError`` for patches of several images, or of frames that differ.
    """
    pixels = np.asarray(found["pixel_values"])
    if GRID not in found:
        return pixels[0] if pixels.ndim == 5 and len(pixels) == 1 else pixels  # the tiles of an image
    ((count, rows, columns),) = np.asarray(found[GRID]).tolist()
    size, merge, frames = processor.patch_size, processor.merge_size, processor.temporal_patch_size
    shape = rows // merge, columns // merge, merge, merge, -1, frames, size, size
    patches = pixels.reshape(shape)  # feature rows and columns, rows and columns in each, channels, frames, pixels
    if count != 1 or not (patches == patches[..., :1, :, :]).all():
        raise ValueError("the patches of an image have several frames")
    image = patches[..., 0, :, :].transpose(4, 0, 2, 5, 1, 3, 6)
    return image.reshape(1, -1, rows * size, columns * size)
