"""Tokens of a tokenizer beyond the rows of a model's embedding."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from zoo.errors import ArtifactError
from zoo.tokenizers.library import description

__all__ = ["Surplus", "drop_surplus", "find_surplus", "without_tokens"]

_SHOWN = 3
_ROLES = ("bos_token", "eos_token", "unk_token", "cls_token", "sep_token", "mask_token")
"""Tokens that a model needs. Padding is masked, so that any token can pad."""


@dataclass(frozen=True)
class Surplus:
    """Tokens whose ids a model lacks, in the order of their ids."""

    tokens: Mapping[str, int]
    vocab_size: int
    """Number of rows of the model's embedding."""

    def __str__(self) -> str:
        shown = ", ".join(f"{token!r:.40} ({number})" for token, number in list(self.tokens.items())[:_SHOWN])
        more = f" and {len(self.tokens) - _SHOWN} more" if len(self.tokens) > _SHOWN else ""
        return f"{shown}{more}"


def find_surplus(tokenizer: Tokenizer, vocab_size: int | None) -> Surplus | None:
    """Return the tokens with ids from ``vocab_size`` on, or None if there are none."""
    surplus = {token: number for token, number in tokenizer.get_vocab().items() if number >= (vocab_size or number + 1)}
    ordered = dict(sorted(surplus.items(), key=lambda item: item[1]))
    return Surplus(ordered, vocab_size or 0) if surplus else None


def drop_surplus(tokenizer: Tokenizer, surplus: Surplus, settings: Mapping[str, Any], where: object) -> Tokenizer:
    """Return the tokenizer without surplus tokens, which then are texts like any other.

    Only tokens that were added to the vocabulary can be dropped. Without one of its own, texts would be split in
    another way.

    Args:
        tokenizer: unchanged.
        surplus: the tokens to drop.
        settings: tokenizer_config.json and special_tokens_map.json, which name tokens that the model needs.
        where: the file, for errors.

    Raises:
        ArtifactError: a surplus token belongs to the vocabulary itself, or the model needs it.
    """
    content = description(tokenizer, where)
    added = {item["content"] for item in content.get("added_tokens", ())}
    in_vocabulary = [token for token in surplus.tokens if token not in added or _in_vocabulary(content["model"], token)]
    if in_vocabulary:
        raise ArtifactError(f"{in_vocabulary[0]!r} belongs to the vocabulary and cannot be dropped", where)
    for role in _ROLES:
        if (token := _text(settings.get(role))) in surplus.tokens:
            raise ArtifactError(f"the {role} {token!r} lies beyond the {surplus.vocab_size} tokens of the model", where)
    content["added_tokens"] = [item for item in content["added_tokens"] if item["content"] not in surplus.tokens]
    return Tokenizer.from_str(json.dumps(content))


def without_tokens(content: Mapping[str, Any], dropped: Collection[str]) -> dict[str, Any]:
    """Return tokenizer_config.json or special_tokens_map.json without mentions of dropped tokens."""
    remaining = {key: value for key, value in content.items() if _text(value) not in dropped}
    for key, value in remaining.items():
        if key == "added_tokens_decoder" and isinstance(value, dict):
            remaining[key] = {number: item for number, item in value.items() if _text(item) not in dropped}
        elif isinstance(value, list):
            remaining[key] = [item for item in value if _text(item) not in dropped]
    return remaining


def _in_vocabulary(model: Any, token: str) -> bool:
    """Return whether the model of a tokenizer.json has a token, be it a mapping or a list of pieces."""
    vocabulary = model.get("vocab", ())
    if isinstance(vocabulary, dict):
        return token in vocabulary
    return any(piece[0] == token for piece in vocabulary)


def _text(value: Any) -> str | None:
    """Return a token that settings name as text or as an object."""
    token = value.get("content") if isinstance(value, dict) else value
    return token if isinstance(token, str) else None
