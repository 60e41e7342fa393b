"""The text of tokens that are still coming."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

__all__ = ["GrowingText", "continuation"]


def continuation(tokenizer: Any, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """The text of token ids that follow a prompt, without special tokens.

    Some tokenizers drop a space that a text begins with: it is kept here where it follows a prompt.
    """
    before: str = tokenizer.decode(list(prompt), skip_special_tokens=True)
    whole: str = tokenizer.decode([*prompt, *ids], skip_special_tokens=True)
    if whole.startswith(before):
        return whole[len(before) :]
    alone: str = tokenizer.decode(list(ids), skip_special_tokens=True)
    return alone


class GrowingText:
    """Text that grows token by token, up to a stop string.

    A token may end within a character, and a text within what may become a stop string: neither is shown before it is
    complete.

    Args:
        tokenizer: of the ``tokenizers`` library.
        prompt: token ids that come before, which decide whether the text begins with a space.
        stop: texts before which it ends.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._prompt, self._stop = tokenizer, list(prompt), tuple(stop)
        self._stream = DecodeStream(skip_special_tokens=True)
        for token in self._prompt:
            self._stream.step(tokenizer, token)
        self._ids: list[int] = []
        self._text = ""
        self._shown = 0
        self._cut: int | None = None

    def append(self, token: int) -> bool:
        """Take the next token; whether a stop string has appeared."""
        self._ids.append(token)
        piece = self._stream.step(self._tokenizer, token)
        if piece:
            longest = max(map(len, self._stop), default=0)
            start = max(0, len(self._text) - longest + 1)
            self._text += piece
            found = [place for place in (self._text.find(stop, start) for stop in self._stop) if place >= 0]
            self._cut = min(found, default=None)
        return self._cut is not None

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
        """All of it, as it is if no further token comes."""
        if self._cut is not None:
            return self._text[: self._cut]
        return continuation(self._tokenizer, self._prompt, self._ids)

    def _open_end(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        return max(
            (size for stop in self._stop for size in range(1, len(stop)) if self._text.endswith(stop[:size])),
            default=0,
        )
