"""Text that is safe on a terminal.

Names, versions and messages come from files, plugins and libraries. Control characters in them could move the cursor,
change the terminal's settings or hide what was printed before.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable
from functools import cache

__all__ = ["LINE", "is_unicode", "one_line", "printable", "printable_json", "shown"]

LINE = 4000
"""Maximum number of characters in a line of :func:`one_line`."""
_SHOWN = 200

_SURROGATE = re.compile("[\ud800-\udfff]")


class _Escapes(dict[int, str]):
    """What ``str.translate`` puts in the place of each character. Entries are made on first use."""

    def __init__(self, keep: str, escape: Callable[[str], str]) -> None:
        self._keep = keep
        self._escape = escape

    def __missing__(self, code: int) -> str:
        character = chr(code)
        plain = character.isprintable() or character in self._keep or unicodedata.category(character) == "Zs"
        self[code] = character if plain else self._escape(character)
        return self[code]


def _python_escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


_JSON = _Escapes("\n", lambda character: json.dumps(character)[1:-1])
_text_escapes = cache(lambda keep: _Escapes(keep, _python_escape))


def is_unicode(text: str) -> bool:
    """Return whether a text has no halves of characters (surrogates), which UTF-8 and most libraries refuse."""
    return text.isascii() or _SURROGATE.search(text) is None


def printable(text: str, keep: str = "") -> str:
    r"""Escape characters that are not printable, except those in ``keep``.

    >>> printable("caf\u00e9\x1b[2J\n")
    'café\\x1b[2J\\n'
    """
    return text if text.isprintable() else text.translate(_text_escapes(keep))


def printable_json(text: str) -> str:
    """Escape characters of a JSON document that are not printable, so that it stays the same document."""
    return text.translate(_JSON)


def one_line(text: object, limit: int = LINE) -> str:
    """Return text on one printable line of at most ``limit`` characters; the middle of a longer one is left out."""
    line = printable(" ".join(str(text).split()))
    if len(line) <= limit:
        return line
    note = f" [... {len(line):,} characters ...] "
    start = (limit - len(note)) * 3 // 4
    return line[:start] + note + line[start + len(note) - limit :]


def shown(value: object) -> str:
    """Return the first 200 characters of a value's ``repr``, or of its type and address if it has none."""
    try:
        return repr(value)[:_SHOWN]
    except Exception:  # such as an integer with too many digits
        return object.__repr__(value)[:_SHOWN]
