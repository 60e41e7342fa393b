"""Prefixes of a long text whose tokens are the first tokens of the whole text.

A text of 4 MB takes a gigabyte to encode, though a model reads a few hundred of its tokens. A prefix ends between a
letter or a digit and a space, where the known components of a tokenizer never join two parts of a text; for tokenizers
like BERT's also at punctuation, line breaks and ideographs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from zoo.tokenizers.library import description, guarded
from zoo.tokenizers.long_texts.bounds import PieceBound, longest_token

__all__ = ["TextPrefixes"]

_CHARACTERS_PER_TOKEN = 16
"""Characters of the first prefix that is tried, for each token; a longer one is tried if it has too few."""
_SPACES = " \N{LOWER ONE EIGHTH BLOCK}\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"
"""A space in the symbols of WordPiece, SentencePiece and byte-level BPE."""
_NORMALIZERS = {"BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled",
                "Prepend", "Strip", "StripAccents"}  # fmt: skip
"""Normalizers that change characters with their combining marks alone, or the ends of a text."""
_PRE_TOKENIZERS = {"BertPreTokenizer", "ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "Whitespace",
                   "WhitespaceSplit"}  # fmt: skip
_DIVIDERS = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}
"""Pre-tokenizers that divide a text at every space."""
_ISOLATED = (  # compiled on first use, in 5 ms
    "(?:[,.;:!?\u3400-\u4dbf\u4e00-\u9fff](?=[0-9A-Za-z\u3400-\u4dbf\u4e00-\u9fff])|[0-9A-Za-z](?=[\\n\\t]))"
)
"""Characters after which BERT's pre-tokenizer divides a text, and its normalizer between ideographs."""
_WINDOW = 1000
"""Characters before the end of a prefix in which such a place is looked for."""
_ENDS = re.compile(r"\(\?|\\[AbBGzZ]|\$|(?<!\[)\^")
"""Parts of a regular expression whose match depends on where the text ends, apart from the harmless groups."""
_HARMLESS = re.compile(r"\(\?(?:i?:|>|!\\S\)|!\\d\)|=\(\\d\{3\}\)\+\(\?!\\d\)\))")
_PROBES = [
    first + second for first in ("a", "Zb", "7", "it's", "x.y", "12ab") for second in (" b", " 7", "  c", " ,", " \n")
]


class TextPrefixes:
    """Prefixes of texts for one tokenizer.

    Args:
        backend: a tokenizer of the ``tokenizers`` library that does not truncate.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    # Each of these serialises the whole vocabulary, which short texts do not need.

    @cached_property
    def _longest(self) -> int | None:
        return longest_token(self._backend)

    @cached_property
    def _divides(self) -> bool:
        return _divides_at_spaces(self._backend)

    @cached_property
    def _isolates(self) -> bool:
        return self._divides and _isolates(self._backend)

    @cached_property
    def _bound(self) -> PieceBound | None:
        return PieceBound.of(self._backend)

    def with_more_tokens(self, text: str, count: int, where: object = None) -> str:
        """Return a prefix that has more tokens than ``count``, without special tokens, or else the whole text."""
        size = _CHARACTERS_PER_TOKEN * (count + 1)
        while size < len(text) // 2 and self._divides:
            end = self._boundary(text, size)
            if end and self.count(text[:end], where) > count:
                return text[:end]
            size *= 2
        return text

    def exceeds(self, text: str, count: int, where: object = None) -> bool:
        """Return whether a text has more tokens than ``count``, found without encoding all of it; False if unknown."""
        if self._longest is not None and len(text.encode(errors="replace")) > count * self._longest:
            return True
        if self._bound is not None and self._bound.fewest(text, count) > count:
            return True
        return len(self.with_more_tokens(text, count, where)) < len(text)

    def count(self, text: str, where: object = None) -> int:
        """Return the number of tokens of a text, without special tokens; 0 if it cannot be encoded."""
        with guarded(where):
            try:
                return len(self._backend.encode_batch_fast([text], add_special_tokens=False)[0])
            except Exception:  # the library raises bare Exception: the caller, who encodes the whole text, reports it
                return 0

    def _boundary(self, text: str, size: int) -> int:
        """Return the last place up to ``size`` where a text is divided for sure; 0 if there is none."""
        if self._isolates:
            start = max(0, size - _WINDOW)
            places = [found.end() + start for found in re.finditer(_ISOLATED, text[start : size + 1])]
            if places:
                return places[-1]
        end = text.rfind(" ", 0, size)
        while end > 0 and not self._is_word(text[end - 1]):
            end = text.rfind(" ", 0, end)
        return max(end, 0)

    def _is_word(self, character: str) -> bool:
        """Return whether a character is a letter or a digit, and stays one."""
        normalizer = self._backend.normalizer
        changed = character if normalizer is None else normalizer.normalize_str(character).strip(_SPACES)
        return character.isalnum() and changed != "" and (character.isascii() or changed[-1].isalnum())


def _divides_at_spaces(backend: Any) -> bool:
    """Return whether a tokenizer treats what precedes a letter and a space apart from what follows."""
    facts = description(backend)
    model, normalizers = facts["model"], [*_parts(facts["normalizer"])]
    pre_tokenizers = [*_parts(facts["pre_tokenizer"])]
    if facts["truncation"] is not None or model.get("dropout"):
        return False
    if not all(_is_local(one) for one in normalizers) or not {one["type"] for one in pre_tokenizers} <= _PRE_TOKENIZERS:
        return False
    if any(_crosses(token["content"]) for token in facts["added_tokens"]):
        return False
    splits = [one["pattern"] for one in pre_tokenizers if one["type"] == "Split"]
    if not all(_is_blind(one) for one in splits):
        return False
    divided = any(map(_divides, pre_tokenizers)) and all(_is_divided(backend.pre_tokenizer, probe) for probe in _PROBES)
    if divided or model["type"] not in ("BPE", "Unigram"):
        return divided
    if (
        any("Regex" in one for one in splits)
        or model.get("continuing_subword_prefix")
        or model.get("end_of_word_suffix")
    ):
        return False
    vocabulary = [piece for piece, *_ in model["vocab"]] if isinstance(model["vocab"], list) else model["vocab"]
    return any(space in vocabulary for space in _SPACES) and not any(map(_crosses, vocabulary))


def _isolates(backend: Any) -> bool:
    """Return whether a tokenizer divides texts as BERT's does, and no added token reaches across such a place."""
    facts = description(backend)
    normalizers = [*_parts(facts["normalizer"])]
    pads = any(one["type"] == "BertNormalizer" and one["handle_chinese_chars"] for one in normalizers)
    divides = [one["type"] for one in _parts(facts["pre_tokenizer"])] == ["BertPreTokenizer"]
    crossing = any(token["single_word"] or re.search(_ISOLATED, token["content"]) for token in facts["added_tokens"])
    return pads and divides and not crossing


def _parts(component: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield the components of a sequence, or the only one."""
    if component is not None and component["type"] == "Sequence":
        for part in (*component.get("normalizers", ()), *component.get("pretokenizers", ())):
            yield from _parts(part)
    elif component is not None:
        yield component


def _is_local(normalizer: Mapping[str, Any]) -> bool:
    if normalizer["type"] != "Replace":
        return normalizer["type"] in _NORMALIZERS
    pattern = normalizer["pattern"]
    text = pattern.get("String", pattern.get("Regex", ""))
    spaces = re.fullmatch(r"(?: |\\s)(?:\+|\{\d,\})?", text) if "Regex" in pattern else None
    return spaces is not None or ("String" in pattern and not any(map(str.isalnum, text)))


def _is_blind(pattern: Mapping[str, str]) -> bool:
    """Return whether a pattern that divides texts does not see what follows a letter and a space."""
    if "String" in pattern:
        return not _crosses(pattern["String"])
    return _ENDS.search(_HARMLESS.sub("", pattern["Regex"])) is None


def _divides(pre_tokenizer: Mapping[str, Any]) -> bool:
    kind = pre_tokenizer["type"]
    if kind == "ByteLevel":
        return bool(pre_tokenizer.get("use_regex", True))
    return kind in _DIVIDERS or kind == "Split" or (kind == "Metaspace" and bool(pre_tokenizer.get("split", True)))


def _is_divided(pre_tokenizer: Any, text: str) -> bool:
    """Return whether a text is divided before its first space."""
    place = text.index(" ")
    return any(end == place for _, (_, end) in pre_tokenizer.pre_tokenize_str(text))


_CROSSING = re.compile("(?:[^\\W_]|[\u00a1-\u00bf\u0122-\u0143]) ")
"""The second set are the symbols of the bytes 128 to 191, one of which ends each character beyond ASCII."""


def _crosses(piece: str) -> bool:
    """Return whether a token has a space after a letter or a digit."""
    for space in _SPACES:
        piece = piece.replace(space, " ")
    return _CROSSING.search(piece) is not None
