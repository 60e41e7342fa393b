"""Tokens in the place of an image in a prompt."""

from __future__ import annotations

import pytest

from zoo.errors import ArtifactError
from zoo.tokenizers.image_places import ImagePlaces

SAME = ImagePlaces(token=9, count=3, prompt_token=9, before=(), after=())
OTHER = ImagePlaces(token=9, count=3, prompt_token=8, before=(6,), after=(7, 5))


def test_place_of_an_image_becomes_its_tokens() -> None:
    assert SAME.expand([1, 9, 2], has_image=True) == ([1, 9, 9, 9, 2], [0, 1, 2, 3, 0])
    assert OTHER.expand([8, 2], has_image=True) == ([6, 9, 9, 9, 7, 5, 2], [0, 1, 2, 3, 0, 0, 0])


def test_tokens_of_an_image_may_be_there_already() -> None:
    assert SAME.expand([9, 1, 9, 9], has_image=True) == ([9, 1, 9, 9], [1, 0, 2, 3])


def test_prompt_without_an_image_has_no_features() -> None:
    assert OTHER.expand([1, 2], has_image=False) == ([1, 2], [0, 0])


@pytest.mark.parametrize(
    ("places", "ids", "has_image", "said"),
    [
        (SAME, [1, 2], True, "the prompt has 0 places for its image"),
        (SAME, [9, 9], True, "the prompt has 2 places for its image"),
        (SAME, [1, 9], False, "the prompt has a place for an image, but there is none"),
        (OTHER, [9, 8], True, "the prompt has the token 9 beside those of its image"),
    ],
)
def test_other_prompts_are_refused(places: ImagePlaces, ids: list[int], has_image: bool, said: str) -> None:
    with pytest.raises(ArtifactError, match=said):
        places.expand(ids, has_image=has_image, where="input 1")
