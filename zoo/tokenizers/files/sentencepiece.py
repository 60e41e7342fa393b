"""Conversion of SentencePiece models (Kudo 2018) to tokenizers of the ``tokenizers`` library."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors

from zoo.artifact.weights import load_json
from zoo.errors import ArtifactError, UsageError, ZooWarning
from zoo.reading import read_bytes

__all__ = [
    "KNOWN",
    "M2M100",
    "MARIAN",
    "convert",
    "m2m100_tokenizer",
    "marian_tokenizer",
    "piece_scores",
    "sentencepiece_file",
    "sentencepiece_proto",
    "sentencepiece_tokenizer",
]

KNOWN = (
    "known: tokenizer.json, vocab.txt (WordPiece) or that of ESM, vocab.json + merges.txt or encoder.json + vocab.bpe "
    "(byte-level BPE), a SentencePiece .model (unigram), source.spm + target.spm + vocab.json (Marian), "
    "sentencepiece.bpe.model + vocab.json (M2M100), a directory with any of these"
)
MARIAN = ("source.spm", "target.spm", "vocab.json")
"""The files of a Marian translation system's tokenizer: models of both languages, and the ids of their pieces."""
M2M100 = ("sentencepiece.bpe.model", "vocab.json")
"""The files of M2M100's tokenizer: the model, and the ids of its pieces."""
_M2M100_LANGUAGES = (
    "af", "am", "ar", "ast", "az", "ba", "be", "bg", "bn", "br", "bs", "ca", "ceb", "cs", "cy", "da", "de", "el", "en",
    "es", "et", "fa", "ff", "fi", "fr", "fy", "ga", "gd", "gl", "gu", "ha", "he", "hi", "hr", "ht", "hu", "hy", "id",
    "ig", "ilo", "is", "it", "ja", "jv", "ka", "kk", "km", "kn", "ko", "lb", "lg", "ln", "lo", "lt", "lv", "mg", "mk",
    "ml", "mn", "mr", "ms", "my", "ne", "nl", "no", "ns", "oc", "or", "pa", "pl", "ps", "pt", "ro", "ru", "sd", "si",
    "sk", "sl", "so", "sq", "sr", "ss", "su", "sv", "sw", "ta", "th", "tl", "tn", "tr", "uk", "ur", "uz", "vi", "wo",
    "xh", "yi", "yo", "zh", "zu",
)  # fmt: skip
"""The languages in the order of their tokens (Fan et al. 2021, table 1)."""
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""The character that SentencePiece uses for a space."""
_UNREAD = "\U000f0000"
"""A character for private use, which marks names that are not pieces, such as those of the other language."""
_PENALTY = 10.0
"""The difference of the scores of an unknown character and the least likely piece."""
_LANGUAGE = re.compile(">>.+<<")


def sentencepiece_proto() -> Any:
    """Import SentencePiece's protobuf module. Raises :class:`UsageError` if it is not installed."""
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        problem = f"SentencePiece models need a package that is not installed ({error})"
        raise UsageError(problem, None, "pip install attention-zoo[sentencepiece]") from error
    return sentencepiece_model_pb2


def sentencepiece_tokenizer(model: Any, where: object) -> Tokenizer:
    """Convert a SentencePiece ``ModelProto`` (Kudo 2018) to a tokenizer that gives the same ids.

    The tokenizers library causes two differences. If the model normalises Unicode, combining characters are lost after
    a character that this changes, such as an accent on a capital that is lower-cased. And a control symbol such as
    ``</s>`` in a text is tokenized as that symbol.

    Raises :class:`ArtifactError` for a model that cannot be represented.
    """
    kinds = model.SentencePiece
    special = [piece.piece for piece in model.pieces if piece.type in (kinds.CONTROL, kinds.UNKNOWN)]
    return convert(model, where, piece_scores(model), model.trainer_spec.unk_id, special)


def _check_table(table: normalizers.Normalizer, where: object) -> None:
    """Raise :class:`ArtifactError` for a damaged character table, on which the library panics when it reads a text."""
    characters = " ".join(map(chr, (*range(1, 0xD800), *range(0xE000, 0x10000))))  # the basic multilingual plane
    try:
        table.normalize_str(characters)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # not an Exception, and its module cannot be imported
            raise
        raise ArtifactError("a SentencePiece model with a damaged character table", where, KNOWN) from error


def convert(
    model: Any,
    where: object,
    pieces: Sequence[tuple[str, float]],
    unknown: int,
    special: Iterable[str | AddedToken],
    *,
    may_merge: bool = False,
) -> Tokenizer:
    """Return a tokenizer that normalises and decodes texts as a ``ModelProto`` does, with these pieces.

    ``may_merge`` accepts models of type BPE.
    """
    trainer, spec, kinds = model.trainer_spec, model.normalizer_spec, model.SentencePiece
    if not model.pieces:
        raise ArtifactError("not a SentencePiece model (it has no pieces)", where, KNOWN)
    merges = may_merge and trainer.model_type == trainer.BPE and not trainer.byte_fallback
    if trainer.model_type != trainer.UNIGRAM and not merges:
        name = trainer.ModelType.Name(trainer.model_type).lower()
        raise ArtifactError(f"SentencePiece model type {name} is not supported", where, "use a unigram model")
    if trainer.treat_whitespace_as_suffix or not spec.escape_whitespaces:
        raise ArtifactError("a SentencePiece model that does not put spaces in front of words", where)
    if any(piece.type == kinds.UNUSED for piece in model.pieces):
        raise ArtifactError("a SentencePiece model with unused pieces", where)
    if merges:
        numbers = {name: number for number, (name, _) in enumerate(pieces)}
        read = {piece.piece for piece in model.pieces if piece.type == kinds.NORMAL}
        merged = _merges([piece for piece in pieces if piece[0] in read])
        tokenizer = Tokenizer(models.BPE(numbers, merged, unk_token=pieces[unknown][0], fuse_unk=True))
    else:
        tokenizer = Tokenizer(models.Unigram(list(pieces), unknown, trainer.byte_fallback))
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
        _check_table(steps[0], where)
        changed = [item.piece for item in model.pieces if item.type == kinds.USER_DEFINED]
        changed = [piece for piece in changed if steps[0].normalize_str(piece) != piece]
        if changed:
            raise ArtifactError(f"a SentencePiece model that does not normalise {', '.join(changed)}", where)
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(rf"\A +|[ {_SPACE}]+\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            *([decoders.ByteFallback()] if trainer.byte_fallback else []),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if spec.add_dummy_prefix else []),
        ]
    )
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def piece_scores(model: Any) -> list[tuple[str, float]]:
    """Return the pieces of a ``ModelProto`` and the logarithms of their probabilities, in order of their ids."""
    kinds = model.SentencePiece
    best = max((piece.score for piece in model.pieces if piece.type == kinds.NORMAL), default=0.0)
    return [
        # SentencePiece prefers user-defined pieces to any other segmentation
        (piece.piece, len(piece.piece.encode()) * best - 0.1 if piece.type == kinds.USER_DEFINED else piece.score)
        for piece in model.pieces
    ]


def sentencepiece_file(path: Path) -> Tokenizer:
    """Return the tokenizer of a SentencePiece file."""
    content = read_bytes(path)
    return sentencepiece_tokenizer(sentencepiece_proto().ModelProto.FromString(content), path)


def marian_tokenizer(path: Path) -> Tokenizer:
    """Return one of the two tokenizers of a Marian translation system (Junczys-Dowmunt et al. 2018): texts of its
    language to ids, and ids of both languages to texts.

    Texts are split by source.spm or target.spm. The ids are those of vocab.json, which the two languages share unless
    the targets have target_vocab.json; a language code such as ``>>fra<<`` is a token. Pieces of the other language are
    marked, so that no text is split into them.

    As in transformers without sacremoses, punctuation is not normalised beyond what the .spm file does. Transformers
    gives two or more adjacent characters that this does not know a single id, usually that of ``<unk>``; here each
    character has its own if the vocabulary has it.

    Args:
        path: source.spm or target.spm; the vocabulary and tokenizer_config.json are beside it.

    Raises:
        ArtifactError: the files cannot be represented.
    """
    settings = _settings(path)
    apart = settings.get("separate_vocabs") and path.name == MARIAN[1]
    where = path.with_name("target_vocab.json" if apart else "vocab.json")
    vocabulary, (end, *_) = _vocabulary(where, settings)
    codes = [name for name in vocabulary if _LANGUAGE.fullmatch(name)]
    tokenizer = _numbered_tokenizer(path, where, vocabulary, settings, codes)
    tokenizer.add_tokens([AddedToken(code, normalized=False) for code in codes])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", pair=f"$A $B {end}", special_tokens=[(end, vocabulary[end])]
    )
    return tokenizer


def m2m100_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of M2M100 (Fan et al. 2021).

    The ids are those of vocab.json, and the tokens of languages, such as ``__en__``, follow them. A text is put between
    its language, by default English, and the end token.

    Args:
        path: sentencepiece.bpe.model, of type unigram or BPE; vocab.json and tokenizer_config.json are beside it.

    Raises:
        ArtifactError: the files cannot be represented.
    """
    settings, where = _settings(path), path.with_name(M2M100[1])
    if settings.get("language_codes", "m2m100") != "m2m100":
        raise ArtifactError(f"language_codes {settings['language_codes']!r} are not supported, only 'm2m100'", path)
    vocabulary, (end, *_) = _vocabulary(where, settings)
    tokenizer = _numbered_tokenizer(path, where, vocabulary, settings, ())
    tokens = [f"__{code}__" for code in _M2M100_LANGUAGES]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in tokens])
    source = f"__{settings.get('src_lang') or 'en'}__"
    if source not in tokens:
        raise ArtifactError(f"src_lang {settings['src_lang']!r} is not a language of M2M100", path)
    pair = [(token, tokenizer.token_to_id(token)) for token in (source, end)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{source} $A {end}", pair=f"{source} $A $B {end}", special_tokens=pair
    )
    return tokenizer


def _settings(path: Path) -> dict[str, Any]:
    """Return tokenizer_config.json beside a file; empty if there is none."""
    stated = path.with_name("tokenizer_config.json")
    return load_json(stated) if stated.exists() else {}


def _vocabulary(where: Path, settings: Mapping[str, Any]) -> tuple[dict[str, int], list[str]]:
    """Return the ids in a file by their names, and the end, unknown and padding tokens."""
    vocabulary = load_json(where)
    if sorted(vocabulary.values()) != list(range(len(vocabulary))):
        raise ArtifactError("the ids are not 0, 1, 2, ... in some order", where)
    roles = {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
    said = [settings.get(f"{role}_token", name) for role, name in roles.items()]
    special = [token["content"] if isinstance(token, dict) else token for token in said]
    for token in special[:2]:
        if token not in vocabulary:
            raise ArtifactError(f"no {token}", where)
    return vocabulary, special


def _numbered_tokenizer(
    path: Path, where: Path, vocabulary: Mapping[str, int], settings: Mapping[str, Any], codes: Sequence[str]
) -> Tokenizer:
    """Return the tokenizer of a SentencePiece file whose pieces have the ids of a vocabulary.

    Names in the vocabulary that are neither pieces nor special tokens nor ``codes`` are marked, so that no text is
    split into them.
    """
    _, special = _vocabulary(where, settings)
    model = sentencepiece_proto().ModelProto.FromString(read_bytes(path))
    scores = dict(piece_scores(model))
    absent = [piece.piece for piece in model.pieces if piece.type == piece.NORMAL and piece.piece not in vocabulary]
    if absent:
        problem = f"{len(absent)} of {len(scores)} pieces are not in {where.name}, such as {absent[0]!r}"
        warnings.warn(f"{path}: {problem}: words with them are split differently", ZooWarning, stacklevel=3)
    present = [name for name in (*special, "<s>") if name in vocabulary]
    unread = {name for name in vocabulary if len(name) > 1} - {*scores, *present, *codes}
    least = min(scores.values(), default=0.0) - _PENALTY
    ordered = sorted(vocabulary, key=vocabulary.__getitem__)
    pieces = [(_UNREAD + name, 0.0) if name in unread else (name, scores.get(name, least)) for name in ordered]
    tokenizer = convert(model, path, pieces, vocabulary[special[1]], present, may_merge=path.name == M2M100[0])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(_UNREAD, "\U000f0001"), tokenizer.normalizer])
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_UNREAD, ""), tokenizer.decoder])
    return tokenizer


def _merges(pieces: Sequence[tuple[str, float]]) -> list[tuple[str, str]]:
    """Return the merges of a BPE, given its pieces and their scores: the best scores are merged first."""
    names = {name for name, _ in pieces}
    merges = []
    for name, _ in sorted(pieces, key=lambda piece: -piece[1]):
        splits = ((name[:place], name[place:]) for place in range(1, len(name)))
        merges += [split for split in splits if names.issuperset(split)]
    return merges
