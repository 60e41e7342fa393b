"""How images are cut into tiles: into how many columns and rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from zoo.limits import IMAGE_TILES

__all__ = ["ImageTiling"]


@dataclass(frozen=True)
class ImageTiling:
    """How many tiles an image is cut into, all of one size.

    The grid of tiles is that whose ratio of columns to rows is nearest to the ratio of width to height (Chen et al.
    2024, *How Far Are We to GPT-4V?*, section 3.3). Of several with the same ratio, a larger one is chosen if the image
    has more than half its pixels. An image of more than one tile is followed by a thumbnail: the whole image as a tile.
    """

    least: int
    """The smallest number of tiles, without the thumbnail."""
    most: int
    """The largest number of tiles, without the thumbnail."""

    @classmethod
    def of(cls, option: Callable[[str], Any], where: object = None) -> Self | None:
        """Return the tiling of a model, None if its images are not cut.

        Args:
            option: returns a field of the model's configuration, None if it has none: ``image_tiling``, ``min_tiles``
                and ``max_tiles``.
            where: of errors.

        Raises:
            ArtifactError: the largest number of tiles exceeds ``ZOO_MAX_IMAGE_TILES``.
            ValueError: no number of tiles is allowed.
        """
        if option("image_tiling") is None:
            return None
        least, most = (option(name) or 1 for name in ("min_tiles", "max_tiles"))
        IMAGE_TILES.check(most, f"images of up to {most:,} tiles", where)
        if not 1 <= least <= most:
            raise ValueError(f"min_tiles must lie in [1, max_tiles], got {least} and {most}")
        return cls(least, most)

    @property
    def most_in_all(self) -> int:
        """The largest number of tiles, with the thumbnail."""
        return self.most + (self.most > 1)

    def grid(self, width: int, height: int, tile_pixels: int) -> tuple[int, int]:
        """Return the numbers of columns and rows for an image of a width and a height, in pixels.

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
