"""How the processor of a checkpoint cuts images into rows and columns of tiles: the values that it states, checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zoo.errors import ArtifactError, UsageError
from zoo.limits import IMAGE_PIXELS
from zoo.tiles import ImageTiling

__all__ = ["stated_tiling"]


def stated_tiling(processor: Any, where: Path) -> dict[str, Any] | None:
    """Return the fields of :class:`zoo.ImageTiling` for an image processor with a longest edge and a size of tiles.

    It is None for other processors.

    Raises:
        ArtifactError: the sizes are not possible, or make too many tiles.
        UsageError: images are cut without being resized, or are resized by another rule.
    """
    if not (hasattr(processor, "do_image_splitting") and hasattr(processor, "max_image_size")):
        return None
    longest, side = _edge(processor, "size", where), _edge(processor, "max_image_size", where)
    if not processor.do_resize:
        raise UsageError("do_resize false is not supported for images in tiles, only true", where)
    fields = {"image_tiling": "longest_edge", "min_tiles": 1, "image_longest_edge": longest}
    single = ImageTiling.of({**fields, "image_size": side, "max_tiles": 1}.get, where)
    assert single is not None
    most = single.most_columns**2 if processor.do_image_splitting else 1
    ImageTiling.of({**fields, "image_size": side, "max_tiles": most}.get, where)
    IMAGE_PIXELS.check((single.most_columns * side) ** 2, f"images in tiles of {side} x {side} pixels", where)
    return {**fields, "max_tiles": most}


def _edge(processor: Any, name: str, where: Path) -> int:
    """Return the longest edge that a value of a processor states, in pixels."""
    stated: Any = getattr(processor, name)
    sizes = {key: value for key, value in dict(stated or {}).items() if value is not None}
    value = sizes.get("longest_edge")
    if sizes.keys() != {"longest_edge"} or type(value) is not int or value < 1:
        said = json.dumps(sizes, default=str)[:80]
        raise ArtifactError(f"{name} {said} is not possible", where, "give a longest_edge of at least 1 pixel")
    return value
