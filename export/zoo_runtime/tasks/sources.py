"""Prefixes of tasks and tokens of languages, which are added to the source of a translation."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from zoo.artifact.prefixes import read_prefixes
from zoo.config import Settings
from zoo.errors import UsageError, nearest
from zoo.tokenizers.tokenizer import Tokenizer
from zoo_runtime.generation.options import Generation
from zoo_runtime.running.context import Context
from zoo_runtime.running.text_runner import Tokens

__all__ = ["Languages", "PrefixOptions", "TranslateOptions", "task_prefix"]

_LANGUAGE = re.compile(r"[a-z]{2,3}_[A-Z][A-Za-z]{1,3}|__[a-z]{2,8}__")
"""Tokens of languages: those of mBART, such as en_XX, and of M2M100, such as __en__."""


@dataclass(frozen=True, kw_only=True)
class PrefixOptions(Settings):
    """Options of tasks that put a prefix before each text."""

    prefix: str | None = None
    """Text before each input, as the model has been trained with: ``translate English to German: ``, ``query: ``."""
    task_prefix: str | None = None
    """The name of a task whose prefix the checkpoint states, such as ``translation_en_to_de`` or ``query``."""

    def __post_init__(self) -> None:
        if self.prefix is not None and self.task_prefix is not None:
            raise ValueError(f"prefix {self.prefix!r} and task_prefix {self.task_prefix!r} exclude each other")


@dataclass(frozen=True, kw_only=True)
class TranslateOptions(PrefixOptions, Generation):
    """Options of generation from a source."""

    source: str | None = None
    """Language of the sources: a token of the tokenizer, such as ``en_XX``."""
    target: str | None = None
    """Language of the targets, the same."""

    def __post_init__(self) -> None:
        PrefixOptions.__post_init__(self)
        Generation.__post_init__(self)


def task_prefix(session: Context, chosen: PrefixOptions) -> str:
    """Return the text before each input. Raises :class:`UsageError` for an unknown task."""
    if chosen.task_prefix is None:
        return chosen.prefix or ""
    prefixes = read_prefixes(session.stored).texts
    if chosen.task_prefix not in prefixes:
        raise UsageError(
            f"no prefix for the task {chosen.task_prefix!r}", session.path, nearest(chosen.task_prefix, prefixes)
        )
    return prefixes[chosen.task_prefix]


class Languages:
    """The tokens of the languages of a translation.

    mBART-50 and M2M100 read the language before the source, and the first token of a target is forced to be its
    language (Tang et al. 2020; Fan et al. 2021). The first mBART reads it after the end token, and its decoder starts
    with the language (Liu et al. 2020, section 2.2).

    Args:
        session: the model; its tokenizer has the tokens.
        chosen: names the languages.
        last: whether a source ends with its language. A tokenizer that puts a language around texts has precedence.

    Raises:
        UsageError: a language is not a token, or the tokenizer's special tokens are disabled.
    """

    def __init__(self, session: Context, chosen: TranslateOptions, *, last: bool) -> None:
        self.last = last
        self.source = self.target = None
        self.known: dict[str, int] = {}
        if chosen.source is None and chosen.target is None:
            return
        if session.tokenizer is None:
            raise UsageError("languages need a tokenizer", session.path)
        if chosen.source is not None and not session.tokenizer.special_tokens:
            raise UsageError("source is a special token, but these are disabled", session.path, "leave out one of them")
        vocabulary = session.tokenizer.backend.get_vocab(with_added_tokens=True)
        self.known = {text: token for text, token in vocabulary.items() if _LANGUAGE.fullmatch(text)}
        self.source = self._token(session, chosen.source)
        self.target = self._token(session, chosen.target)

    def _token(self, session: Context, name: str | None) -> int | None:
        if name is None:
            return None
        token = self.known.get(name, self.known.get(f"__{name}__"))
        if token is None:
            raise UsageError(f"the tokenizer has no language {name!r}", session.path, nearest(name, self.known))
        return token

    def added(self, tokenizer: Tokenizer) -> int:
        """Return the number of tokens that :meth:`put` adds to a text; 0 if the tokenizer puts a language around it."""
        return int(self.source is not None and not self._places(tokenizer.encode("")))

    def _places(self, encoding: Any) -> list[int]:
        """Return the places of the languages that the tokenizer put around a text."""
        special = encoding.special_tokens_mask
        tokens = set(self.known.values())
        return [place for place, token in enumerate(encoding.ids) if special[place] and token in tokens]

    def put(self, item: Tokens) -> Tokens:
        """Return a source with the token of its language, instead of the one that the tokenizer put there, if any."""
        if self.source is None:
            return item
        places = self._places(item.encoding)
        if places:
            ids = [*item.ids[: places[0]], self.source, *item.ids[places[0] + 1 :]]
        else:
            ids = [*item.ids, self.source] if self.last else [self.source, *item.ids]
        return replace(item, ids=ids, types=())
