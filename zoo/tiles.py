"""How images are cut into tiles: to which size they are resized, and into how many columns and rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from zoo.classes import sides_of
from zoo.limits import IMAGE_TILES

__all__ = ["ImageTiling"]

_LARGEST = 4096
"""Limit of the longer side, in pixels, to which an image is resized by ``image_longest_edge``."""


@dataclass(frozen=True)
class ImageTiling:
    """How many tiles an image is cut into, all of one size.

    An image of more than one tile is followed by a thumbnail: the whole image as a tile. There are two rules.

    ``aspect_ratio``: the grid of tiles is that whose ratio of columns to rows is nearest to the ratio of width to
    height (Chen et al. 2024, *How Far Are We to GPT-4V?*, section 3.3). Of several with the same ratio, a larger one is
    chosen if the image has more than half its pixels.

    ``longest_edge``: the longer side is resized to ``longest_edge`` pixels and the shorter one in proportion, as in
    Idefics 3. Then both are enlarged to multiples of the side of a tile, which is a square. The thumbnail is made of
    this image.
    """

    least: int
    """The smallest number of tiles, without the thumbnail."""
    most: int
    """The largest number of tiles, without the thumbnail; 1 for ``longest_edge`` if images are resized, but not cut."""
    longest_edge: int = 0
    """Pixels of the longer side before it is enlarged to a multiple; 0 for ``aspect_ratio``."""
    most_columns: int = 0
    """The largest number of columns, and of rows, for ``longest_edge``; 0 for ``aspect_ratio``."""

    @classmethod
    def of(cls, option: Callable[[str], Any], where: object = None) -> Self | None:
        """Return the tiling of a model, None if its images are not cut.

        Args:
            option: returns a field of the model's configuration, None if it has none: ``image_tiling``, ``min_tiles``
                and ``max_tiles``; and for ``longest_edge``, ``image_longest_edge`` and ``image_size``.
            where: of errors.

        Raises:
            ArtifactError: the largest number of tiles exceeds ``ZOO_MAX_IMAGE_TILES``.
            ValueError: no number of tiles is allowed, or not by the size of a tile.
        """
        if option("image_tiling") is None:
            return None
        least, most = (option(name) or 1 for name in ("min_tiles", "max_tiles"))
        IMAGE_TILES.check(most, f"images of up to {most:,} tiles", where)
        if not 1 <= least <= most:
            raise ValueError(f"min_tiles must lie in [1, max_tiles], got {least} and {most}")
        if option("image_tiling") != "longest_edge":
            return cls(least, most)
        longest, (height, width) = option("image_longest_edge") or 0, sides_of(option("image_size") or 0)
        if not (longest >= 1 and height == width >= 1):
            raise ValueError(f"image_longest_edge {longest} and tiles of {width} x {height} pixels are not possible")
        columns = -(-min(longest + longest % 2, _LARGEST) // width)
        if least != 1 or most not in (1, columns**2):
            raise ValueError(f"min_tiles must be 1, and max_tiles 1 or {columns**2}, got {least} and {most}")
        return cls(least, most, longest, columns)

    @property
    def most_in_all(self) -> int:
        """The largest number of tiles, with the thumbnail."""
        return self.most + (self.most > 1)

    def sizes(self, width: int, height: int, tile: tuple[int, int]) -> list[tuple[int, int]]:
        """Return the widths and heights to which an image is resized in turn, the last in whole tiles.

        Args:
            width: of the image, in pixels.
            height: of the image, in pixels.
            tile: width and height of a tile.
        """
        if not self.longest_edge:
            columns, rows = self.grid(width, height, math.prod(tile))
            return [(columns * tile[0], rows * tile[1])]
        first = _scaled(width, height, self.longest_edge)
        return [first, _enlarged(*first, tile[0]) if self.most > 1 else tile]

    def columns(self, width: int, height: int, tile: tuple[int, int]) -> int:
        """Return the number of columns of an image; arguments as of :meth:`sizes`."""
        return self.sizes(width, height, tile)[-1][0] // tile[0]

    def grid(self, width: int, height: int, tile_pixels: int) -> tuple[int, int]:
        """Return the numbers of columns and rows by ``aspect_ratio``, for an image of a width and a height, in pixels.

        >>> ImageTiling(1, 12).grid(1600, 900, 448 * 448), ImageTiling(1, 12).grid(100, 1000, 448 * 448)
        ((7, 4), (1, 10))
        """
        grids = [
            (columns, rows)
            for columns in range(1, self.most + 1)
            for rows in range(-(-self.least // columns), self.most // columns + 1)
        ]
        best, nearest = (1, 1), float("inf")
        for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
            distance = abs(width / height - columns / rows)
            covers = width * height > 0.5 * tile_pixels * columns * rows
            if distance < nearest or (distance == nearest and covers):
                best, nearest = (columns, rows), distance
        return best


def _scaled(width: int, height: int, longest: int) -> tuple[int, int]:
    """Return the size of an image with a longer side of a length, within limits, with the rounding of transformers."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > _LARGEST:
        width, height = _LARGEST, int(_LARGEST / ratio)
    elif height > _LARGEST:
        width, height = int(_LARGEST * ratio), _LARGEST
    return max(width, 1), max(height, 1)


def _enlarged(width: int, height: int, side: int) -> tuple[int, int]:
    """Return the size of an image enlarged to multiples of a side, the longer side first."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        return width, math.ceil(int(width / ratio) / side) * side
    height = math.ceil(height / side) * side
    return math.ceil(int(height * ratio) / side) * side, height
