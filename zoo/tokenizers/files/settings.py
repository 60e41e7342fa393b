"""A tokenizer.json with the settings and tokens that the files beside it state, as transformers reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from zoo.artifact import TOKENIZER
from zoo.artifact.weights import load_json
from zoo.errors import ArtifactError, UsageError
from zoo.tokenizers.cleaning import remove_spaces
from zoo.tokenizers.files.classes import CLASSES, GENERIC, TokenizerClass, class_of, rebuilt
from zoo.tokenizers.files.declared import DeclaredTokens, add_tokens, read_declared
from zoo.tokenizers.files.esm import ESM_CLASS
from zoo.tokenizers.files.keys import SETTINGS, check_keys
from zoo.tokenizers.files.load import read_tokenizer
from zoo.tokenizers.library import description, guarded

__all__ = ["BESIDE", "SettledTokenizer", "read_beside", "settle"]

BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""The files that state settings and tokens."""
_GENERIC = (GENERIC, "PreTrainedTokenizer", "PythonBackend", "BloomTokenizer", "MT5Tokenizer", ESM_CLASS)
"""Classes that use tokenizer.json as it is, and that whose vocabulary is read as it reads it."""


@dataclass(frozen=True, kw_only=True)
class SettledTokenizer:
    """A tokenizer with the settings beside it applied."""

    backend: Tokenizer
    tokens: DeclaredTokens
    """The special tokens that the files name."""
    changed: bool
    """Whether the tokenizer differs from tokenizer.json."""
    name: str
    """The class that reads it."""


def read_beside(path: Path) -> tuple[dict[str, Any], ...]:
    """Return the content of the files :data:`BESIDE` a tokenizer; empty for those that do not exist."""
    return tuple(load_json(path.with_name(name)) if path.with_name(name).exists() else {} for name in BESIDE)


def settle(
    path: Path, config: Mapping[str, Any], *, family: str = "", overrides: bool = False, strict: bool = True
) -> SettledTokenizer:
    """Return the tokenizer of a tokenizer.json, or of a vocabulary of WordPiece or byte-level BPE, with what
    tokenizer_config.json, special_tokens_map.json and added_tokens.json beside it state.

    Args:
        path: the tokenizer.json, or the vocabulary.
        config: the content of config.json.
        family: the class that transformers registers for the model type; empty if there is none.
        overrides: whether that class is used even if the files declare another one.
        strict: whether to refuse settings of a class that zoo does not know, instead of relying on tokenizer.json, in
            which the class stored what follows from them.

    Raises:
        ArtifactError: a file is broken.
        UsageError: a setting cannot be applied.
    """
    where = path.with_name("tokenizer_config.json")
    settings, names, added = read_beside(path)
    original = read_tokenizer(path)
    content = description(original, path)
    declared = settings.get("tokenizer_class") or config.get("tokenizer_class") or ""
    name = class_of(str(declared), family, overrides=overrides, byte_level=_is_byte_level(content))
    kind = CLASSES.get(name)
    if kind is not None and not declared and kind.model != content["model"]["type"]:
        name, kind = GENERIC, None  # the class of the family cannot read this vocabulary
    checked = {key: value for key, value in settings.items() if strict or key in SETTINGS}
    check_keys(checked, name, where, known=kind is not None or name in _GENERIC)
    is_json = path.name == TOKENIZER
    padding = (load_json(path).get("padding") or {}).get("pad_token") if is_json and kind is None else None
    listed = content["added_tokens"] if is_json else []
    tokens = read_declared(settings, names, added, listed, where, kind=kind, padding=padding)
    with guarded(path):
        if kind is not None:
            base = content if is_json else content | {"post_processor": None}
            tokenizer = _rebuilt(kind, name, base, settings, tokens, path)
        else:
            tokenizer = Tokenizer.from_str(json.dumps(content))
        add_tokens(tokenizer, tokens)
        if kind is not None:
            _finish(tokenizer, kind, tokens, settings, where)
        if _cleans_text(settings, content):
            remove_spaces(tokenizer)
    new = added_to = description(tokenizer, path)
    if isinstance(rows := config.get("vocab_size"), int):
        remaining = [one for one in new["added_tokens"] if one["id"] < rows or one["content"] not in tokens.unstated]
        new = new | {"added_tokens": remaining}
    if new != content and kind is None and name not in _GENERIC:
        _refuse(tokenizer, original, name, where)
    if new != added_to:
        tokenizer = Tokenizer.from_str(json.dumps(new))
    return SettledTokenizer(backend=tokenizer, tokens=tokens, changed=new != content, name=name)


def _rebuilt(
    kind: TokenizerClass,
    name: str,
    content: Mapping[str, Any],
    settings: Mapping[str, Any],
    tokens: DeclaredTokens,
    path: Path,
) -> Tokenizer:
    if content["model"]["type"] != kind.model:
        problem = f"tokenizer_class {name} reads a vocabulary of type {kind.model}, not {content['model']['type']}"
        raise UsageError(problem, path, f"set tokenizer_class in tokenizer_config.json to {GENERIC}")
    try:
        return rebuilt(kind, content, settings, tokens.name("unk"))
    except (TypeError, ValueError) as error:  # of the library, for values of other types
        where = path.with_name("tokenizer_config.json")
        raise ArtifactError(f"has a value that {name} cannot use ({error})", where) from error


def _finish(
    tokenizer: Tokenizer, kind: TokenizerClass, tokens: DeclaredTokens, settings: Mapping[str, Any], where: Path
) -> None:
    """Set what a class determines after the tokens are known."""

    def token(role: str) -> tuple[str, int]:
        name = tokens.name(role)
        number = None if name is None else tokenizer.token_to_id(name)
        if name is None or number is None:
            raise UsageError(f"{role}_token is null, but its class puts this token around texts", where, "name it")
        return name, number

    if kind.around is not None:
        tokenizer.post_processor = kind.around(token, settings)
    if kind.strict:
        texts = [str(getattr(token, "content", token)) for token in (*tokens.named.values(), *tokens.extra)]
        tokenizer.add_tokens([AddedToken(text, special=True) for text in dict.fromkeys(texts)])


def _cleans_text(settings: Mapping[str, Any], content: Mapping[str, Any]) -> bool:
    """Return whether spaces are removed from decoded texts; of BPE, they belong to the text."""
    also_bpe = settings.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output")
    return bool(settings.get("clean_up_tokenization_spaces") and (content["model"]["type"] != "BPE" or also_bpe))


def _is_byte_level(content: Mapping[str, Any]) -> bool:
    parts = [content["pre_tokenizer"] or {}, content["decoder"] or {}]
    listed = [part for outer in parts for part in (outer, *outer.get("pretokenizers", ()), *outer.get("decoders", ()))]
    return any(part.get("type") == "ByteLevel" for part in listed)


def _refuse(tokenizer: Tokenizer, original: Tokenizer, name: str, where: Path) -> None:
    """Raise :class:`UsageError` for tokens that a class which zoo does not know may number otherwise."""
    before = {repr(token) for token in original.get_added_tokens_decoder().values()}
    new = [token.content for token in tokenizer.get_added_tokens_decoder().values() if repr(token) not in before]
    problem = (
        f"tokens differ from those of tokenizer.json, in a way that depends on {name}: {', '.join(map(repr, new))}"
    )
    raise UsageError(problem, where, "load and save the tokenizer with transformers, or correct one of the two files")
