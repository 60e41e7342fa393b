"""Lists of words as texts: which tokens belong to which word."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

__all__ = ["join_words", "places_in_words"]


def join_words(words: Sequence[str]) -> str:
    """Return the text of a list of words. Raises :class:`ValueError` if one is empty."""
    if not all(map(str.strip, words)):
        raise ValueError("text has an empty word")
    return " ".join(words)


def places_in_words(words: Sequence[str], offsets: Sequence[tuple[int, int]]) -> list[int | None]:
    """Return the number of the word that each token of joined words belongs to; None for special tokens.

    Args:
        words: the words, joined by :func:`join_words`.
        offsets: the first character of each token in the text, and the one after its last.

    >>> places_in_words(["Ada", "ran"], [(0, 0), (0, 2), (2, 3), (4, 7), (0, 0)])
    [None, 0, 0, 1, None]
    """
    stops = np.array(list(accumulate(len(word) + 1 for word in words))) - 1
    places: list[int | None] = []
    for start, end in offsets:
        word = int(np.searchsorted(stops, start, "right"))  # the first word that ends after the token's start
        inside = word < len(words) and max(start, int(stops[word]) - len(words[word])) < end
        places.append(word if inside else None)
    return places
