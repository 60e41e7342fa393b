"""Settings of tokenizer_config.json that transformers applies over a tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer, normalizers, pre_tokenizers

from zoo.errors import UsageError
from zoo.tokenizers.library import description, guarded

__all__ = ["apply_settings"]

_GENERIC = ("PreTrainedTokenizer", "TokenizersBackend")
"""Classes that use tokenizer.json as it is."""
_BERT = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer")
_AROUND = (*_BERT, "AlbertTokenizer", "RobertaTokenizer", "BartTokenizer", "LongformerTokenizer", "XLMRobertaTokenizer",
           "CamembertTokenizer")  # fmt: skip
"""Classes that put their ``cls_token`` and ``sep_token`` around texts."""
_PREFIXED = ("LlamaTokenizer", "XLMRobertaTokenizer", "CamembertTokenizer")
"""Classes of SentencePiece models that read ``add_prefix_space``."""
_NORMALIZER = {"lowercase": "do_lower_case", "strip_accents": "strip_accents",
               "handle_chinese_chars": "tokenize_chinese_chars"}  # fmt: skip
"""Attributes of BERT's normalizer, and the settings that determine them."""


def apply_settings(tokenizer: Tokenizer, settings: Mapping[str, Any], where: object) -> bool:
    """Change a tokenizer as its settings say, and return whether anything changed.

    These are letter case, accents and CJK characters of BERT's normalizer, the space that a byte-level tokenizer puts
    before a text, and trimmed offsets.

    Args:
        tokenizer: the tokenizer, changed in place.
        settings: the content of tokenizer_config.json; ``tokenizer_class`` without ``Fast``.
        where: the path of the settings, for errors.

    Raises:
        UsageError: a setting contradicts the tokenizer in a way that cannot be applied.
    """
    written_by = settings.get("tokenizer_class")
    if written_by in _GENERIC:
        return False
    state = description(tokenizer, where)
    changes = [
        _set(tokenizer, "normalizer", normalizers.BertNormalizer, _NORMALIZER, settings),
        _set(tokenizer, "pre_tokenizer", pre_tokenizers.ByteLevel, {"add_prefix_space": "add_prefix_space"}, settings),
    ]
    kind = (state["post_processor"] or {}).get("type")
    if kind in ("RobertaProcessing", "ByteLevel"):
        names = ("trim_offsets", *(["add_prefix_space"] if kind == "RobertaProcessing" else []))
        changes.append(_set(tokenizer, "post_processor", object, {name: name for name in names}, settings))
    _check_letters(tokenizer, settings, where)
    if written_by in _PREFIXED:
        _check_prefix(state, settings, where)
    if written_by in _AROUND:
        for key, used in zip(("cls_token", "sep_token"), _around(state["post_processor"] or {}), strict=True):
            token = settings.get(key)
            name = token.get("content") if isinstance(token, Mapping) else token
            if name and name != used:
                what = f"puts {used!r} there" if used else "puts nothing there"
                raise _contradiction(f"{key} {name!r} around texts", what, where)
    return any(changes)


def _around(processor: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the tokens that a post-processor of a tokenizer.json puts before and after a text."""
    for part in processor.get("processors", ()):
        if any(found := _around(part)):
            return found
    if "cls" in processor:
        return processor["cls"][0], processor["sep"][0]
    items = processor.get("single") or [{}]
    first, last = (item.get("SpecialToken", {}).get("id") for item in (items[0], items[-1]))
    return first, last


def _set(tokenizer: Tokenizer, part: str, kind: type, names: Mapping[str, str], settings: Mapping[str, Any]) -> bool:
    """Set attributes of a part of this kind, and return whether one changed."""
    component = getattr(tokenizer, part)
    if not isinstance(component, kind):
        return False
    stated = {name: settings[key] for name, key in names.items() if key in settings}
    wanted = {name: value for name, value in stated.items() if isinstance(value, bool) or name == "strip_accents"}
    changed = {name: value for name, value in wanted.items() if getattr(component, name) != value}
    for name, value in changed.items():
        setattr(component, name, value)
    setattr(tokenizer, part, component)
    return bool(changed)


def _check_letters(tokenizer: Tokenizer, settings: Mapping[str, Any], where: object) -> None:
    """Raise :class:`UsageError` if another normalizer than BERT's treats letters as the settings do not."""
    normalizer = tokenizer.normalizer
    if isinstance(normalizer, normalizers.BertNormalizer):
        return
    written_by = settings.get("tokenizer_class")
    checks: list[tuple[str, bool, str, str, tuple[str, str]]] = []
    if written_by in (*_BERT, "AlbertTokenizer"):
        checks.append(("do_lower_case", True, "A", "A", ("keeps capitals", "lower-cases texts")))
    if written_by == "AlbertTokenizer":
        checks.append(("keep_accents", False, "\u00e9", "\u00e9\u0301", ("keeps accents", "strips accents")))
    for key, means, given, kept, does in checks:
        done = normalizer is not None and not set(kept) & set(_normalized(normalizer, given, where))
        if isinstance(settings.get(key), bool) and done != (settings[key] is means):
            raise _contradiction(f"{key} {settings[key]}", does[done], where)


def _normalized(normalizer: normalizers.Normalizer, text: str, where: object) -> str:
    with guarded(where):
        result: str = normalizer.normalize_str(text)
    return result


def _check_prefix(state: Mapping[str, Any], settings: Mapping[str, Any], where: object) -> None:
    """Raise :class:`UsageError` if a tokenizer for SentencePiece's pieces puts a space before texts, or not, otherwise
    than the settings."""
    stated = settings.get("add_prefix_space")
    parts = [*_parts(state["pre_tokenizer"]), *_parts(state["normalizer"])]
    prefixes = {part["prepend_scheme"] != "never" for part in parts if part["type"] == "Metaspace"}
    prefixes |= {True for part in parts if part["type"] == "Prepend"}
    if isinstance(stated, bool) and prefixes == {not stated}:
        does = "puts none" if stated else "puts one"
        raise _contradiction(f"add_prefix_space {stated}", f"{does} before a text", where)


def _parts(component: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a component of a tokenizer.json that are not sequences."""
    listed = (component or {}).get("pretokenizers") or (component or {}).get("normalizers")
    if listed:
        for part in listed:
            yield from _parts(part)
    elif component:
        yield component


def _contradiction(stated: str, what: str, where: object) -> UsageError:
    return UsageError(f"{stated} contradicts tokenizer.json, which {what}", where, "correct one of the two files")
