"""Bounds on the number of tokens of a text, without encoding it."""

from __future__ import annotations

from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from zoo.tokenizers.library import description

__all__ = ["longest_token"]

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
