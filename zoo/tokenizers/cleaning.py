"""Removal of the spaces that a tokenizer puts before punctuation and contractions, as transformers does it."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer, decoders

__all__ = ["cleans", "remove_spaces", "unfinished"]

_CHANGES = {
    " .": ".", " ?": "?", " !": "!", " ,": ",", " ' ": "'", " n't": "n't", " 'm": "'m", " 's": "'s", " 've": "'ve",
    " 're": "'re",
}  # fmt: skip
"""Texts and what replaces them, one after the other."""
_BEGINNINGS = tuple({text[:end] for text in _CHANGES for end in range(1, len(text))})
_NO_PREFIX = "\U000f0000"
"""A prefix that no token has: WordPiece's decoder puts a space before every other token."""


def remove_spaces(tokenizer: Tokenizer) -> None:
    """Make a tokenizer remove these spaces from decoded texts, in place."""
    # without a decoder, tokens are joined by spaces
    decoder = tokenizer.decoder or decoders.WordPiece(prefix=_NO_PREFIX, cleanup=False)
    replaced = [decoders.Replace(text, other) for text, other in _CHANGES.items()]
    tokenizer.decoder = decoders.Sequence([decoder, decoders.Fuse(), *replaced])


def cleans(tokenizer: Any) -> bool:
    """Return whether a tokenizer removes these spaces."""
    decoder = tokenizer.decoder
    parts = [] if decoder is None else json.loads(decoder.__getstate__()).get("decoders", [])
    return any(part.get("pattern") == {"String": " n't"} for part in parts)


def unfinished(text: str) -> bool:
    """Return whether later tokens may change the end of a text from which spaces are removed."""
    return text.endswith(_BEGINNINGS)
