"""The vocabulary of wav2vec 2.0 and its kin, vocab.json: characters into which CTC writes sound."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from zoo.artifact import TOKENIZER_CONFIG
from zoo.artifact.weights import load_json
from zoo.errors import ArtifactError, UsageError
from zoo.tokenizers.files.load import content_of

__all__ = ["CTC_CLASS", "CTC_VOCABULARY", "ctc_files", "ctc_tokenizer"]

CTC_CLASS = "Wav2Vec2CTCTokenizer"
CTC_VOCABULARY = "vocab.json"


def ctc_tokenizer(path: Path, settings: dict[str, Any], rows: int | None) -> Tokenizer:
    """Return the tokenizer of a vocabulary of characters, which decodes tokens without repetitions and blanks.

    The caller strips spaces around the text.

    Args:
        path: vocab.json.
        settings: the content of tokenizer_config.json and special_tokens_map.json.
        rows: number of tokens of the model, if it is known. Tokens beyond it, which a tokenizer may add, are left out.

    Raises:
        ArtifactError: the vocabulary is broken.
        UsageError: a setting is not supported.
    """
    where = path.with_name(TOKENIZER_CONFIG)
    for key in ("do_lower_case", "clean_up_tokenization_spaces"):
        if settings.get(key):
            raise UsageError(f"{key} {settings[key]!r} is not supported, only false", where)
    vocabulary: Any = load_json(path)
    language = settings.get("target_lang")
    if language is not None:  # a vocabulary for each language
        vocabulary = vocabulary.get(language)
    if not isinstance(vocabulary, dict) or not all(type(number) is int for number in vocabulary.values()):
        what = "does not map tokens to numbers" if language is None else f"has no vocabulary of {language!r}"
        raise ArtifactError(what, path)
    added = {number: token for token, number in _added(path, settings).items()} | {
        number: token for token, number in vocabulary.items()
    }
    tokens = {token: number for number, token in sorted(added.items()) if rows is None or number < rows}
    unknown = content_of(settings.get("unk_token", "<unk>"))
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token=unknown))
    delimiter = content_of(settings.get("word_delimiter_token", "|"))
    space = settings.get("replace_word_delimiter_char", " ")
    if delimiter:
        tokenizer.normalizer = normalizers.Replace(" ", delimiter)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens if len(token) > 1])
    delimiters = [decoders.Replace(delimiter, space)] if delimiter else []
    tokenizer.decoder = decoders.Sequence([*delimiters, decoders.Fuse()])
    return tokenizer


def ctc_files(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the vocabulary of a tokenizer as its class reads it, given tokenizer_config.json."""
    vocabulary, language = tokenizer.get_vocab(), settings.get("target_lang")
    return {CTC_VOCABULARY: vocabulary if language is None else {language: vocabulary}}


def _added(path: Path, settings: dict[str, Any]) -> dict[str, int]:
    """Return the tokens that files beside a vocabulary add to it, by name."""
    beside = path.with_name("added_tokens.json")
    added: dict[str, int] = dict(load_json(beside)) if beside.exists() else {}
    listed = settings.get("added_tokens_decoder") or {}
    return {**added, **{content_of(token): int(number) for number, token in listed.items()}}
