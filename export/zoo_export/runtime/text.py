"""The text of tokens that are still coming."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

__all__ = ["GrowingText", "continuation", "printable"]

_BYTE = re.compile("<0x[0-9A-F]{2}>")
"""A token for one byte, in vocabularies that fall back to bytes."""
_INCOMPLETE = "\ufffd"
"""What a character is decoded to while bytes of it are missing."""


def printable(text: str, keep: str = "") -> str:
    """A text whose control characters, save those in ``keep``, are escaped: they would command a terminal."""
    return "".join(
        c if c.isprintable() or c in keep or unicodedata.category(c) == "Zs" else c.encode("unicode_escape").decode()
        for c in text
    )


def continuation(tokenizer: Any, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """The text of token ids that follow a prompt, without special tokens.

    Some tokenizers drop a space that a text begins with: it is kept here where it follows a prompt. A character that
    the prompt only begins belongs to what follows.
    """
    before: str = tokenizer.decode(list(prompt), skip_special_tokens=True)
    whole: str = tokenizer.decode([*prompt, *ids], skip_special_tokens=True)
    for start in (before, before.rstrip(_INCOMPLETE)):
        if whole.startswith(start):
            return whole[len(start) :]
    alone: str = tokenizer.decode(list(ids), skip_special_tokens=True)
    return alone


class GrowingText:
    """Text that grows token by token, up to a stop string.

    A token may end within a character, and a text within what may become a stop string: neither is shown before it is
    complete. What is shown never changes: pieces make up :meth:`text`.

    Args:
        tokenizer: of the ``tokenizers`` library.
        prompt: token ids that come before, which decide whether the text begins with a space.
        stop: texts before which it ends.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._before, self._held = list(prompt), list[int]()  # tokens decoded last, and those that wait for others
        self._text = ""
        self._shown = 0
        self._cut: int | None = None

    def append(self, token: int) -> bool:
        """Take the next token; whether a stop string has appeared."""
        self._held.append(token)
        if not self._may_change(token):
            piece = continuation(self._tokenizer, self._before, self._held)
            if not piece.endswith(_INCOMPLETE):
                self._take(piece)
        return self.stopped

    def new(self) -> str:
        """What can be shown and was not yet."""
        end = len(self._text) - self._open_end() if self._cut is None else self._cut
        piece = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece

    def rest(self) -> str:
        """What is left to be shown when no further token comes."""
        piece = self.text()[self._shown :]
        self._shown += len(piece)
        return piece

    def text(self) -> str:
        """All of it, when no further token comes."""
        if self._held and not self.stopped:
            self._take(continuation(self._tokenizer, self._before, self._held))
        return self._text[: self._cut]

    @property
    def stopped(self) -> bool:
        """Whether a stop string has appeared. Only :meth:`text` looks for it in what is incomplete."""
        return self._cut is not None

    def _may_change(self, token: int) -> bool:
        """Whether the text of the tokens up to this one depends on the next.

        A run of single bytes is decoded as a whole: one that is no UTF-8 spoils those before it. A token without text
        of its own, a special one for example, does not end the run.
        """
        name: str = self._tokenizer.id_to_token(token) or ""
        return _BYTE.fullmatch(name) is not None or not self._tokenizer.decode([token], skip_special_tokens=True)

    def _take(self, piece: str) -> None:
        """Add text, and look for stop strings in what is new."""
        self._before, self._held = self._held, []
        longest = max(map(len, self._stop), default=0)
        start = max(0, len(self._text) - longest + 1)
        self._text += piece
        found = [place for place in (self._text.find(stop, start) for stop in self._stop) if place >= 0]
        self._cut = min(found, default=None)

    def _open_end(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        return max(
            (size for stop in self._stop for size in range(1, len(stop)) if self._text.endswith(stop[:size])),
            default=0,
        )
