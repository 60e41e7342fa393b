"""How the images of a checkpoint are prepared: preprocessor_config.json, read, written, and applied by transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.checkpoints.files import processor_file
from zoo.checkpoints.image_grids import check_grid, feature_side, pixels_of
from zoo.checkpoints.source import Checkpoint
from zoo.checkpoints.tilings import stated_tiling
from zoo.classes import ImagePreparation
from zoo.errors import ArtifactError, UsageError, ZooError
from zoo.images import ImageReader
from zoo.limits import IMAGE_PIXELS

__all__ = [
    "PROCESSOR",
    "RESAMPLING",
    "ProcessedImages",
    "first_difference",
    "image_processor",
    "process_images",
    "read_preparation",
    "same_pixels",
    "sample_images",
]

PROCESSOR = "preprocessor_config.json"
"""The file of a checkpoint that describes how images or sound are prepared."""
RESAMPLING = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""Filters of Pillow, by number."""
_IMAGES = ("image_mean", "image_std")
_SIZES = ((97, 61), (64, 64), (53, 148), (640, 427))
"""Widths and heights of the images that are compared."""
_SHAPES = (
    (1, 1), (1, 1000), (1000, 1), (3000, 20), (20, 3000), (15, 16), (31, 33), (517, 388), (800, 801), (1333, 799),
)  # fmt: skip
"""Widths and heights of images with which preparations to many sizes are compared."""
_TRANSPARENT = (20, 90, 50)
"""A colour in the middle of the first of them, which is declared transparent."""
_WHITENING = ("BitImage", "CLIPImage", "CLIPFeature", "SiglipImage")
"""Processors that convert images to RGB by default, and make transparent colours white."""
_CONVNEXT = {"size": 384, "crop_pct": 224 / 256, "resample": RESAMPLING.index("bicubic")}
"""Defaults of ConvNeXt's processor, which ResNet has too."""
_SEGFORMER = {
    "size": 512, "image_mean": (0.485, 0.456, 0.406), "image_std": (0.229, 0.224, 0.225),
    "resample": RESAMPLING.index("bilinear"),
}  # fmt: skip
"""Defaults of SegFormer's processor, which crops nothing whatever it is told."""
_DETR = {"size": {"shortest_edge": 800, "longest_edge": 1333}, "max_size": 1333}
"""Defaults of DETR's processor."""
_STRETCHED = 384
"""The side from which that processor stretches images, whose margins it cuts off otherwise."""
_CLOSE = 1e-5
"""Maximum difference of normalised pixels. A pixel that differs by one of 255 steps is off by more than 1e-3."""


@dataclass(frozen=True)
class ProcessedImages:
    """A few images of noise, and what the original library makes of them."""

    library: Any
    """The original library, a module with a version."""
    processor: Any
    """The image processor, if the library is transformers; else None."""
    images: Sequence[Any]
    """Images of Pillow."""
    pixels: Sequence[Array]
    """Its result for each image, (channels, height, width)."""

    def suits(self, fields: Mapping[str, Any]) -> bool:
        """Return whether zoo makes the same pixels with these fields of :class:`zoo.ImagePreparation`."""
        return first_difference(self, ImageReader.of(fields.get, *self.pixels[0].shape)) is None

    def suits_all_shapes(self, fields: Mapping[str, Any]) -> bool:
        """Return whether zoo makes the same pixels of images of extreme shapes, and refuses those that are refused."""
        from PIL import Image

        reader, random = ImageReader.of(fields.get, 3, 0, 0), np.random.default_rng(1)
        for size in _SHAPES:
            image = Image.frombytes("RGB", size, random.bytes(3 * math.prod(size)))
            wanted, found = np.empty(0), np.empty(0)  # of an image that is refused
            with suppress(Exception):  # another library may raise anything
                wanted = pixels_of(self.processor, self.processor(image, return_tensors="np"))[0]
            with suppress(ArtifactError):
                found = reader.normalize(reader.read(image))
            if not same_pixels(found, wanted):
                return False
        return True


def first_difference(processed: ProcessedImages, reader: ImageReader) -> int | None:
    """Return the number of the first image of which a reader makes other pixels; None if it makes the same."""
    for number, (image, expected) in enumerate(zip(processed.images, processed.pixels, strict=True)):
        found = reader.normalize(reader.read(image))
        if not same_pixels(found, expected):
            return number
    return None


def same_pixels(found: Array, expected: Array) -> bool:
    """Return whether normalised pixels are equal up to rounding."""
    return found.shape == expected.shape and np.allclose(found, expected, rtol=0, atol=_CLOSE)


def process_images(folder: Path, *, mode: str = "RGB") -> ProcessedImages:
    """Apply the image processor of a checkpoint to a few images, as transformers does with Pillow.

    They are not cut into tiles: ``zoo.checkpoints.image_texts`` compares these. ``mode`` is the mode of the images.

    Raises:
        ImportError: Pillow or transformers is not installed.
        UsageError: the processor cannot be read or cannot be applied, or also reads parts of images.
    """
    import transformers

    images, where = [image.convert(mode) for image in sample_images()], processor_file(folder)
    load: Any = transformers.AutoImageProcessor.from_pretrained
    try:
        processor = load(folder, backend="pil", local_files_only=True, trust_remote_code=False)
        _check_sizes(processor, where)
        is_grid = stated_tiling(processor, where) is not None
        if getattr(processor, "do_pan_and_scan", None):
            remedy = "set it to false: the image is then read as a whole"
            raise UsageError("do_pan_and_scan, by which images are also read in parts, is not supported", where, remedy)
        _filter(getattr(processor, "resample", None), where)
        if hasattr(processor, "crop_to_patches"):
            processor.crop_to_patches = False
        if is_grid:
            processor.do_resize = processor.do_image_splitting = False
        pixels = [pixels_of(processor, processor(image, return_tensors="np"))[0] for image in images]
    except ZooError:
        raise
    except Exception as error:  # another library may raise anything
        said = " ".join(str(error).split())[:200]
        raise UsageError(f"the image processor cannot be used: {said}", where) from error
    return ProcessedImages(transformers, processor, images, pixels)


def _check_sizes(processor: Any, where: Path) -> None:
    """Raise :class:`ArtifactError` for images that are too large to be tried."""
    if feature_side(processor) is not None:
        check_grid(processor, where)
        return
    for sizes in (processor.size, getattr(processor, "crop_size", None), getattr(processor, "pad_size", None)):
        sides = dict(sizes or {})
        shortest = sides.get("shortest_edge") or 0
        height, width = (sides.get(side) or shortest for side in ("height", "width"))
        IMAGE_PIXELS.check(height * width, f"images of {width} x {height} pixels", where)


def sample_images() -> list[Any]:
    """Return images of Pillow, in RGB, with which preparations are compared. Raises ``ImportError`` without Pillow."""
    from PIL import Image

    random = np.random.default_rng(0)
    images = [Image.frombytes("RGB", size, random.bytes(3 * math.prod(size))) for size in _SIZES]
    width, height = _SIZES[0]
    images[0].paste(_TRANSPARENT, (width // 3, height // 3, 2 * width // 3, 2 * height // 3))
    images[0].info["transparency"] = _TRANSPARENT
    return images


def read_preparation(checkpoint: Checkpoint, *, any_size: bool = False) -> dict[str, Any]:
    """Return how images are normalised, resized and cropped.

    With ``any_size``, the model reads images of any size: the result also has the size of those that are prepared, if
    it is stated, whatever config.json says. Raises :class:`UsageError` if zoo does not treat images in this way.
    """
    hub, where = checkpoint.config, processor_file(checkpoint.path)
    images = _common_settings(checkpoint.image_processor, where)
    values = {key: images[key] for key in _IMAGES if key in images}
    for key in ("do_rescale", "do_normalize"):
        if not images.get(key, True):
            raise UsageError(f"{key} {images[key]!r} is not supported, only true", where)
    factor = images.get("rescale_factor", 1 / 255)
    if not isinstance(factor, int | float) or abs(factor - 1 / 255) > 1e-9:
        raise UsageError(f"rescale_factor {factor!r} is not supported, only 1/255", where)
    if (name := _filter(images.get("resample"), where)) is not None:
        values["image_resample"] = name
    if images.get("do_convert_rgb", _kind(images).startswith(_WHITENING)):
        values["image_transparency"] = "white"
    if any_size and (edges := _edges(images)):
        return {**values, "image_size": edges, "image_resize": "edges"}
    size, resize = _size(images, where)
    if resize is not None:
        values["image_resize"] = resize
    towers = hub.get("vision_config")
    side = None if any_size else (towers if isinstance(towers, dict) else hub).get("image_size")
    if any_size and size:
        values["image_size"] = size
    if images.get("do_center_crop"):
        crop = _side(images, "crop_size", where)
        if crop != (side or crop) or crop > size:
            raise UsageError(f"crop_size {crop} of size {size} does not fit image_size {side}", where)
        values["image_crop"] = crop / size
        if any_size:
            values["image_size"] = crop
    elif resize == "shortest_edge":
        problem = f"size {images['size']!r} without do_center_crop is not supported"
        raise UsageError(problem, where, "images must be cropped to squares")
    return values


def _common_settings(images: Mapping[str, Any], where: Path) -> Mapping[str, Any]:
    """Return the settings of processors with names of their own as those of CLIP's and ViT's; others are unchanged."""
    if _kind(images).startswith("Segformer"):
        return {**_SEGFORMER, **images, "do_center_crop": False}
    if _kind(images).startswith("Detr"):
        return _detr_settings(images, where)
    if not _kind(images).startswith("ConvNext"):
        return images
    stated = {**_CONVNEXT, **images}
    edge, portion = stated["size"], stated["crop_pct"]
    edge = edge.get("shortest_edge") if isinstance(edge, dict) else edge
    if type(edge) is not int or edge < 1:
        raise UsageError(f"size {images['size']!r} is not supported", where, "the shortest edge must be a number")
    if isinstance(portion, bool) or not isinstance(portion, int | float) or not 0 < portion <= 1:
        raise UsageError(f"crop_pct {portion!r} is not supported", where, "it must lie in (0, 1]")
    if stated.get("do_center_crop"):
        raise UsageError("do_center_crop is not supported beside crop_pct", where)
    if edge >= _STRETCHED:
        return {**stated, "size": {"height": edge, "width": edge}}
    return {**stated, "size": {"shortest_edge": int(edge / portion)}, "do_center_crop": True, "crop_size": edge}


def _detr_settings(images: Mapping[str, Any], where: Path) -> Mapping[str, Any]:
    """Return the settings of DETR's processor, in old files of which a number is the shortest edge."""
    stated = {**_DETR, **images}
    if not stated.get("do_resize", True):
        raise UsageError(f"do_resize {stated['do_resize']!r} is not supported, only true", where)
    if stated.get("pad_size") is not None:
        problem = f"pad_size {stated['pad_size']!r} is not supported"
        raise UsageError(problem, where, "images are not padded, since each is read at its own size")
    if type(stated["size"]) is int:
        stated["size"] = {"shortest_edge": stated["size"], "longest_edge": stated["max_size"]}
    return stated


def _edges(images: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the shortest and the longest edge of images that keep their proportions; None for others."""
    size = images.get("size")
    if not isinstance(size, dict) or size.keys() != {"shortest_edge", "longest_edge"}:
        return None
    shortest, longest = size["shortest_edge"], size["longest_edge"]
    return (shortest, longest) if type(shortest) is type(longest) is int and min(shortest, longest) > 0 else None


def _filter(resample: Any, where: Path) -> str | None:
    """Return the name of a filter, of which files have the number; None for None."""
    if resample is None:
        return None
    if not isinstance(resample, int) or isinstance(resample, bool) or resample not in range(len(RESAMPLING)):
        raise ArtifactError(f"resample {resample!r} is not supported", where, "known: the filters of Pillow, 0 to 5")
    return RESAMPLING[resample]


def _size(images: Mapping[str, Any], where: Path) -> tuple[int, str | None]:
    """Return the side to which images are resized before they are cropped, and ``image_resize``; None without a size.

    A number is the shorter side for CLIP's processor, and both sides for others.
    """
    value = images.get("size")
    if value is None:
        return 0, None
    if isinstance(value, dict) and value.keys() == {"shortest_edge"}:
        value = value["shortest_edge"]
    elif not (isinstance(value, int) and _kind(images).startswith("CLIP")):
        return _side(images, "size", where), "stretch"
    if type(value) is not int or value < 1:
        raise UsageError(f"size {images['size']!r} is not supported", where, "the shortest edge must be a number")
    return value, "shortest_edge"


def _kind(images: Mapping[str, Any]) -> str:
    return str(images.get("image_processor_type") or images.get("feature_extractor_type"))


def _side(images: Mapping[str, Any], key: str, where: Path) -> int:
    """Return the side of a square: a number, or equal height and width."""
    value = images.get(key)
    height, width = (value.get("height"), value.get("width")) if isinstance(value, dict) else (value, value)
    if type(height) is not int or height != width or height < 1:
        raise UsageError(f"{key} {value!r} is not supported, only squares", where)
    return height


def image_processor(c: ImagePreparation, name: str) -> dict[str, Any]:
    """Describe how images are prepared, as the file preprocessor_config.json of the hub.

    ``name`` is the class of a processor that stretches images, unless they are cropped, or with ``edges`` gives both
    edges a limit.
    """
    sides = c.sides
    whole = [int(side / c.image_crop + 1e-6) for side in sides]
    keeps_ratio, pads = c.image_resize == "shortest_edge", c.image_resize in ("pad", "turn_and_pad")
    crops = keeps_ratio or whole != [*sides]
    size = {"shortest_edge": min(whole)} if keeps_ratio else _height_and_width(whole)
    if c.image_resize == "edges":
        size = dict(zip(("shortest_edge", "longest_edge"), sides, strict=True))
    kind = f"{'CLIP' if keeps_ratio else 'Donut' if pads else 'DeiT' if crops else name}ImageProcessor"
    whitens = c.image_transparency == "white"
    return {
        PROCESSOR: {
            "image_processor_type": kind,
            **({"do_convert_rgb": whitens} if whitens != kind.startswith(_WHITENING) else {}),
            "do_resize": True,
            "size": size,
            **({"do_center_crop": True, "crop_size": _height_and_width(sides)} if crops else {}),
            **({"do_align_long_axis": c.image_resize == "turn_and_pad"} if pads else {}),
            "resample": RESAMPLING.index(c.image_resample),
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(c.image_mean or ()),
            "image_std": list(c.image_std or ()),
        }
    }


def _height_and_width(sides: Sequence[int]) -> dict[str, int]:
    return dict(zip(("height", "width"), sides, strict=True))
