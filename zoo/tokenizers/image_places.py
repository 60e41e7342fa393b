"""Images in prompts: the tokens in their place, and which feature of an image each of them stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from zoo.contract import Graph
from zoo.errors import ArtifactError, UsageError

__all__ = ["ImagePlaces", "count_features"]


def count_features(graphs: Sequence[Graph]) -> int | None:
    """Return the number of features of an image, which stand in texts as tokens; None for a model without any."""
    tensors = (tensor for graph in graphs for tensor in graph.output_tensors())
    counts = (tensor.dims[1] for tensor in tensors if tensor.name == "image_features")
    return next((count for count in counts if isinstance(count, int)), None)


@dataclass(frozen=True)
class ImagePlaces:
    """How the image of a prompt becomes tokens."""

    token: int
    """The token of each feature of an image."""
    count: int
    """Number of features of an image."""
    prompt_token: int
    """The token of a prompt in whose place those of the image are; it may be ``token``."""
    before: tuple[int, ...]
    """Tokens before those of an image."""
    after: tuple[int, ...]
    """Tokens after them."""

    @classmethod
    def of(cls, config: Any, graphs: Sequence[Graph], where: object) -> Self:
        """Return those of a model. Raises :class:`UsageError` for a model that has no images in texts."""
        token, count = getattr(config, "image_token_id", None), count_features(graphs)
        if token is None or count is None:
            raise UsageError("the model has no images in texts", where)
        prompt_token = getattr(config, "image_prompt_id", None)
        before, after = (tuple(getattr(config, name, ())) for name in ("image_before", "image_after"))
        return cls(token, count, token if prompt_token is None else prompt_token, before, after)

    def expand(self, ids: Sequence[int], *, has_image: bool, where: str | None = None) -> tuple[list[int], list[int]]:
        """Return the tokens of a prompt with those of its image, and the number of each one's feature from 1, or 0.

        A prompt may have the tokens of an image already.

        Raises :class:`ArtifactError` unless a prompt with an image has one place for it, and another has none.
        """
        whole = [*ids]
        if has_image and whole.count(self.token) != self.count:
            places = [place for place, token in enumerate(ids) if token == self.prompt_token]
            if len(places) != 1:
                what = f"the prompt has {len(places)} places for its image"
                raise ArtifactError(
                    what, where, f"write the token {self.prompt_token} once, as the model's examples do"
                )
            tokens = [*self.before, *[self.token] * self.count, *self.after]
            whole[places[0] : places[0] + 1] = tokens
            if whole.count(self.token) != self.count:
                raise ArtifactError(f"the prompt has the token {self.token} beside those of its image", where)
        elif not has_image and self.prompt_token in ids:
            raise ArtifactError("the prompt has a place for an image, but there is none", where, "give both")
        indices, number = [0] * len(whole), 0
        for place, token in enumerate(whole if has_image else ()):
            if token == self.token:
                number += 1
                indices[place] = number
        return whole, indices
