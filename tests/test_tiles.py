"""Cutting images into tiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from zoo.errors import ArtifactError
from zoo.images import ImageReader
from zoo.tiles import ImageTiling

FIELDS = {"image_tiling": "aspect_ratio", "max_tiles": 6}


def test_grid_is_that_of_transformers() -> None:
    random = np.random.default_rng(0)
    sizes = [(1, 1), (1, 999), (999, 1), (32, 32), (64, 64), (65, 65), (96, 64), (448, 448), (1344, 448)]
    sizes += [(int(width), int(height)) for width, height in (2 ** random.uniform(0, 11, (200, 2))).astype(int)]
    for least, most in ((1, 2), (1, 6), (1, 12), (4, 12), (3, 40), (5, 5)):
        for width, height in sizes:
            wanted = get_optimal_tiled_canvas((height, width), (32, 32), least, most)
            assert ImageTiling(least, most).grid(width, height, 32 * 32) == wanted, (width, height, least, most)


@pytest.mark.parametrize(("longest", "side"), [(96, 32), (97, 32), (100, 32), (15, 4), (20, 32), (4100, 2048)])
def test_longest_edge_is_resized_and_enlarged_as_by_transformers(longest: int, side: int) -> None:
    theirs: Any = Idefics3ImageProcessorPil(size={"longest_edge": longest}, max_image_size={"longest_edge": side})
    columns = -(-min(longest + longest % 2, 4096) // side)
    fields = {"image_tiling": "longest_edge", "image_longest_edge": longest, "image_size": side}
    tiling = ImageTiling.of({**fields, "max_tiles": columns**2}.get)
    assert tiling is not None
    random = np.random.default_rng(0)
    shapes = [(1, 1), (1, 999), (999, 1), (33, 33), (64, 48), *(2 ** random.uniform(0, 8, (20, 2))).astype(int)]
    for width, height in (map(int, shape) for shape in shapes):
        scaled = theirs.resize(np.zeros((1, height, width), np.uint8), size=theirs.size, resample=0)
        enlarged = theirs.resize_for_vision_encoder(scaled, side, resample=0)
        found = tiling.sizes(width, height, (side, side))
        assert found == [scaled.shape[:0:-1], enlarged.shape[:0:-1]], (width, height)
        assert max(found[1]) <= columns * side


def test_sizes_that_make_no_tiles_are_refused() -> None:
    fields = {"image_tiling": "longest_edge", "image_longest_edge": 96, "image_size": 32, "max_tiles": 9}
    for changes in ({"max_tiles": 4}, {"min_tiles": 2}, {"image_longest_edge": 0}, {"image_size": (32, 16)}):
        with pytest.raises(ValueError, match=r"must be 1|not possible"):
            ImageTiling.of({**fields, **changes}.get)


def test_tiles_are_the_parts_of_the_image_and_then_the_whole() -> None:
    reader = ImageReader.of(FIELDS.get, 3, 4, 4)
    pixels = np.random.default_rng(0).integers(256, size=(8, 12, 3), dtype=np.uint8)
    tiles = reader.read_tiles(Image.fromarray(pixels))
    assert tiles.shape == (7, 4, 4, 3)
    for number in range(6):
        row, column = 4 * (number // 3), 4 * (number % 3)
        np.testing.assert_array_equal(tiles[number], pixels[row : row + 4, column : column + 4])
    np.testing.assert_array_equal(tiles[6], reader.read(Image.fromarray(pixels)))
    assert reader.normalize(tiles).shape == (7, 3, 4, 4)
    np.testing.assert_array_equal(reader.normalize(tiles)[2], reader.normalize(tiles[2]))


def test_small_image_is_one_tile_as_is_an_array() -> None:
    reader = ImageReader.of(FIELDS.get, 1, 4, 4)
    assert reader.read_tiles(Image.new("L", (4, 4))).shape == (1, 4, 4, 1)
    assert reader.read_tiles(np.zeros((4, 4, 1))).shape == (1, 4, 4, 1)
    assert ImageReader.of({}.get, 3, 4, 4).read_tiles(Image.new("RGB", (40, 4))).shape == (1, 4, 4, 3)


def test_too_many_tiles_or_pixels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArtifactError, match="images of up to 100,000 tiles: at most 1,024 are allowed"):
        ImageReader.of({**FIELDS, "max_tiles": 100_000}.get, 3, 4, 4)
    with pytest.raises(ValueError, match="min_tiles must lie in"):
        ImageTiling.of({**FIELDS, "min_tiles": 7}.get)
    monkeypatch.setenv("ZOO_MAX_IMAGE_PIXELS", "60")
    reader = ImageReader.of(FIELDS.get, 3, 4, 4)
    with pytest.raises(ArtifactError, match="12 x 2 pixels would become 24 x 4 in tiles: at most 60 are allowed"):
        reader.read_tiles(Image.new("RGB", (12, 2)))
