"""Bounds on the number of tokens of a text, without encoding it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from tokenizers.pre_tokenizers import ByteLevel

from zoo.tokenizers.library import description

__all__ = ["PieceBound", "longest_token"]

_DIVIDERS = {"ByteLevel", "Digits", "Split"}
"""Pre-tokenizers that divide texts, and leave parts of them out only with the behavior ``Removed``."""


def longest_token(backend: Any) -> int | None:
    """Return the most bytes of a text, in UTF-8, that one token stands for; None if this is not known.

    It is known of byte-level BPE, whose tokens add up to the text: n bytes have at least n / longest tokens.

    Args:
        backend: a tokenizer of the ``tokenizers`` library.
    """
    facts = description(backend)
    model, divider, added = facts["model"], facts["pre_tokenizer"] or {}, facts["added_tokens"]
    dividers = divider.get("pretokenizers", [divider])
    kinds = [one.get("type") for one in dividers]
    lossy = [one for one in dividers if one.get("behavior") == "Removed"]
    if model["type"] != "BPE" or facts["normalizer"] is not None or facts["truncation"] is not None:
        return None
    if "ByteLevel" not in kinds or not {*kinds} <= _DIVIDERS or lossy:
        return None
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    if not {*ByteLevel.alphabet()} <= model["vocab"].keys() or any(one["lstrip"] or one["rstrip"] for one in added):
        return None
    return max([*map(len, model["vocab"]), *(len(one["content"].encode()) for one in added)])


_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend", "Replace", "Strip"}
_SPACES = " \N{LOWER ONE EIGHTH BLOCK}"
_BYTES = {f"<0x{byte:02X}>" for byte in range(256)}
_MARGIN = 64
"""Characters at the end of a part of a text that may be normalized differently in the whole text."""


@dataclass(frozen=True)
class PieceBound:
    """A lower bound on the tokens of texts for SentencePiece vocabularies.

    A character that is a piece by itself is never part of an unknown token, nor is any where unknown ones become bytes.
    A piece has at most so many characters.

    Args:
        backend: the tokenizer.
        characters: the pieces of one character; None if no character becomes part of an unknown token.
        longest: the most characters of a piece.
    """

    backend: Any
    characters: frozenset[str] | None
    longest: int

    @classmethod
    def of(cls, backend: Any) -> Self | None:
        """Return the bound for a tokenizer of the ``tokenizers`` library; None if it is not known to hold."""
        facts = description(backend)
        model, added = facts["model"], facts["added_tokens"]
        parts = _parts(facts["normalizer"], "normalizers")
        dividers = _parts(facts["pre_tokenizer"], "pretokenizers")
        if model["type"] not in ("BPE", "Unigram") or facts["truncation"] is not None:
            return None
        if model.get("dropout") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
            return None
        if not all(map(_keeps_letters, dividers)) or not {one["type"] for one in parts} <= _NORMALIZERS:
            return None
        if any(_replaces_letters(one) for one in parts):
            return None
        pieces = [piece for piece, *_ in model["vocab"]] if isinstance(model["vocab"], list) else [*model["vocab"]]
        single = frozenset(piece for piece in pieces if len(piece) == 1 and piece not in _SPACES)
        has_bytes = bool(model.get("byte_fallback")) and {*pieces} >= _BYTES
        longest = max(map(len, (*pieces, *(one["content"] for one in added))), default=1)
        return cls(backend, None if has_bytes and not any(map(_drops_spaces, dividers)) else single, longest)

    def fewest(self, text: str, count: int) -> int:
        """Return a number of tokens that a text has at least, from as much of it as ``count`` tokens can be."""
        part = text[: 2 * (count + 1) * self.longest + _MARGIN]
        if len(part) == len(text):
            return 0  # short enough to be encoded
        normalizer = self.backend.normalizer
        normalized = part if normalizer is None else normalizer.normalize_str(part)
        judged = normalized[:-_MARGIN]
        known = len(judged) if self.characters is None else sum(one in self.characters for one in judged)
        return -(-known // self.longest)


def _parts(component: Any, name: str) -> list[Any]:
    """Return the components of a sequence, or the only one."""
    if component is None:
        return []
    return list(component[name]) if component["type"] == "Sequence" else [component]


def _keeps_letters(divider: Any) -> bool:
    """Return whether a pre-tokenizer leaves out spaces alone."""
    spaces = divider["type"] == "Split" and divider["pattern"] == {"String": " "}
    return spaces or divider["type"] in ("Metaspace", "WhitespaceSplit")


def _drops_spaces(divider: Any) -> bool:
    return divider["type"] == "WhitespaceSplit" or divider.get("behavior") == "Removed"


def _replaces_letters(normalizer: Any) -> bool:
    """Return whether a normalizer replaces other characters than spaces, of which there may be more."""
    pattern = normalizer.get("pattern", {})
    return normalizer["type"] == "Replace" and pattern.get("String", pattern.get("Regex")) not in (" ", " {2,}")
