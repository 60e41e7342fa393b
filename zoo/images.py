"""Reading images as a model expects them: files or arrays to normalised pixels. Torch-free."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from zoo.arrays import Array
from zoo.classes import MANY_SIZES, sides_of
from zoo.errors import ArtifactError, UsageError, ZooError
from zoo.limits import IMAGE_PIXELS, IMAGE_SIDE
from zoo.reading import check_plain
from zoo.tiles import ImageTiling

__all__ = ["ImageReader", "white_of"]


_ROUNDING = 1e-6
"""Added before rounding down: the size before cropping is a quotient of two floats."""
_LONGEST = 200
"""Largest ratio of the sides of an image that is resized to an area."""
_SILENCE = logging.NullHandler()
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Pillow's mode for each number of channels."""
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow has others, one of which runs Ghostscript on what it reads."""


@dataclass(frozen=True, eq=False)
class ImageReader:
    """Reads files, their bytes, Pillow images and arrays.

    A file, its bytes or a Pillow image is rotated by its EXIF orientation, converted to grey, RGB or RGBA according to
    the number of channels, resized and cropped. Palettes are expanded, 16-bit values reduced to 8 bits, and only the
    first frame is used. An opacity per pixel is ignored. An array, (height, width) or (height, width, channels), must
    already have the model's size, with integers in [0, 255] or floats in [0, 1]; any size if images have many.
    """

    channels: int
    height: int
    width: int
    resample: str
    """The name of Pillow's filter for resizing."""
    crop: float
    """Fraction of each side that is kept after resizing; of the shorter sides for ``shortest_edge``."""
    resize: str
    """``stretch``; ``shortest_edge``: keep the proportions and cut off what is outside; ``pad``: resize the shorter
    side to that of the model, shrink what is still too large, and centre it on black; ``turn_and_pad``: before that,
    turn an image clockwise whose longer side is not that of the model. Or one of ``MANY_SIZES``: ``edges``: resize the
    shorter side to ``height``, or the longer one to ``width`` where it would be longer, and round down to multiples;
    ``fit``: resize by the factor nearest to 1 that makes a side that of the model, and round to multiples;
    ``round_down``: round each side down to a multiple; ``area``: round each side to a multiple, and resize images of
    less than ``height`` or more than ``width`` pixels in all to these."""
    multiple: int
    """The number of which the sides of resized images are multiples, with sizes of ``MANY_SIZES``."""
    rounds_to_even: bool
    """Whether half of an odd number of pixels, of a margin, is rounded to the even number. Otherwise down."""
    whitens: bool
    """Whether a colour that an image declares transparent becomes white. Otherwise it stays."""
    mean: Array = field(repr=False)
    """Subtracted from each channel, (channels, 1, 1), for pixels in [0, 1]."""
    std: Array = field(repr=False)
    """The divisor of each channel after the subtraction, (channels, 1, 1)."""
    tiling: ImageTiling | None = None
    """How images are cut into tiles of the model's size; None if they are not."""

    @classmethod
    def of(cls, option: Callable[[str], Any], channels: int, height: int, width: int) -> Self:
        """Return the reader of a model.

        Args:
            option: returns a field of the model's configuration, None if it has none: ``image_resample``, bilinear by
                default; ``image_crop``, 1 by default; ``image_resize``, stretch by default; ``image_multiple``, 1 by
                default; ``image_margin``, down by default; ``image_transparency``, ignored by default; ``image_mean``
                and ``image_std``, 0.5 by default (Dosovitskiy et al. 2021); and those of :class:`zoo.ImageTiling`.
            channels: number of channels.
            height: of the model's images, in pixels; with ``MANY_SIZES``, those of ``image_size`` take its place.
            width: of the model's images, in pixels.
        """
        resize, multiple = option("image_resize") or "stretch", option("image_multiple") or 1
        if resize in MANY_SIZES:
            height, width = sides_of(option("image_size"))
        mean, std = (
            np.broadcast_to(np.float32(0.5 if value is None else value), channels)[:, None, None]
            for value in (option("image_mean"), option("image_std"))
        )
        resample = str(option("image_resample") or "bilinear").upper()
        rounds_to_even, whitens = option("image_margin") == "even", option("image_transparency") == "white"
        crop = option("image_crop") or 1.0
        tiling = ImageTiling.of(option)
        return cls(
            channels, height, width, resample, crop, resize, multiple, rounds_to_even, whitens, mean, std, tiling
        )

    def read(self, value: Any, where: str | None = None) -> Array:
        """Return an image as an array of the model's size, (height, width, channels), without normalising it.

        Raises:
            ArtifactError: it cannot be read, or is an array of another shape or range.
            UsageError: Pillow is missing, or cannot represent this number of channels.
        """
        return self.read_sized(value, where)[0]

    def read_sized(self, value: Any, where: str | None = None) -> tuple[Array, tuple[int, int]]:
        """Return an image as :meth:`read` does, and its height and width before it was resized, but upright."""
        if isinstance(value, np.ndarray):
            array, size = value, value.shape[:2]
        else:
            array, size = self._load(value, where, self._whole)
        if array.ndim == 2:
            array = array[..., None]
        expected = (*(array.shape[:2] if self.is_free else (self.height, self.width)), self.channels)
        if array.shape != expected:
            raise ArtifactError(f"expected shape {expected}, got {array.shape}", where, "resize it")
        _check_range(array, where)
        return array, size

    def read_tiles(self, value: Any, where: str | None = None) -> Array:
        """Return the tiles of an image, (tiles, height, width, channels), row by row, without normalising them.

        If there are several, the last is the thumbnail. An array is one tile, as is an image of a model without tiles.
        Errors as of :meth:`read`.
        """
        return self.read_grid(value, where)[0]

    def read_grid(self, value: Any, where: str | None = None) -> tuple[Array, int]:
        """Return the tiles of an image as :meth:`read_tiles` does, and the number of columns in which they are."""
        if self.tiling is None or isinstance(value, np.ndarray):
            return self.read(value, where)[None], 1
        tiles, (height, width) = self._load(value, where, self._tiles)
        return tiles, self.tiling.columns(width, height, (self.width, self.height))

    def normalize(self, array: Array) -> Array:
        """Return what the model reads, (..., channels, height, width), of an array that :meth:`read` returned, or of
        tiles."""
        scale = np.float32(1 / white_of(array))
        return (np.moveaxis(array, -1, -3).astype(np.float32) * scale - self.mean) / self.std

    def count_parts(self, pixels: Array) -> int:
        """Return the number of tiles, (tiles, channels, height, width); with ``area``, of squares of a multiple."""
        return math.prod(pixels.shape[-2:]) // self.multiple**2 if self.resize == "area" else len(pixels)

    @property
    def is_free(self) -> bool:
        """Whether the sizes of resized images depend on the image. Arrays then have any size."""
        return self.resize in MANY_SIZES

    @property
    def mode(self) -> str | None:
        """Pillow's mode of the model's images, None if there is none."""
        return _MODES.get(self.channels)

    def _load(
        self, value: Any, where: str | None, make: Callable[[Any, str | None], Array]
    ) -> tuple[Array, tuple[int, int]]:
        """Return what is made of an upright image with the model's channels, and its height and width."""
        logging.getLogger("PIL").addHandler(_SILENCE)  # or it writes to stderr, besides what it raises
        try:
            from PIL import Image, ImageOps, UnidentifiedImageError
        except ImportError as error:
            raise UsageError("image files need Pillow", None, "pip install attention-zoo[images]") from error
        if not isinstance(value, str | bytes | os.PathLike | Image.Image):
            raise ArtifactError(f"expected an image file or an array, got {type(value).__name__}", where)
        if self.mode is None:
            raise UsageError(f"image files cannot have {self.channels} channels", where, "give arrays")
        try:
            with (
                contextlib.nullcontext(value)
                if isinstance(value, Image.Image)
                else Image.open(_source_of(value), formats=_FORMATS)
            ) as image:
                IMAGE_PIXELS.check(math.prod(image.size), f"an image of {image.width} x {image.height} pixels", where)
                IMAGE_SIDE.check(max(image.size), f"a side of {max(image.size)} pixels", where)
                upright = ImageOps.exif_transpose(_eight_bits(image))
                sized = upright.convert(self.mode)
                if self.whitens and sized.info.get("transparency") is not None:
                    white = Image.new("RGBA", sized.size, "white")
                    sized = Image.alpha_composite(white, sized.convert("RGBA")).convert(self.mode)
                array = make(sized, where)
        except ZooError:
            raise
        except UnidentifiedImageError as error:  # its text names an object in memory
            raise ArtifactError(f"cannot be read as an image (none of {', '.join(_FORMATS)})", where) from error
        except Exception as error:  # Pillow raises many classes, including SyntaxError
            most = 2 * (Image.MAX_IMAGE_PIXELS or 0)  # Pillow's own limit
            if isinstance(error, Image.DecompressionBombError) and IMAGE_PIXELS.value() <= most:
                IMAGE_PIXELS.refuse(f"an image of more than {most:,} pixels", where)
            raise ArtifactError(f"cannot be read as an image ({error})", where) from error
        return array, (upright.height, upright.width)

    def _whole(self, image: Any, where: str | None) -> Array:
        """Return a Pillow image as one of the model's size."""
        from PIL import Image

        across = (image.width - image.height) * (self.width - self.height) < 0
        if self.resize == "turn_and_pad" and across:
            image = image.transpose(Image.Transpose.ROTATE_270)
        for resized in self._resized(image.width, image.height, where):
            image = image.resize(resized, Image.Resampling[self.resample])
        if not self.is_free:
            left, top = self._margin(image.width - self.width), self._margin(image.height - self.height)
            image = image.crop((left, top, left + self.width, top + self.height))
        return np.asarray(image)

    def _tiles(self, image: Any, where: str | None) -> Array:
        """Return the tiles of a Pillow image, (tiles, height, width, channels)."""
        from PIL import Image

        assert self.tiling is not None
        resized = image
        for size in self.tiling.sizes(image.width, image.height, (self.width, self.height)):
            what = f"{image.width} x {image.height} pixels would become {size[0]} x {size[1]} in tiles"
            IMAGE_PIXELS.check(math.prod(size), what, where)
            resized = resized.resize(size, Image.Resampling[self.resample])
        shape = resized.height // self.height, self.height, resized.width // self.width, self.width, self.channels
        tiles = np.asarray(resized).reshape(shape).swapaxes(1, 2).reshape(-1, self.height, self.width, self.channels)
        if len(tiles) == 1:
            return tiles
        whole = resized if self.tiling.longest_edge else image
        return np.concatenate([tiles, self._whole(whole, where).reshape(1, *tiles.shape[1:])])

    def _margin(self, surplus: int) -> int:
        """Return what is cut off before the image, of the pixels that are cut off in all; negative for padding."""
        return round(surplus / 2) if self.rounds_to_even else int(surplus / 2)

    def _resized(self, width: int, height: int, where: str | None) -> list[tuple[int, int]]:
        """Return the widths and heights to which an image is resized, in order, before it is cropped or padded."""
        whole = math.floor(self.width / self.crop + _ROUNDING), math.floor(self.height / self.crop + _ROUNDING)
        if self.resize == "stretch":
            return [whole]
        if self.is_free:
            resized = self._proportional(width, height)
            what = f"{width} x {height} pixels would become {resized[0]} x {resized[1]}"
            IMAGE_PIXELS.check(math.prod(resized), what, where)
            if not all(resized):
                raise ArtifactError(f"an image of {what}, which is empty", where, "crop or enlarge it")
            return [resized]
        if self.resize != "shortest_edge":
            whole = (min(whole), min(whole))
        if width <= height:
            resized = whole[0], max(whole[1], whole[0] * height // width)
        else:
            resized = max(whole[0], whole[1] * width // height), whole[1]
        what = f"{width} x {height} pixels would become {resized[0]} x {resized[1]}, so crop the image"
        IMAGE_PIXELS.check(math.prod(resized), what, where)
        return [resized] if self.resize == "shortest_edge" else [resized, self._shrunk(*resized)]

    def _proportional(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height of a resized image of any size, with the rounding of transformers."""
        if self.resize == "area":
            return _resized_to_area(width, height, self.multiple, self.height, self.width)
        if self.resize == "round_down":
            return width // self.multiple * self.multiple, height // self.multiple * self.multiple
        if self.resize == "fit":
            factor = min(self.height / height, self.width / width, key=lambda scale: abs(1 - scale))
            across, down = (round(factor * side / self.multiple) * self.multiple for side in (width, height))
            return across, down
        least, most = min(width, height), max(width, height)
        shortest, factor = self.height, float(self.height)
        if float(most) / least * shortest > self.width:
            factor = self.width * float(least) / most
            shortest = round(factor)
        sides = (shortest, int(factor * height / width)) if width < height else (int(factor * width / height), shortest)
        if least == shortest:
            sides = width, height
        return sides[0] // self.multiple * self.multiple, sides[1] // self.multiple * self.multiple

    def _shrunk(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height of an image that is shrunk to fit in the model's: the longer side is made to fit."""
        if height > width:
            fitting = min(height, self.height)
            return width * fitting // height, fitting
        fitting = min(width, self.width)
        return fitting, height * fitting // width


def _resized_to_area(width: int, height: int, multiple: int, least: int, most: int) -> tuple[int, int]:
    """Return width and height in multiples, of nearly the same proportions, with from ``least`` to ``most`` pixels.

    Both are 0 for an image whose longer side is more than 200 times the shorter one.
    """
    if max(height, width) / min(height, width) > _LONGEST:
        return 0, 0
    across, down = (round(side / multiple) * multiple for side in (width, height))
    if across * down > most:
        factor = math.sqrt(height * width / most)
        across, down = (max(multiple, math.floor(side / factor / multiple) * multiple) for side in (width, height))
    elif across * down < least:
        factor = math.sqrt(least / (height * width))
        across, down = (math.ceil(side * factor / multiple) * multiple for side in (width, height))
    return across, down


def _source_of(value: Any) -> Any:
    if isinstance(value, bytes):
        return io.BytesIO(value)
    check_plain(Path(value))
    return value


def white_of(array: Array) -> int:
    """Return the value of white in an array: 255 for integers, 1 for floats."""
    return 1 if array.dtype.kind == "f" else 255


def _check_range(array: Array, where: str | None) -> None:
    """Raise :class:`ArtifactError` unless an array has pixels from 0 to white."""
    if not array.size:
        raise ArtifactError("the image has no pixels", where)
    if array.dtype.kind not in "uif":
        raise ArtifactError(f"pixels must be numbers, got {array.dtype}", where)
    if not np.isfinite(array).all():
        raise ArtifactError("pixels contain NaN or infinity", where)
    top, least, most = white_of(array), array.min(), array.max()
    if least < 0 or most > top:
        name = "floats" if top == 1 else "integers"
        raise ArtifactError(
            f"pixels from {least:g} to {most:g}, but {name} must lie in [0, {top}]", where, "scale them"
        )


def _eight_bits(image: Any) -> Any:
    """Convert a 16-bit Pillow image to 8 bits, since Pillow's own conversion clips values above 255."""
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PNG"):  # older versions
        return Image.fromarray((np.asarray(image) / 257 + 0.5).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"the range of mode {image.mode} is not defined: give an array")
    return image
