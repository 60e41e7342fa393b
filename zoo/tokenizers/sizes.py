"""Sizes of texts that operations of chat templates make, known before they are made."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from jinja2.exceptions import SecurityError

__all__ = ["FILTERS", "MAX_LENGTH", "METHODS", "formatted", "measure"]

MAX_LENGTH = 10**7
"""Maximum number of characters of a text, and of all texts in a list or a dictionary."""
_ITEM = 16
"""What an item of a list adds to its size."""
_CONTAINERS: Any = (list, tuple, type({}.keys()), type({}.values()), type({}.items()))
_WIDTH = 9999
_WIDER = re.compile(r"\d{5}|\*|:[^{}]*\{")
"""A width or a precision of more than :data:`_WIDTH`, or one that is an argument."""


def measure(value: Any) -> int:
    """Return the number of characters in a value. Raises :class:`SecurityError` beyond MAX_LENGTH."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return measure([*value, *value.values()])
    size = 1
    if isinstance(value, _CONTAINERS):
        for item in value:
            size += _ITEM + measure(item)
            if size > MAX_LENGTH:
                raise SecurityError(f"a value is longer than {MAX_LENGTH}")
    return size


def formatted(text: str, mark: str, values: object) -> int:
    """Return the maximum size of a format with ``mark``, ``%`` or ``{``, before each field."""
    if _WIDER.search(text):
        raise SecurityError(f"a format has fields wider than {_WIDTH}")
    return len(text) + text.count(mark) * (_WIDTH + measure(values))


def _joined(separator: str, items: Any) -> int:
    return len(separator) * len(items) + measure(items)


def _replaced(text: str, old: str, new: str, count: int | None = -1) -> int:
    found = text.count(old)
    return len(text) + len(new) * (found if count is None or count < 0 else min(found, count))


def _indented(text: str, width: int | str = 4, *_: Any, **named: Any) -> int:
    return len(text) + (text.count("\n") + 1) * (len(width) if isinstance(width, str) else width)


def _wrapped(text: str, width: int = 79, break_long_words: bool = True, wrapstring: str | None = None, **_: Any) -> int:
    return len(text) * (1 + len(wrapstring or "\n") + len(text) // max(width, 1))  # textwrap takes quadratic time


METHODS: Mapping[str, Callable[..., int]] = {
    "join": _joined,
    "replace": _replaced,
    "format": lambda text, *values, **named: formatted(text, "{", [*values, *named.values()]),
    "format_map": lambda text, values: formatted(text, "{", values),
    "ljust": lambda text, width, *_: width,
    "rjust": lambda text, width, *_: width,
    "center": lambda text, width, *_: width,
    "zfill": lambda text, width: width,
    "expandtabs": lambda text, tabsize=8: len(text) + text.count("\t") * tabsize,
}
"""Maximum size of the result of each method that can make a text longer, from its text and arguments."""

FILTERS: Mapping[str, Callable[..., int]] = {
    "replace": lambda text, old, new, *rest, **named: _replaced(str(text), str(old), str(new), *rest, **named),
    "join": lambda items, d="", attribute=None: _joined(str(d), items),
    "format": lambda text, *values, **named: formatted(str(text), "%", [*values, *named.values()]),
    "center": lambda text, width=80: width,
    "indent": lambda text, *rest, **named: _indented(str(text), *rest, **named),
    "wordwrap": lambda text, *rest, **named: _wrapped(str(text), *rest, **named),
    "batch": lambda items, linecount, fill_with=None: linecount,
    "slice": lambda items, slices, fill_with=None: slices,
    "round": lambda number, precision=0, method="common": 1000 * precision,
}
"""The same for filters."""
