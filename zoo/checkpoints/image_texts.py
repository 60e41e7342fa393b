"""How a checkpoint's processor makes the inputs of a model that reads a text with an image."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zoo.checkpoints.image_grids import feature_side
from zoo.checkpoints.images import PROCESSOR, same_pixels, sample_images
from zoo.checkpoints.processors import open_processor, place_of_image, process_prompt, stated_tiles
from zoo.checkpoints.tilings import stated_tiling
from zoo.classes import sides_of
from zoo.contract import Graph, sizes_of
from zoo.errors import UsageError
from zoo.images import ImageReader
from zoo.tiles import ImageTiling
from zoo.tokenizers.image_places import ImagePlaces, count_features

__all__ = ["read_image_prompt", "read_tiling", "sample_shapes", "with_image"]

_SHAPES = (
    (2, 2), (7, 5), (900, 10), (10, 900), (333, 111), (250, 503), (400, 301), (640, 640), (1200, 700), (31, 47),
)  # fmt: skip
"""Widths and heights of images that are cut into many numbers of tiles."""


def sample_shapes() -> list[Any]:
    """Return images of Pillow of many shapes, with which tiles are compared."""
    from PIL import Image

    random = np.random.default_rng(2)
    return [Image.frombytes("RGB", size, random.bytes(3 * math.prod(size))) for size in _SHAPES]


def read_tiling(folder: Path, preparation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with which zoo cuts images into tiles as a checkpoint's processor does; none if it does not.

    Args:
        folder: the checkpoint.
        preparation: the fields with which zoo prepares a whole image.

    Raises:
        ArtifactError: the processor cuts images into too many tiles.
        ImportError: Pillow or transformers is not installed.
        UsageError: zoo does not know how it cuts them, or the processor cannot be used.
    """
    processor, where = open_processor(folder), folder / PROCESSOR
    fields = stated_tiling(processor.image_processor, where)
    if (tiles := stated_tiles(processor)) is not None:
        fields = {"image_tiling": "aspect_ratio", "min_tiles": tiles[0], "max_tiles": tiles[1]}
    if fields is None:
        return {}
    options = {**preparation, **fields}.get
    reader = ImageReader.of(options, preparation["num_channels"], *sides_of(preparation["image_size"]))
    for image in sample_shapes():
        expected = process_prompt(processor, image, place_of_image(processor), where).pixels
        if not same_pixels(reader.normalize(reader.read_tiles(image)), expected):
            name = type(processor.image_processor).__name__
            raise UsageError(f"{name} cuts images into tiles in a way that zoo does not know", where)
    return fields


def read_image_prompt(folder: Path, token: int, preparation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration that say which tokens are in the place of an image in a prompt.

    Args:
        folder: the checkpoint.
        token: the token of each feature of an image.
        preparation: the fields with which zoo prepares images, and cuts them into tiles.

    Raises:
        ArtifactError: the processor cuts images into too many tiles.
        ImportError: Pillow or transformers is not installed.
        UsageError: the processor cannot be used, or puts other tokens among those of a tile, or as many of them as its
            size requires.
    """
    processor, where = open_processor(folder), folder / PROCESSOR
    name, text = type(processor).__name__, place_of_image(processor)
    (prompt_id, *more) = processor.tokenizer.encode(text, add_special_tokens=False)
    images = sample_images()
    tiling, (height, width) = ImageTiling.of(preparation.get, where), sides_of(preparation.get("image_size") or 0)
    tile = width, height
    if tiling is not None:
        most = (8, 8) if tiling.most_columns else (8 * tiling.most, 8)
        images += [*sample_shapes(), images[0].resize(most)]  # the last has as many tiles as possible
    made = [process_prompt(processor, image, text, where, add_special_tokens=False) for image in images]
    columns = [1 if tiling is None else tiling.columns(image.width, image.height, tile) for image in images]
    if tiling is not None and tiling.most_columns:  # by which no image need be one tile, as arrays are
        options = {"do_image_splitting": False, "add_special_tokens": False}
        made, columns = [*made, process_prompt(processor, images[0], text, where, **options)], [*columns, 1]
    if more or token not in made[0].ids:
        raise UsageError(f"{name} puts no token {token} in the place of {text!r}", where)
    if (side := feature_side(processor.image_processor)) is not None:
        if any(prompt.ids != [token] * (math.prod(prompt.pixels.shape[2:]) // side**2) for prompt in made):
            raise UsageError(f"{name} puts tokens in the place of an image that do not follow from its size", where)
        return {"image_prompt_id": prompt_id} if prompt_id != token else {}
    count = max(1, made[0].ids.count(token) // len(made[0].pixels))
    parts = [_parts(prompt.ids, token, count) for prompt in made]
    one, several = (next((part for part in parts if len(part) == 2), [(), ()])), max(parts, key=len)
    fields: dict[str, Any] = {"image_prompt_id": prompt_id, "image_before": one[0], "image_after": several[-1]}
    if len(several) > 2:
        *leads, thumbnail, _ = several
        while leads and not leads[-1] and not (tiling and tiling.most_columns):
            leads.pop()
        fields |= {"image_before_tiles": tuple(leads), "image_before_thumbnail": thumbnail}
    places = ImagePlaces.of(SimpleNamespace(**{**preparation, **fields, "image_token_id": token}), count, where)
    counts = zip(made, columns, strict=True)
    if any(places.tokens(len(prompt.pixels), number) != prompt.ids for prompt, number in counts):
        what = f"{name} puts tokens in the place of an image that do not follow from its number of tiles"
        raise UsageError(what, where)
    return fields


def _cut_grid(pixels: Tensor, steps: Sequence[int], longest: int | None) -> Tensor:
    """Return the part of images, (B, C, height, width), whose features are at most half the tokens of a text."""
    rows, columns = (side // step for side, step in zip(pixels.shape[2:], steps, strict=True))
    if longest is not None:
        rows = min(rows, max(1, math.isqrt(longest // 2)))
        columns = min(columns, max(1, longest // 2 // rows))
    return pixels[..., : rows * steps[0], : columns * steps[1]]


def _parts(ids: Sequence[int], token: int, count: int) -> list[tuple[int, ...]]:
    """Return the tokens before those of each tile, and those after the last."""
    parts: list[list[int]] = [[]]
    found = 0
    for number in ids:
        if number != token:
            parts[-1].append(number)
        elif (found := found + 1) % count == 0:
            parts.append([])
    return [tuple(part) for part in parts]


def with_image(
    inputs: Mapping[str, Tensor], token: int, graphs: Sequence[Graph], longest: int | None
) -> dict[str, Tensor]:
    """Return texts with the tokens of an image after their first token, and no others of these.

    Of images that are cut into tiles, each has two, if a text has room for their tokens. Images of many sizes lose what
    is more than half the tokens of a text.

    Args:
        inputs: ``input_ids`` and ``attention_mask``, each (B, T), ``pixel_values``, (B, C, height, width), and others,
            which are kept.
        token: the token of each feature of an image.
        graphs: the graphs, of which one returns the features.
        longest: the largest number of tokens, None for no limit.

    Raises:
        UsageError: an image leaves no room for a text.
    """
    count, pixels = count_features(graphs) or 0, inputs["pixel_values"]
    if sides := [size.multiple_of for name, size in sizes_of(graphs).items() if name in ("height", "width")]:
        pixels = _cut_grid(pixels, sides, longest)
        count = math.prod(pixels.shape[2:]) // math.prod(sides)
    cut = any(tensor.name == "tile_features" for graph in graphs for tensor in graph.output_tensors())
    if cut and (longest is None or longest > 2 * count):
        count, pixels = 2 * count, torch.cat((pixels, pixels.flip(-1)))
    room = None if longest is None else longest - count
    if room is not None and room < 1:
        raise UsageError(f"an image of {count} tokens leaves no room in {longest} positions")
    ids, mask = (inputs[name][:, :room] for name in ("input_ids", "attention_mask"))
    ids = ids.masked_fill(ids == token, int(token == 0))
    places = ids.new_full((len(ids), count), token)
    return {
        **inputs,
        "input_ids": torch.cat((ids[:, :1], places, ids[:, 1:]), dim=1),
        "attention_mask": torch.cat((mask[:, :1], torch.ones_like(places), mask[:, 1:]), dim=1),
        "pixel_values": pixels,
    }
