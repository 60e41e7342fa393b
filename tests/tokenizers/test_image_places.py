"""Tokens in the place of an image in a prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zoo.errors import ArtifactError
from zoo.tokenizers.image_places import ImagePlaces

SAME = ImagePlaces(token=9, count=3, prompt_token=9, before=(), after=())
OTHER = ImagePlaces(token=9, count=3, prompt_token=8, before=(6,), after=(7, 5))


def test_place_of_an_image_becomes_its_tokens() -> None:
    assert SAME.expand([1, 9, 2], tiles=1) == ([1, 9, 9, 9, 2], [0, 1, 2, 3, 0])
    assert OTHER.expand([8, 2], tiles=1) == ([6, 9, 9, 9, 7, 5, 2], [0, 1, 2, 3, 0, 0, 0])


def test_place_of_a_video_is_refused() -> None:
    places = replace(SAME, video_token=4)
    assert places.expand([1, 9], tiles=1) == SAME.expand([1, 9], tiles=1)
    for ids, tiles in (([1, 9, 4], 1), ([4, 1], 0)):
        with pytest.raises(ArtifactError, match="the prompt has the token 4, the place of a video: input 1"):
            places.expand(ids, tiles=tiles, where="input 1")


def test_tokens_of_an_image_may_be_there_already() -> None:
    assert SAME.expand([9, 1, 9, 9], tiles=1) == ([9, 1, 9, 9], [1, 0, 2, 3])


def test_tiles_have_tokens_before_them() -> None:
    assert SAME.expand([1, 9], tiles=2) == ([1, *[9] * 6], [0, *range(1, 7)])
    named = replace(OTHER, before_tiles=((6, 1), (2,)), before_thumbnail=(4,))
    whole = [6, 1, 9, 9, 9, 2, 9, 9, 9, 9, 9, 9, 4, 9, 9, 9, 7, 5]
    assert named.expand([8], tiles=4)[0] == whole
    assert named.expand(whole, tiles=4)[1] == [0, 0, 1, 2, 3, 0, *range(4, 10), 0, 10, 11, 12, 0, 0]
    assert named.expand([8], tiles=2)[0] == [6, 1, 9, 9, 9, 4, 9, 9, 9, 7, 5]
    assert named.expand([8], tiles=1)[0] == [6, 9, 9, 9, 7, 5]


def test_tiles_in_rows_and_columns_have_the_tokens_of_their_place() -> None:
    table = replace(OTHER, before_tiles=((1,), (2,), (0, 3), (4,)), before_thumbnail=(0, 0), most_columns=2)
    features = [9, 9, 9]
    across, down = (table.tokens(3, columns) for columns in (2, 1))
    assert across == [1, *features, 2, *features, 0, 0, *features, 7, 5]
    assert down == [1, *features, 0, 3, *features, 0, 0, *features, 7, 5]
    assert table.expand([8], tiles=3, columns=1)[0] == down
    assert table.tokens(1) == [6, *features, 7, 5]


def test_prompt_without_an_image_has_no_features() -> None:
    assert OTHER.expand([1, 2], tiles=0) == ([1, 2], [0, 0])


@pytest.mark.parametrize(
    ("places", "ids", "tiles", "said"),
    [
        (SAME, [1, 2], 1, "the prompt has 0 places for its image"),
        (SAME, [9, 9], 1, "the prompt has 2 places for its image"),
        (SAME, [1, 9], 0, "the prompt has a place for an image, but there is none"),
        (SAME, [9, 9, 9], 2, "the prompt has 3 places for its image"),
        (OTHER, [9, 8], 1, "the prompt has the token 9 beside those of its image"),
    ],
)
def test_other_prompts_are_refused(places: ImagePlaces, ids: list[int], tiles: int, said: str) -> None:
    with pytest.raises(ArtifactError, match=said):
        places.expand(ids, tiles=tiles, where="input 1")
