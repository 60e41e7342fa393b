"""Values in JSON in a text that may still grow, with their places in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NoReturn

import jiter

__all__ = ["MalformedError", "UnfinishedError", "after_space", "elements", "members", "object_end", "value_end"]

_SPACE = re.compile(r"[ \t\n\r]*")
_PARTS = re.compile(r'"(?:[^"\\]|\\.)*(?:"|$)|[{}\[\]]', re.DOTALL)
"""A text, also one that has not ended, or a bracket."""


class MalformedError(Exception):
    """A text is no value, and does not begin one.

    Args:
        end: the place after a value of another kind; None if there is no value.
    """

    def __init__(self, end: int | None = None) -> None:
        super().__init__("no value")
        self.end = end


class UnfinishedError(Exception):
    """A text ends within a value."""


def after_space(text: str, place: int) -> int:
    """Return the first place that is not white space."""
    match = _SPACE.match(text, place)
    assert match is not None
    return match.end()


def value_end(text: str, start: int) -> int:
    """Return the end of the value that begins at ``start``.

    Raises:
        MalformedError: whatever follows, it is no value, or it is nested too deeply.
        UnfinishedError: more text is needed.
    """
    try:
        end: int = _DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        end = len(text)
        is_whole = False
    else:
        is_whole = True
    try:  # also a whole value: depth has the same limit however much of a value is known
        partial: bool = not is_whole
        jiter.from_json(text[start:end].encode(), allow_inf_nan=False, partial_mode=partial, cache_mode="none")
    except (ValueError, UnicodeEncodeError) as error:
        raise MalformedError from error
    if not is_whole:
        raise UnfinishedError
    return end


def members(text: str, start: int) -> dict[str, tuple[int, int]]:
    """Return the places of the values of the object that begins at ``start``, which is known to be valid.

    Raises :class:`MalformedError` if it has two values of one name.
    """
    found: dict[str, tuple[int, int]] = {}
    place = after_space(text, start + 1)
    while text[place] != "}":
        name, place = _DECODER.raw_decode(text, place)
        place = after_space(text, after_space(text, place) + 1)  # the colon
        end = _DECODER.raw_decode(text, place)[1]
        if name in found:
            raise MalformedError(_DECODER.raw_decode(text, start)[1])
        found[name] = (place, end)
        place = after_space(text, end)
        if text[place] == ",":
            place = after_space(text, place + 1)
    return found


def elements(text: str, start: int) -> Iterator[int]:
    """Yield the places of the elements of the list that begins at ``start``, which is known to be valid."""
    place = after_space(text, start + 1)
    while text[place] != "]":
        yield place
        place = after_space(text, _DECODER.raw_decode(text, place)[1])
        if text[place] == ",":
            place = after_space(text, place + 1)


def object_end(text: str, start: int) -> int | None:
    """Return the end of the object that begins at ``start``, of a text that is known to become valid; None so far."""
    depth = 0
    for match in _PARTS.finditer(text, start):
        part = match[0]
        depth += (part in "{[") - (part in "}]")
        if depth == 0:
            return match.end()
    return None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
