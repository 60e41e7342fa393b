"""Incremental decoding of tokens to text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

__all__ = ["GrowingText", "continuation", "printable"]

_BYTE = re.compile("<0x[0-9A-F]{2}>")
"""A token for one byte, in vocabularies with byte fallback."""
_INCOMPLETE = "\ufffd"
"""The replacement character, to which an incomplete character is decoded."""


def printable(text: str, keep: str = "") -> str:
    """Escape control characters other than those in ``keep``, which could control the terminal."""
    return "".join(
        c if c.isprintable() or c in keep or unicodedata.category(c) == "Zs" else c.encode("unicode_escape").decode()
        for c in text
    )


def continuation(tokenizer: Any, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """Decode token ids that follow a prompt, without special tokens.

    Some tokenizers drop a leading space; after a prompt, it is kept. A character that is incomplete at the end of the
    prompt belongs to the continuation.
    """
    before: str = tokenizer.decode(list(prompt), skip_special_tokens=True)
    whole: str = tokenizer.decode([*prompt, *ids], skip_special_tokens=True)
    for start in (before, before.rstrip(_INCOMPLETE)):
        if whole.startswith(start):
            return whole[len(start) :]
    alone: str = tokenizer.decode(list(ids), skip_special_tokens=True)
    return alone


class GrowingText:
    """Text decoded token by token, up to a stop string.

    Incomplete characters and possible beginnings of a stop string are held back until they are resolved. Text that was
    returned never changes: the pieces add up to :meth:`text`.

    Args:
        tokenizer: a tokenizer of the ``tokenizers`` library.
        prompt: preceding token ids, which determine whether the text begins with a space.
        stop: stop strings; the text ends before the first of them.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._before, self._held = list(prompt), list[int]()  # tokens decoded last, and those not yet decoded
        self._text = ""
        self._shown = 0
        self._cut: int | None = None

    def append(self, token: int) -> bool:
        """Add the next token; return whether a stop string has appeared."""
        self._held.append(token)
        if not self._may_change(token):
            piece = continuation(self._tokenizer, self._before, self._held)
            if not piece.endswith(_INCOMPLETE):
                self._take(piece)
        return self.stopped

    def new(self) -> str:
        """Return the text that has become final since the last call."""
        end = len(self._text) - self._open_end() if self._cut is None else self._cut
        piece = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece

    def rest(self) -> str:
        """Return the remaining text, after the last token."""
        piece = self.text()[self._shown :]
        self._shown += len(piece)
        return piece

    def text(self) -> str:
        """Return the whole text, after the last token."""
        if self._held and not self.stopped:
            self._take(continuation(self._tokenizer, self._before, self._held))
        return self._text[: self._cut]

    @property
    def stopped(self) -> bool:
        """Whether a stop string has appeared. Only :meth:`text` also searches tokens that are held back."""
        return self._cut is not None

    def _may_change(self, token: int) -> bool:
        """Whether the decoded text up to this token depends on the next token.

        A run of byte tokens is decoded as a whole, and one invalid byte changes the text of the others. A token without
        text, such as a special token, does not end the run.
        """
        name: str = self._tokenizer.id_to_token(token) or ""
        return _BYTE.fullmatch(name) is not None or not self._tokenizer.decode([token], skip_special_tokens=True)

    def _take(self, piece: str) -> None:
        """Append text, and search it for stop strings."""
        self._before, self._held = self._held, []
        longest = max(map(len, self._stop), default=0)
        start = max(0, len(self._text) - longest + 1)
        self._text += piece
        found = [place for place in (self._text.find(stop, start) for stop in self._stop) if place >= 0]
        self._cut = min(found, default=None)

    def _open_end(self) -> int:
        """Length of the longest suffix that could begin a stop string."""
        return max(
            (size for stop in self._stop for size in range(1, len(stop)) if self._text.endswith(stop[:size])),
            default=0,
        )
