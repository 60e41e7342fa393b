"""Timestamps of a speech recogniser: which tokens may follow, and the segments of a text.

Radford et al. 2022, section 2.3: tokens above all others stand for times in steps of 20 ms. Each segment of a text
begins and ends with one. The rules are those of the paper's implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from zoo.arrays import Array

__all__ = ["Segment", "Timestamps"]


@dataclass(frozen=True)
class Segment:
    """A part of a text, and its times in steps from the beginning of the window."""

    start: int
    end: int
    ids: list[int]
    """The tokens, with those of its times."""


@dataclass(frozen=True)
class Timestamps:
    """The tokens of timestamps.

    >>> times = Timestamps(first=100, end=50)
    >>> times.split([100, 7, 103, 103, 8, 109], 20)
    ([Segment(start=0, end=3, ids=[100, 7, 103]), Segment(start=3, end=9, ids=[103, 8, 109])], None)
    >>> times.split([100, 7, 103, 103, 8], 20)
    ([Segment(start=0, end=3, ids=[100, 7, 103])], 3)
    """

    first: int
    """The token of time 0. The one before it means that a text has no timestamps."""
    end: int
    """The token that ends a text; those of words are below it."""
    latest_start: int | None = None
    """The largest number of steps before the first segment."""

    def restrict(self, logits: Array, ids: Sequence[int]) -> None:
        """Forbid tokens that cannot follow, by setting logits (V,) to -inf.

        A text begins with a time. Times come in pairs, the end of a segment and the start of the next one, except
        before the end of the text, and do not decrease; a segment is not empty. If times are together more probable
        than the most probable other token, the next token is a time.

        Args:
            logits: of the next token, (V,); changed in place.
            ids: the tokens of the text so far, without the prompt.
        """
        logits[self.first - 1] = -np.inf
        if not ids:
            logits[: self.first] = -np.inf
            if self.latest_start is not None:
                logits[self.first + self.latest_start + 1 :] = -np.inf
            return
        after_time, after_pair = ids[-1] >= self.first, len(ids) < 2 or ids[-2] >= self.first
        ends_segment = after_time and not after_pair
        if ends_segment:
            logits[: self.end] = -np.inf
        elif after_time:
            logits[self.first :] = -np.inf
        if times := [token for token in ids if token >= self.first]:
            least = times[-1] if ends_segment else times[-1] + 1
            logits[self.first : least] = -np.inf
        words, chances = logits[: self.first].max(), logits[self.first :].astype(np.float64)
        top = chances.max(initial=-np.inf)
        if top > -np.inf and top + np.log(np.exp(chances - top).sum()) > words:
            logits[: self.first] = -np.inf

    def split(self, ids: Sequence[int], length: int) -> tuple[list[Segment], int | None]:
        """Divide the text of a window into segments.

        Args:
            ids: the tokens of the text, without the prompt and the end token.
            length: steps of sound in the window.

        Returns:
            The segments, and the number of steps to the next window, which begins where the last complete segment ends
            (section 3.8); None if it begins where this one ends, since the text ends with a segment or is a single one.
        """
        ids = list(ids)
        is_time = [token >= self.first for token in ids]
        cuts = [place + 1 for place, both in enumerate(pairwise(is_time)) if all(both)]
        if not cuts:
            times = [token - self.first for token in ids if token >= self.first]
            return [Segment(0, times[-1] if times and times[-1] else length, ids)], None
        closed = is_time[-2:] == [False, True]
        bounds = [0, *cuts, *([len(ids)] if closed else [])]
        parts = [ids[start:stop] for start, stop in pairwise(bounds)]
        segments = [Segment(part[0] - self.first, part[-1] - self.first, part) for part in parts]
        return segments, None if closed else segments[-1].end
