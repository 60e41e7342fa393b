"""Overlapping windows over texts that are longer than a model's input."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tokenizers import Encoding

__all__ = ["LONGEST_WINDOW", "TokenWindow", "token_windows", "windows"]

LONGEST_WINDOW = 384
"""Default of transformers' pipeline, and of the code of Devlin et al. 2019 for SQuAD."""
_STRIDE = 128
"""The same for the tokens that windows share."""


class TokenWindow(NamedTuple):
    """A part of a text, with the other tokens that a row of the model needs."""

    places: list[int]
    """Places of its tokens in the encoding of the whole text."""
    part: range
    """Range of indices into ``places`` of the text's tokens, without special tokens and the first text of a pair."""


def token_windows(encoded: Encoding, *, limit: int, stride: int | None = None, name: str = "text") -> list[TokenWindow]:
    """Divide a text into windows. Of a pair, the second text is divided, and the first is part of each window.

    Args:
        encoded: the whole text or pair, which has tokens.
        limit: maximum number of tokens in a window, special tokens included.
        stride: number of tokens that neighbouring windows share; by default 128, or half a window if that is less.
        name: what the text is, for errors.

    Raises:
        ValueError: the text is too long for one window, and windows do not advance.
    """
    numbers = encoded.sequence_ids
    last = max(number for number in numbers if number is not None)
    places = [place for place, number in enumerate(numbers) if number == last]
    before, after = list(range(places[0])), list(range(places[-1] + 1, len(numbers)))
    room = limit - len(before) - len(after)
    if len(places) <= room:
        return [TokenWindow([*before, *places, *after], range(len(before), len(before) + len(places)))]
    requested, stride = stride, min(_STRIDE, limit // 2) if stride is None else stride
    if requested is None and stride >= room:
        stride = max(room, 0) // 2
    if stride >= room:
        raise ValueError(f"windows of {limit} tokens leave {max(room, 0)} for the {name}, with a stride of {stride}")
    return [
        TokenWindow([*before, *places[part.start : part.stop], *after], range(len(before), len(before) + len(part)))
        for part in windows(len(places), room, stride)
    ]


def windows(length: int, room: int, stride: int) -> list[range]:
    """Return overlapping ranges of at most ``room`` that cover ``length`` items; neighbours share ``stride`` of them.

    >>> windows(7, 4, 2)
    [range(0, 4), range(2, 6), range(4, 7)]
    """
    starts = range(0, max(length - stride, 1), room - stride)
    return [range(start, min(start + room, length)) for start in starts]
