"""Text of token ids that arrive one by one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from zoo.tokenizers.cleaning import cleans, unfinished
from zoo.tokenizers.library import guarded

__all__ = ["TextStream", "continuation"]

_BYTE = re.compile("<0x[0-9A-F]{2}>")
"""A token for one byte, in vocabularies with byte fallback."""
_INCOMPLETE = "\ufffd"
"""The replacement character, to which an incomplete character is decoded."""


def continuation(backend: Any, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """Decode token ids that follow a prompt, without special tokens.

    Some tokenizers drop a leading space; after a prompt, it is kept. A character that is incomplete at the end of the
    prompt belongs to the continuation.
    """
    before = _decode(backend, prompt)
    whole = _decode(backend, [*prompt, *ids])
    for start in (before, before.rstrip(_INCOMPLETE)):
        if whole.startswith(start):
            return whole[len(start) :]
    return _decode(backend, ids)


class TextStream:
    """Decodes tokens one by one, without special tokens. Text that was returned never changes.

    The pieces add up to the :func:`continuation` of the prompt: incomplete characters, and runs of byte tokens and
    spaces that later tokens may change, are held back.

    Args:
        backend: a tokenizer of the ``tokenizers`` library.
        prompt: preceding token ids, which determine whether the text begins with a space.
    """

    def __init__(self, backend: Any, prompt: Sequence[int] = ()) -> None:
        self._backend = backend
        self._before, self._held = list(prompt), list[int]()  # tokens that precede the next piece, and its own
        self._decoder: DecodeStream | None = None
        """Decodes what follows a piece that is complete by itself."""
        self._cleans = cleans(backend)
        self._decoded = 0
        """Number of held tokens that the decoder has."""

    def step(self, token: int) -> str:
        """Add the next token; return the text that becomes final, which may be empty."""
        self._held.append(token)
        piece = None if self._may_change(token) else self._next()
        if piece is None:
            return ""
        # the spaces that are removed depend on all tokens before
        self._before = [*self._before, *self._held] if self._cleans else self._held
        self._held = []
        self._decoded = 0
        return piece

    def rest(self) -> str:
        """Return the text that was held back, after the last token."""
        piece = continuation(self._backend, self._before, self._held) if self._held else ""
        self._before = self._held or self._before
        self._held = []
        self._decoder = None
        return piece

    def _next(self) -> str | None:
        """Return the text of the held tokens; None if its last character is incomplete."""
        if self._decoder is not None:
            fresh, self._decoded = self._held[self._decoded :], len(self._held)
            with guarded():
                piece: str | None = self._decoder.step(self._backend, fresh)
            return piece
        text = continuation(self._backend, self._before, self._held)
        if text.endswith(_INCOMPLETE):
            return None
        if not self._cleans and not _decode(self._backend, self._held).endswith(_INCOMPLETE):
            self._decoder = DecodeStream(ids=self._held, skip_special_tokens=True)
        return text

    def _may_change(self, token: int) -> bool:
        """Whether the decoded text up to this token depends on the next token.

        A run of byte tokens is decoded as a whole, and one invalid byte changes the text of the others. A token without
        text, such as a special token, does not end the run.
        """
        name: str = self._backend.id_to_token(token) or ""
        if self._cleans and unfinished(continuation(self._backend, self._before, self._held)):
            return True
        return _BYTE.fullmatch(name) is not None or not _decode(self._backend, [token])


def _decode(backend: Any, ids: Sequence[int]) -> str:
    with guarded():
        text: str = backend.decode(list(ids), skip_special_tokens=True)
    return text
