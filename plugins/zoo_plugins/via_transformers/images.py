"""How the image processor of a checkpoint prepares images, as fields of zoo's configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zoo import UsageError
from zoo.checkpoints import PROCESSOR, RESAMPLING, feature_side, process_images
from zoo_plugins.via_transformers.image_grids import grid_sizes

__all__ = ["read_preparation", "stated_sizes"]


def read_preparation(folder: Path) -> dict[str, Any]:
    """Return the fields with which zoo prepares images as a checkpoint's processor does.

    Processors resize and crop by rules of their own. Those that zoo knows are tried on a few images.

    Raises:
        ImportError: Pillow or transformers is not installed.
        UsageError: none gives the same pixels, or the processor cannot be read.
    """
    processed = process_images(folder)
    shapes = {pixels.shape for pixels in processed.pixels}
    if len(shapes) > 1:
        for fields in _free_candidates(processed.processor):
            if processed.suits(fields) and processed.suits_all_shapes(fields):
                return fields
    elif len(shape := shapes.pop()) == 3:
        for fields in _candidates(processed.processor, *shape):
            if processed.suits(fields):
                return fields
    name = type(processed.processor).__name__
    raise UsageError(f"{name} prepares images in a way that zoo does not know", folder / PROCESSOR)


def stated_sizes(config: Any, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the size and channels of images in a configuration of transformers, as fields of zoo's.

    Of an encoder-decoder, they are those of the encoder.
    """
    config = getattr(config, "vision_config", getattr(config, "encoder", config))
    if grid := grid_sizes(config):
        return {**grid, **{name: value for name, value in chosen.items() if name in grid}}
    size = chosen.get("image_size", getattr(config, "image_size", None))
    if isinstance(size, list | tuple) and len(size) == 2:
        size = size_of(*size)
    stated = {"image_size": size, "num_channels": getattr(config, "num_channels", None)}
    return {name: value for name, value in stated.items() if isinstance(value, int | tuple)}


def size_of(height: int, width: int) -> int | tuple[int, int]:
    """Return the field ``image_size``: one number for squares."""
    return height if height == width else (height, width)


def _free_candidates(processor: Any) -> Iterator[dict[str, Any]]:
    """Yield ways to prepare images whose final sizes depend on the image."""
    size, fields = processor.size or {}, _pixel_fields(processor, 3)
    edges = tuple(size.get(key) for key in ("shortest_edge", "longest_edge"))
    height, width = (size.get(key) for key in ("height", "width"))
    if all(edges) and (patch := feature_side(processor)):
        yield {**fields, "image_size": edges, "image_resize": "area", "image_multiple": patch}
    elif all(edges):
        for multiple in (1, 16):  # the latter is YOLOS's
            yield {**fields, "image_size": edges, "image_resize": "edges", "image_multiple": multiple}
    elif height and width:
        multiple = getattr(processor, "ensure_multiple_of", None) or 1
        yield {**fields, "image_size": size_of(height, width), "image_resize": "fit", "image_multiple": multiple}
    if divisor := getattr(processor, "size_divisor", None):
        yield {**fields, "image_size": 10 * divisor, "image_resize": "round_down", "image_multiple": divisor}


def _pixel_fields(processor: Any, channels: int) -> dict[str, Any]:
    """Return the filter and the normalisation of a processor, as fields of zoo's.

    That of EfficientNet, which ALIGN has too, may also subtract 1, and divide by the deviation twice.
    """
    scale = 255 * (processor.rescale_factor if processor.do_rescale else 1)  # zoo's pixels lie in [0, 1]
    shift, factor = (processor.image_mean, processor.image_std) if processor.do_normalize else (0.0, 1.0)
    if processor.do_rescale and getattr(processor, "rescale_offset", False):
        shift = np.add(shift, 1)
    if getattr(processor, "include_top", False):
        factor = np.multiply(factor, processor.image_std)
    mean, std = (tuple((np.broadcast_to(value, channels) / scale).tolist()) for value in (shift, factor))
    return {
        "num_channels": channels,
        "image_mean": mean,
        "image_std": std,
        "image_resample": RESAMPLING[int(processor.resample or 0)],
        "image_transparency": "white" if getattr(processor, "do_convert_rgb", None) else "ignored",
    }


def _candidates(processor: Any, channels: int, height: int, width: int) -> Iterator[dict[str, Any]]:
    """Yield ways to prepare images of a final size: whether they are stretched, and how much of them is kept."""
    fields = {"image_size": size_of(height, width), **_pixel_fields(processor, channels)}
    size = processor.size or {}
    stated = {int(number) for key in ("shortest_edge", "height") if (number := size.get(key))}
    portions = [getattr(processor, "crop_pct", None) or 1.0, 224 / 256]  # the latter is LeViT's
    wholes = {height, *stated, *(int(number / portion) for number in (height, *stated) for portion in portions)}
    for whole in sorted(whole for whole in wholes if whole >= height):
        for resize in ("stretch", "shortest_edge"):
            yield {**fields, "image_resize": resize, "image_crop": height / whole}
    for resize in ("pad", "turn_and_pad"):  # as Donut does
        yield {**fields, "image_resize": resize}
