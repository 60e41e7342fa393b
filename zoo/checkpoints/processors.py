"""The processor of a checkpoint for texts with an image: read, checked, and applied by transformers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.artifact.weights import load_json
from zoo.checkpoints.image_grids import GRID, check_grid, feature_side, pixels_of
from zoo.checkpoints.images import PROCESSOR
from zoo.checkpoints.tilings import stated_tiling
from zoo.errors import ArtifactError, UsageError, ZooError
from zoo.limits import IMAGE_PIXELS, IMAGE_TILES, TEXT_CHARACTERS

__all__ = ["ProcessedPrompt", "open_processor", "place_of_image", "process_prompt", "stated_tiles"]

_INPUTS = {
    GRID, "attention_mask", "input_ids", "labels", "mm_token_type_ids", "pixel_attention_mask", "pixel_values",
    "token_type_ids",
}  # fmt: skip
"""Outputs that a processor may have. Token types and labels are not read: models know the places of images. Masks of
pixels are 1."""
_FILES = ("processor_config.json", PROCESSOR, "tokenizer_config.json")
"""Files that may name the class of a processor, the first that does."""
_COUNTS = ("image_seq_len", "image_seq_length", "num_image_tokens", "num_additional_image_tokens")
"""Values that say how many tokens an image has, all of which a processor writes into the text."""
_TILES = ("crop_to_patches", "min_patches", "max_patches")
"""Values that say into how many tiles images are cut."""


@dataclass(frozen=True)
class ProcessedPrompt:
    """A prompt with an image, as a processor prepares it."""

    ids: list[int]
    pixels: Array
    """(tiles, channels, height, width); one tile of an image that is not cut."""


def open_processor(folder: Path) -> Any:
    """Return the processor of a checkpoint, which prepares images with Pillow.

    Raises:
        ArtifactError: it states no size of patches, which it needs, or would cut images into more tiles or pixels than
            are allowed.
        ImportError: transformers is not installed.
        UsageError: the processor cannot be read, or is not one of images and texts.
    """
    import transformers

    load_all: Any = transformers.AutoProcessor.from_pretrained
    load_images: Any = transformers.AutoImageProcessor.from_pretrained
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        for path in (folder / name for name in _FILES):  # a processor may repeat a token so often when it is made
            if path.exists():
                _check_counts(load_json(path).get, path)
        images = load_images(folder, backend="pil", **options)
        processor = _without_videos(folder, images, options)
        if processor is None:
            processor = load_all(folder, **options)
            processor.image_processor = images
        assert isinstance(place_of_image(processor), str)
        _check_tiles(processor, folder / PROCESSOR)
        if feature_side(images) is not None:
            check_grid(images, folder / PROCESSOR)
        _check_counts(lambda name: getattr(processor, name, None), folder / _FILES[0])
    except ZooError:
        raise
    except Exception as error:  # another library may raise anything
        said = " ".join(str(error).split())[:200]
        raise UsageError(f"the processor cannot be used: {said}", folder) from error
    if hasattr(processor, "patch_size") and not processor.patch_size:  # by which it counts the tokens of an image
        said = json.dumps(processor.patch_size)
        raise ArtifactError(f"patch_size must be that of the model, got {said}", folder / _FILES[0])
    return processor


def _check_counts(stated: Callable[[str], Any], where: Path) -> None:
    """Raise :class:`ArtifactError` for impossible or excessive numbers of tokens of an image."""
    for name in _COUNTS:
        count = stated(name) or 0
        if type(count) is not int or count < 0:
            raise ArtifactError(f"{name} {count!r:.40} is not possible", where)
        TEXT_CHARACTERS.check(count, f"{name} {count:,}", where)


def _without_videos(folder: Path, images: Any, options: Mapping[str, Any]) -> Any:
    """Return the processor of a checkpoint for images, texts and videos, but without videos, which need torchvision.

    It is None if torchvision is installed, or if the processor is not one of videos: transformers then loads it whole.
    """
    import transformers
    from transformers.models.auto import processing_auto
    from transformers.utils import import_utils

    files = (folder / name for name in _FILES)
    names = (load_json(path).get("processor_class") for path in files if path.exists())
    by_type: Any = vars(processing_auto)["PROCESSOR_MAPPING_NAMES"]
    name = next(filter(None, names), None) or by_type.get(load_json(folder / "config.json").get("model_type"))
    cls: Any = getattr(transformers, str(name), None)
    if import_utils.is_torchvision_available() or cls is None or "video_processor" not in cls.get_attributes():
        return None

    class WithoutVideos(cls):  # type: ignore[misc]
        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(name, argument)

    WithoutVideos.__name__ = cls.__name__
    load_tokenizer: Any = transformers.AutoTokenizer.from_pretrained
    parts = {"image_processor": images, "tokenizer": load_tokenizer(folder, **options), "video_processor": None}
    values, _ = cls.get_processor_dict(folder, **options)
    module: Any = sys.modules[cls.__module__]
    words = getattr(module, "num2words", None)
    module.num2words = words or str  # a library that describes videos, without which SmolVLM's is not made
    try:
        return WithoutVideos.from_args_and_dict([parts[name] for name in cls.get_attributes()], values)
    finally:
        module.num2words = words


def _check_tiles(processor: Any, where: Path) -> None:
    """Raise an error for a processor that cuts images into too many tiles, too large ones, or an impossible number."""
    if (tiles := stated_tiles(processor)) is None:
        grid = stated_tiling(processor.image_processor, where)
        count = (1 + grid["max_tiles"] if grid else 1) * (getattr(processor, "image_seq_len", None) or 0)
        TEXT_CHARACTERS.check(count, f"images of {count:,} tokens", where)
        return
    least, most = tiles
    if not 1 <= least <= most:
        raise UsageError(f"min_patches {least} does not lie between 1 and max_patches {most}", where)
    IMAGE_TILES.check(most, f"max_patches {most:,}", where)
    height, width = ((processor.image_processor.size or {}).get(side) or 0 for side in ("height", "width"))
    IMAGE_PIXELS.check(most * height * width, f"{most} tiles of {width} x {height} pixels", where)


def stated_tiles(processor: Any) -> tuple[int, int] | None:
    """Return the smallest and largest number of tiles into which images are cut, None if they are not.

    The options of a processor for images and texts come before those of its part for images.
    """
    options: Mapping[str, Any] = getattr(processor, "images_kwargs", None) or {}
    cuts, least, most = (options.get(name, getattr(processor.image_processor, name, None)) for name in _TILES)
    return (int(least or 1), int(most)) if cuts and most and int(most) > 1 else None


def place_of_image(processor: Any) -> str:
    """Return the text that stands for an image in prompts, which may be that of its features."""
    return getattr(processor, "image_placeholder_token", None) or processor.image_token


def process_prompt(processor: Any, image: Any, text: str, where: Path, **options: Any) -> ProcessedPrompt:
    """Apply a processor to an image of Pillow and a prompt.

    Raises :class:`UsageError` if that fails, or gives other inputs than token ids and the pixels of tiles.
    """
    try:
        found = dict(processor(images=[image], text=[text], **options))
        (ids,), pixels = found["input_ids"], pixels_of(processor.image_processor, found)
        others = sorted(found.keys() - _INPUTS)
        if not np.all(found.get("pixel_attention_mask", 1)):
            others.append("a mask of padding in images")
    except Exception as error:  # another library may raise anything
        said = " ".join(str(error).split())[:200]
        raise UsageError(f"the processor cannot be used: {said}", where) from error
    name = type(processor).__name__
    if others:
        raise UsageError(f"{name} makes {', '.join(others)} beside ids and pixels, which is not supported", where)
    if pixels.ndim != 4:
        raise UsageError(f"{name} makes pixels {pixels.shape} of an image, which is not supported", where)
    return ProcessedPrompt([int(token) for token in ids], pixels)
