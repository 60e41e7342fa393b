"""Tokenizers of families that number the pieces of a SentencePiece model (Kudo 2018) in their own way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from zoo.errors import ArtifactError
from zoo.reading import read_bytes
from zoo.tokenizers.files.classes import CLASSES
from zoo.tokenizers.files.sentencepiece import convert, piece_scores, sentencepiece_proto

__all__ = ["FAIRSEQ_TOKENS", "PieceTokens", "pieces_tokenizer"]

_FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>")
_ROLES = {"bos": "<s>", "cls": "<s>", "eos": "</s>", "sep": "</s>", "unk": "<unk>", "pad": "<pad>", "mask": "<mask>"}


@dataclass(frozen=True, kw_only=True)
class PieceTokens:
    """How a family numbers the pieces of its SentencePiece model, and which special tokens it adds."""

    first: tuple[str, ...] = ()
    """Tokens that replace the first pieces of the model."""
    replaced: int = 0
    """Number of those pieces."""
    last: tuple[str, ...] = ()
    """Special tokens that follow the pieces, in the order of their ids."""
    single: str
    """Template of a text, in the syntax of the tokenizers library, such as ``$A </s>``."""
    pair: str
    """Template of a pair of texts."""
    roles: Mapping[str, str] = field(default_factory=lambda: _ROLES)
    """The only supported tokens by their role in tokenizer_config.json, such as ``</s>`` for ``eos``."""
    builder: str = ""
    """The class of transformers whose way to divide and decode texts replaces that of the model, if any."""


FAIRSEQ_TOKENS: Mapping[str, Any] = {"first": _FAIRSEQ, "replaced": 3}
"""fairseq's numbering: four special tokens replace three, so that the ids of pieces are greater by one."""


def pieces_tokenizer(path: Path, tokens: PieceTokens, settings: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a SentencePiece file whose ids follow a family's convention.

    Args:
        path: the file; its model is of type unigram.
        tokens: the convention.
        settings: the content of tokenizer_config.json.

    Raises:
        ArtifactError: the model or a setting cannot be represented.
    """
    model = sentencepiece_proto().ModelProto.FromString(read_bytes(path))
    kinds = model.SentencePiece
    control = (kinds.CONTROL, kinds.UNKNOWN)
    if any(piece.type not in control for piece in model.pieces[: tokens.replaced]):
        raise ArtifactError(f"the first {tokens.replaced} pieces are not special tokens, as this family's are", path)
    scores = [(name, 0.0) for name in tokens.first] + piece_scores(model)[tokens.replaced :]
    scores += [(name, 0.0) for name in tokens.last]
    vocabulary = {name: number for number, (name, _) in enumerate(scores)}
    if len(vocabulary) != len(scores):
        raise ArtifactError("a piece has the name of a special token that this family adds", path)
    where = path.with_name("tokenizer_config.json")
    for role, name in tokens.roles.items():
        stated = _content(settings.get(f"{role}_token", name))
        if stated not in ("", name):
            raise ArtifactError(f"{role}_token {stated!r} is not supported, only {name!r}", where)
        if name not in vocabulary:
            raise ArtifactError(f"not a SentencePiece model of this family (no {name})", path)
    _check_added(settings, vocabulary, where)
    others = [piece.piece for piece in model.pieces[tokens.replaced :] if piece.type in control]
    in_order = dict.fromkeys([*tokens.first, *others, *tokens.last])
    mask = tokens.roles.get("mask")
    special = [AddedToken(name, lstrip=name == mask, normalized=False, special=True) for name in in_order]
    tokenizer = convert(model, path, scores, vocabulary[tokens.roles["unk"]], special)
    used = dict.fromkeys(name for name in tokens.single.split() if not name.startswith("$"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=tokens.single, pair=tokens.pair, special_tokens=[(name, vocabulary[name]) for name in used]
    )
    if tokens.builder:
        parts = CLASSES[tokens.builder].components(settings, None)
        tokenizer.normalizer, tokenizer.pre_tokenizer = parts["normalizer"], parts["pre_tokenizer"]
        tokenizer.decoder = parts["decoder"]
    return tokenizer


def _check_added(settings: Mapping[str, Any], vocabulary: Mapping[str, int], where: Path) -> None:
    """Raise :class:`ArtifactError` if the settings add tokens to a vocabulary."""
    stated = settings.get("added_tokens_decoder") or {}
    added = {_content(token): number for number, token in stated.items()} if isinstance(stated, Mapping) else {}
    lists = [settings.get(f"{kind}_special_tokens") for kind in ("additional", "extra")]
    names = [_content(token) for tokens in lists if isinstance(tokens, list) for token in tokens]
    wrong = [name for name in names if name not in vocabulary]
    wrong += [name for name, number in added.items() if str(vocabulary.get(name)) != str(number)]
    if wrong:
        raise ArtifactError(f"tokens added to a vocabulary are not supported: {', '.join(map(repr, wrong))}", where)


def _content(token: Any) -> str:
    """Return a special token's text, given as a string or an object; empty for None."""
    return str(token.get("content") if isinstance(token, Mapping) else token or "")
