"""Images in prompts: the tokens in their place, and which feature of an image each of them stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from zoo.contract import Graph
from zoo.errors import ArtifactError, UsageError
from zoo.tiles import ImageTiling

__all__ = ["NO_IMAGE", "ImagePlaces", "count_features"]

NO_IMAGE = "the prompt has a place for an image, but there is none"
"""Error of a prompt without its image."""


def count_features(graphs: Sequence[Graph]) -> int | None:
    """Return the number of features of an image, or of a tile of it, which stand in texts as tokens; None for a model
    without any. Each feature of a grid counts as a tile."""
    tensors = [tensor for graph in graphs for tensor in graph.output_tensors()]
    if any(tensor.name == "grid_features" for tensor in tensors):
        return 1
    counts = (tensor.dims[1] for tensor in tensors if tensor.name in ("image_features", "tile_features"))
    return next((count for count in counts if isinstance(count, int)), None)


@dataclass(frozen=True)
class ImagePlaces:
    """How the image of a prompt becomes tokens."""

    token: int
    """The token of each feature of an image."""
    count: int
    """Number of features of an image, or of each of its tiles; 1 for grids, whose features count as tiles."""
    prompt_token: int
    """The token of a prompt in whose place those of the image are; it may be ``token``."""
    before: tuple[int, ...]
    """Tokens before those of an image."""
    after: tuple[int, ...]
    """Tokens after them."""
    before_tiles: tuple[tuple[int, ...], ...] = ()
    """Tokens before those of each tile but the last, in place of ``before``, if there are several; none before those
    of further tiles."""
    before_thumbnail: tuple[int, ...] = ()
    """Tokens before those of the last of several tiles, which is the thumbnail."""
    video_token: int | None = None
    """The token in the place of a video, which no prompt may have; None for a model without any."""
    most_columns: int = 0
    """If not 0, ``before_tiles`` is a table of as many rows as columns, row by row, in which a tile has the place that
    it has in the image."""

    @classmethod
    def of(cls, config: Any, count: int | None, where: object) -> Self:
        """Return those of a model, given :func:`count_features` of its graphs.

        Raises :class:`UsageError` for a model that has no images in texts.
        """
        token = getattr(config, "image_token_id", None)
        if token is None or count is None:
            raise UsageError("the model has no images in texts", where)
        prompt_token = getattr(config, "image_prompt_id", None)
        names = "image_before", "image_after", "image_before_tiles", "image_before_thumbnail"
        before, after, before_tiles, before_thumbnail = (getattr(config, name, ()) for name in names)
        tiling = ImageTiling.of(lambda name: getattr(config, name, None), where)
        columns = tiling.most_columns if tiling is not None and tiling.most > 1 else 0
        if columns and len(before_tiles) != columns**2:
            what = f"image_before_tiles has tokens of {len(before_tiles)} tiles, of {columns} rows and columns"
            raise UsageError(what, where)
        prompt_token = token if prompt_token is None else prompt_token
        video_token = getattr(config, "video_token_id", None)
        return cls(token, count, prompt_token, before, after, before_tiles, before_thumbnail, video_token, columns)

    def expand(
        self, ids: Sequence[int], *, tiles: int, columns: int = 1, where: str | None = None
    ) -> tuple[list[int], list[int]]:
        """Return the tokens of a prompt with those of its image, and the number of each one's feature from 1, or 0.

        A prompt may have the tokens of an image already. An image that is not cut is one tile; 0 are no image.
        Others are in a number of columns.

        Raises :class:`ArtifactError` unless a prompt with an image has one place for it, and another has none; and for
        one with a place for a video.
        """
        if self.video_token is not None and self.video_token in ids:
            what = f"the prompt has the token {self.video_token}, the place of a video"
            raise ArtifactError(what, where, "leave it out: videos are not supported")
        whole, count = [*ids], self.count * tiles
        if tiles and whole.count(self.token) != count:
            places = [place for place, token in enumerate(ids) if token == self.prompt_token]
            if len(places) != 1:
                what = f"the prompt has {len(places)} places for its image"
                raise ArtifactError(
                    what, where, f"write the token {self.prompt_token} once, as the model's examples do"
                )
            whole[places[0] : places[0] + 1] = self.tokens(tiles, columns)
            if whole.count(self.token) != count:
                raise ArtifactError(f"the prompt has the token {self.token} beside those of its image", where)
        elif not tiles and self.prompt_token in ids:
            raise ArtifactError(NO_IMAGE, where, "give both")
        indices, number = [0] * len(whole), 0
        for place, token in enumerate(whole if tiles else ()):
            if token == self.token:
                number += 1
                indices[place] = number
        return whole, indices

    def tokens(self, tiles: int, columns: int = 1) -> list[int]:
        """Return the tokens of an image of a number of tiles, in a number of columns."""
        features = [self.token] * self.count
        if tiles == 1:
            return [*self.before, *features, *self.after]
        if self.most_columns:
            places = (divmod(number, columns) for number in range(tiles - 1))
            leads = [self.before_tiles[row * self.most_columns + column] for row, column in places]
        else:
            leads = [*self.before_tiles[: tiles - 1], *[()] * (tiles - 1 - len(self.before_tiles))]
        return [*(token for lead in (*leads, self.before_thumbnail) for token in (*lead, *features)), *self.after]
