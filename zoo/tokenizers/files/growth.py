"""How much longer the components of a tokenizer may make a text."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from math import prod
from typing import Any

from tokenizers import Tokenizer

from zoo.limits import TEXT_GROWTH

__all__ = ["check_growth"]

_PARTS = ("normalizers", "pretokenizers", "processors", "decoders")
"""Keys of a tokenizer.json for the parts of a sequence."""
_FACTORS = {"BertNormalizer": 3, "ByteLevel": 4, "Metaspace": 2}
"""Factors of components without texts of their own: spaces around a character, a character per byte, a first space."""


def check_growth(tokenizer: Tokenizer, where: object) -> None:
    """Raise :class:`ArtifactError` if a tokenizer may make texts much longer, which takes any amount of memory."""
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        component = getattr(tokenizer, name)
        if component is not None:
            growth = _growth(json.loads(component.__getstate__()))
            TEXT_GROWTH.check(growth, f"the {name} may make a text {growth:,.0f} times as long", where)


def _growth(component: Mapping[str, Any]) -> float:
    """Return the factor by which a component of a tokenizer.json makes a text longer at most."""
    kind = component["type"]
    if kind == "Sequence":
        return prod(_growth(part) for key in _PARTS for part in component.get(key, ()))
    if kind == "Replace":
        replaced, content = component["pattern"].get("String"), len(component["content"])
        return max(1, content / len(replaced)) if replaced else 1 + content  # an expression may match no character
    if kind == "Prepend":
        return 1 + len(component["prepend"])
    if kind == "Precompiled":
        return _longest_replacement(component["precompiled_charsmap"])
    if kind == "TemplateProcessing":
        return max(_pieces(component[part], component["special_tokens"]) for part in ("single", "pair"))
    return _FACTORS.get(kind, 1)


def _longest_replacement(charsmap: str) -> int:
    """Return the length of the longest text of SentencePiece's map, whose tree of the given size precedes the texts."""
    content = base64.b64decode(charsmap)
    texts = content[4 + int.from_bytes(content[:4], "little") :]
    return max(1, *(len(text.decode(errors="replace")) for text in texts.split(b"\0")))


def _pieces(template: list[Mapping[str, Any]], tokens: Mapping[str, Any]) -> int:
    """Return the number of texts and tokens in a template."""
    names = [piece["SpecialToken"]["id"] if "SpecialToken" in piece else None for piece in template]
    return sum(1 if name is None else len(tokens.get(name, {"ids": ()})["ids"]) for name in names)
