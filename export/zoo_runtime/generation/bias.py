"""Biases of tokens: the option ``logit_bias``. V vocabulary."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zoo.arrays import Array
from zoo.errors import UsageError, argument
from zoo.terminal import is_unicode
from zoo.tokenizers.library import guarded

if TYPE_CHECKING:
    from zoo.tokenizers.tokenizer import Tokenizer

__all__ = ["MOST_BIAS", "Bias", "bias_settings", "make_bias", "read_bias"]

MOST_BIAS = 1e30
"""Largest absolute value of a bias: sums of many, and their products with penalties, are finite in float32."""
_IDS = re.compile(r"\d+(,\d+)*")


class Bias:
    """Values that are added to the logits of tokens, as by transformers' ``sequence_bias``.

    Args:
        values: by token ids. The value of several ids is added to the last one after the others.
    """

    def __init__(self, values: Mapping[tuple[int, ...], float]) -> None:
        self.values = dict(values)

    def add(self, logits: Array, text: Sequence[int]) -> None:
        """Add the values to the logits (V,) of a text's next token."""
        for (*before, token), value in self.values.items():
            if not before or list(text[-len(before) :]) == before:
                logits[token] += value


def bias_settings(values: Mapping[Any, Any]) -> tuple[str, ...]:
    """Return a mapping from ids, tuples of ids or texts to values as settings ``KEY=VALUE``; texts as JSON."""
    written = []
    for key, value in values.items():
        parts = key if isinstance(key, tuple) else (key,)
        if not isinstance(key, str) and not all(type(part) is int and part >= 0 for part in parts):
            raise ValueError(f"logit_bias has the key {key!r}: write a token id, a tuple of them, or a text")
        name = json.dumps(key) if isinstance(key, str) else ",".join(map(str, parts))
        written.append(f"{name}={value}")
    return tuple(written)


def read_bias(settings: Sequence[str]) -> dict[tuple[int, ...] | str, float]:
    """Return the values by token ids or by text. Raises :class:`ValueError` for a malformed setting.

    >>> read_bias(["262=-5", "12,7=1.5", " the=2", '"5"=1'])
    {(262,): -5.0, (12, 7): 1.5, ' the': 2.0, '5': 1.0}
    """
    values: dict[tuple[int, ...] | str, float] = {}
    for setting in settings:
        name, separator, text = setting.rpartition("=")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not separator or not name or not math.isfinite(value):
            raise ValueError(f"logit_bias {setting!r} is not TOKEN=VALUE with a finite number")
        if abs(value) > MOST_BIAS:
            raise ValueError(f"logit_bias must lie in [-{MOST_BIAS:g}, {MOST_BIAS:g}], got {setting}")
        key: tuple[int, ...] | str = name
        if _IDS.fullmatch(name):
            key = tuple(map(int, name.split(",")))
        elif len(name) > 1 and name[0] == name[-1] == '"':
            key = _read_quoted(name)
        if isinstance(key, str) and not is_unicode(key):
            raise ValueError(f"logit_bias {setting!r} is not valid Unicode")
        if not key:
            raise ValueError(f"logit_bias {setting!r} has an empty text")
        if key in values:
            raise ValueError(f"logit_bias has two values for {name}")
        values[key] = value
    return values


def _read_quoted(name: str) -> str:
    try:
        return str(json.loads(name))
    except ValueError as error:
        raise ValueError(f"logit_bias has the text {name}, which is not valid JSON") from error


def make_bias(settings: Sequence[str], tokenizer: Tokenizer | None, vocabulary: int) -> Bias | None:
    """Return the bias of settings, with texts as token ids; None without any.

    Raises:
        UsageError: a token is outside the vocabulary, or a text has no tokens or there is no tokenizer.
    """
    where = argument("logit_bias")
    values = {}
    for key, value in read_bias(settings).items():
        ids = key if isinstance(key, tuple) else _encode(key, tokenizer, where)
        if outside := [token for token in ids if token >= vocabulary]:
            raise UsageError(f"token {outside[0]} is outside the vocabulary of {vocabulary}", where)
        if ids in values:
            raise UsageError(f"two values for {key!r}", where)
        values[ids] = value
    return Bias(values) if values else None


def _encode(text: str, tokenizer: Tokenizer | None, where: object) -> tuple[int, ...]:
    if tokenizer is None:
        raise UsageError(f"the text {text!r} needs a tokenizer", where, "give a token id")
    with guarded(where):
        ids = tuple(tokenizer.target.backend.encode(text, add_special_tokens=False).ids)
    if not ids:
        raise UsageError(f"the text {text!r} has no tokens", where)
    return ids
