"""Arguments in the notation of FunctionGemma and Gemma 4: ``{city:<escape>Paris<escape>,days:[1,2]}``.

Texts stand between two marks; names of arguments have none, and numbers, ``true``, ``false`` and ``null`` are those
of JSON.
"""

from __future__ import annotations

import json
import re
from typing import Any

from zoo_runtime.server.tools.json_text import MalformedError, UnfinishedError, after_space

__all__ = ["read_notation"]

_DEPTH = 64
_BARE = re.compile(r"[^\s,:{}\[\]<]+")
_LITERALS = {"true": True, "false": False, "null": None}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")


def read_notation(text: str, start: int, quote: str) -> tuple[dict[str, Any], int]:
    """Return the arguments that begin at ``start`` with a brace, and the place after them.

    Args:
        text: the text.
        start: the place of the brace.
        quote: the mark around texts.

    Raises:
        MalformedError: whatever follows, these are no arguments.
        UnfinishedError: more text is needed.
    """
    value, end = _Reader(text, quote).value(start, 0)
    assert isinstance(value, dict)
    return value, end


class _Reader:
    def __init__(self, text: str, quote: str) -> None:
        self.text = text
        self.quote = quote

    def value(self, place: int, depth: int) -> tuple[Any, int]:
        if depth > _DEPTH:
            raise MalformedError
        place = after_space(self.text, place)
        match self.text[place : place + 1]:
            case "{":
                return self._object(place + 1, depth)
            case "[":
                return self._list(place + 1, depth)
        if (quoted := self._quoted(place)) is not None:
            return quoted
        return self._bare(place)

    def _object(self, place: int, depth: int) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        while True:
            place = after_space(self.text, place)
            if self._at(place, "}"):
                return found, place + 1
            if found:
                place = after_space(self.text, self._expect(place, ","))
            name, place = self._quoted(place) or self._name(place)
            if name in found:
                raise MalformedError
            found[name], place = self.value(self._expect(after_space(self.text, place), ":"), depth + 1)

    def _list(self, place: int, depth: int) -> tuple[list[Any], int]:
        found: list[Any] = []
        while True:
            place = after_space(self.text, place)
            if self._at(place, "]"):
                return found, place + 1
            if found:
                place = self._expect(place, ",")
            item, place = self.value(place, depth + 1)
            found.append(item)

    def _quoted(self, place: int) -> tuple[str, int] | None:
        """Return the text between two marks; None if there is no mark here."""
        if not self.text.startswith(self.quote, place):
            if self.quote.startswith(self.text[place:]):
                raise UnfinishedError
            return None
        start = place + len(self.quote)
        end = self.text.find(self.quote, start)
        if end < 0:
            raise UnfinishedError
        return self.text[start:end], end + len(self.quote)

    def _name(self, place: int) -> tuple[str, int]:
        match = _BARE.match(self.text, place)
        if match is None:
            raise MalformedError
        if match.end() == len(self.text):
            raise UnfinishedError
        return match[0], match.end()

    def _bare(self, place: int) -> tuple[Any, int]:
        """Return a number or a literal."""
        name, end = self._name(place)
        if name in _LITERALS:
            return _LITERALS[name], end
        if not _NUMBER.fullmatch(name):
            raise MalformedError
        try:
            return json.loads(name), end
        except ValueError as error:  # more digits than Python converts
            raise MalformedError from error

    def _at(self, place: int, mark: str) -> bool:
        if place >= len(self.text):
            raise UnfinishedError
        return self.text[place] == mark

    def _expect(self, place: int, mark: str) -> int:
        if not self._at(place, mark):
            raise MalformedError
        return place + 1
