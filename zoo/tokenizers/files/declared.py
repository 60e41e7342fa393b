"""Tokens that files beside a tokenizer.json declare, added to the tokenizer in the order of transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer

from zoo.errors import ArtifactError
from zoo.tokenizers.files.classes import TokenizerClass

__all__ = ["ROLES", "DeclaredTokens", "add_tokens", "read_declared"]

ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""The special tokens that any tokenizer may name, in the order in which they are added."""
_KEYS = tuple(f"{role}_token" for role in ROLES)
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")


@dataclass(frozen=True, kw_only=True)
class DeclaredTokens:
    """The tokens of tokenizer_config.json, special_tokens_map.json and added_tokens.json."""

    numbered: Mapping[int, AddedToken]
    """Tokens with the ids that the files state. They are added in this order, whatever ids they get."""
    named: Mapping[str, AddedToken | str]
    """Special tokens by their key, such as ``mask_token``."""
    extra: tuple[AddedToken | str, ...]
    """Further special tokens."""
    unstated: frozenset[str] = frozenset()
    """Texts of special tokens that no file states: the class has them by default."""

    @property
    def texts(self) -> dict[str, str]:
        """The text of each named token, by its key."""
        return {key: _text(token) for key, token in self.named.items()}

    @property
    def all_texts(self) -> tuple[str, ...]:
        """The text of each token."""
        return tuple(dict.fromkeys(map(_text, (*self.numbered.values(), *self.named.values(), *self.extra))))

    def name(self, role: str) -> str | None:
        """Return the text of a special token, given its role."""
        return self.texts.get(f"{role}_token")


def read_declared(
    config: Mapping[str, Any],
    names: Mapping[str, Any],
    added: Mapping[str, Any],
    listed: Iterable[Mapping[str, Any]],
    where: object,
    *,
    kind: TokenizerClass | None = None,
    padding: str | None = None,
) -> DeclaredTokens:
    """Return the tokens that files declare.

    Args:
        config: the content of tokenizer_config.json.
        names: that of special_tokens_map.json. Like the next two, it counts only if ``config`` has no
            ``added_tokens_decoder``.
        added: that of added_tokens.json.
        listed: ``added_tokens`` of tokenizer.json.
        where: the path of tokenizer_config.json, for errors.
        kind: the class of the tokenizer, whose tokens stand in for those that the files do not name; None if it has
            none.
        padding: the padding token of tokenizer.json, which stands in for ``pad_token``.

    Raises:
        ArtifactError: a token or a list of tokens is malformed.
    """
    stated = dict(config)
    if "additional_special_tokens" in stated and not stated.get("extra_special_tokens"):
        stated["extra_special_tokens"] = stated.pop("additional_special_tokens")
    own_roles = _own(stated)
    numbered: dict[int, AddedToken] = {}
    if "added_tokens_decoder" in stated:
        for number, token in _mapping(stated["added_tokens_decoder"], "added_tokens_decoder", where).items():
            numbered[_number(number, where)] = _token(token, "added_tokens_decoder", where)
    else:
        before = stated.get("extra_special_tokens")
        stated |= {key: _marked(value) if key != "extra_special_tokens" else value for key, value in names.items()}
        after = stated.get("extra_special_tokens")
        if isinstance(before, list) and isinstance(after, list) and after is not before:
            stated["extra_special_tokens"] = [*before, *(token for token in after if token not in before)]
        # As in transformers, objects of tokenizer_config.json do not count here.
        special = {_text(stated[key]) for key in _KEYS if isinstance(stated.get(key), str) or key in names}
        special |= {token for token in stated.get("extra_special_tokens") or () if isinstance(token, str)}
        for content, number in added.items():
            is_special = content in special
            numbered[_number(number, where)] = AddedToken(content, normalized=not is_special, special=is_special)
        for token in listed:
            numbered[token["id"]] = _token(token, "added_tokens", where)
        own_roles |= _own(stated)
    by_text = {token.content: token for token in numbered.values()}
    named = _named(stated, where, kind, padding, by_text)
    named |= {key: _string_or_token(token, key, where) for key, token in own_roles.items()}
    extra, listed_by_class = stated.get("extra_special_tokens"), []
    if extra is None:
        extra = stated.get("additional_special_tokens")
        before = extra or []
        extra = kind.extra(config, extra) if kind is not None else extra
        listed_by_class = [token for token in extra or () if token not in before]
    if not isinstance(extra, list | None):
        raise ArtifactError("extra_special_tokens must be a list or an object of tokens", where)
    tokens = tuple(_string_or_token(token, "extra_special_tokens", where) for token in extra or ())
    defaults = {*(kind.tokens.values() if kind is not None else ()), *map(_text, listed_by_class)}
    unstated = defaults - {_text(stated[key]) for key in _KEYS if stated.get(key)} - by_text.keys()
    return DeclaredTokens(numbered=numbered, named=named, extra=tokens, unstated=frozenset(unstated))


def _named(
    stated: Mapping[str, Any],
    where: object,
    kind: TokenizerClass | None,
    padding: str | None,
    numbered: Mapping[str, AddedToken],
) -> dict[str, AddedToken | str]:
    """Return the special tokens of the roles that any tokenizer may name, by their key."""
    defaults: dict[str, str] = {f"{role}_token": token for role, token in (kind.tokens if kind else {}).items()}
    if padding is not None:
        defaults.setdefault("pad_token", padding)
    named: dict[str, AddedToken | str] = {}
    for key in _KEYS:
        value = stated.get(key, defaults.get(key))
        if value is None:
            continue
        token = _string_or_token(value, key, where)
        token = numbered.get(_text(token), token) if key in stated else token
        if key == "mask_token" and isinstance(token, str) and kind is not None and kind.mask_strips:
            token = AddedToken(token, lstrip=True, special=True)
        named[key] = token
    return named


def _own(stated: dict[str, Any]) -> dict[str, Any]:
    """Take the special tokens with roles of the model's own, such as ``image_token``, from settings; by their key."""
    keys = [key for key, value in stated.items() if key.endswith("_token") and key not in _KEYS and _is_token(value)]
    special = {key: stated.pop(key) for key in keys}
    for key in ("model_specific_special_tokens", "extra_special_tokens"):
        if isinstance(stated.get(key), Mapping):
            special |= stated.pop(key)
    return special


def add_tokens(tokenizer: Tokenizer, declared: DeclaredTokens) -> None:
    """Add tokens to a tokenizer, in place. A token that it has keeps its id, and takes the declared flags.

    The library numbers tokens that are not in the vocabulary, in the order in which they are added.
    """
    present = tokenizer.get_added_tokens_decoder().values()
    shown_tokens = {repr(token) for token in present}
    tokens: list[AddedToken | str] = [
        token for _, token in sorted(declared.numbered.items()) if repr(token) not in shown_tokens
    ]
    texts = {token.content for token in present} | {_text(token) for token in tokens}
    for token in (*declared.named.values(), *declared.extra):
        if _text(token) not in texts and token not in tokens:
            tokens.append(token)
    named = {_text(token) for token in declared.named.values()}
    special = {token.content for token in present if token.special}
    added = [AddedToken(token, special=True) if isinstance(token, str) else token for token in tokens]
    for token in added:
        # the library still leaves a token that was special out of decoded texts, but does not store this
        token.special = token.special or token.content in named or token.content in special
        special |= {token.content} if token.special else set()
    tokenizer.add_tokens(added)


def _text(token: Any) -> str:
    """Return the text of a token, given as a string, an object or a token of the library."""
    if isinstance(token, AddedToken):
        return token.content
    return str(token.get("content", "") if isinstance(token, Mapping) else token)


def _string_or_token(value: Any, key: str, where: object) -> AddedToken | str:
    return value if isinstance(value, str) else _token(value, key, where)


def _token(value: Any, key: str, where: object) -> AddedToken:
    if not isinstance(value, Mapping) or not isinstance(value.get("content"), str):
        raise ArtifactError(f"{key} {value!r:.80} is not text", where, "give a string, or an object with content")
    flags = {flag: value[flag] for flag in _FLAGS if flag in value}
    if wrong := [flag for flag, stated in flags.items() if not isinstance(stated, bool)]:
        raise ArtifactError(f"{wrong[0]} of {value['content']!r} is {flags[wrong[0]]!r:.40}, not true or false", where)
    return AddedToken(value["content"], **flags)


def _number(value: Any, where: object) -> int:
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"the id {value!r:.40} of an added token is not a number", where) from error


def _mapping(value: Any, key: str, where: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ArtifactError(f"{key} must be an object, got {value!r:.40}", where)
    return value


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, Mapping) and "content" in value)


def _marked(value: Any) -> Any:
    """Return a token of special_tokens_map.json, which is special whatever the file states."""
    return {**value, "special": True} if isinstance(value, Mapping) else value
