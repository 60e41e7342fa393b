"""Tokenizers of the ``tokenizers`` library, stored as tokenizer.json in the model directory.

Other formats are converted when they are read: WordPiece's vocab.txt (BERT) and that of ESM, the two files of
byte-level BPE (GPT-2), SentencePiece's unigram model, and the two such models of a Marian translation system.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from zoo.artifact import MANIFEST, TOKENIZER, ModelDirectory
from zoo.artifact.weights import load_json
from zoo.errors import ArtifactError, UnreadableError, UsageError, ZooError
from zoo.reading import check_plain, read_text
from zoo.registry.nearby import similar_path
from zoo.tokenizers.files.esm import ESM_CLASS, esm_tokenizer
from zoo.tokenizers.files.growth import check_growth
from zoo.tokenizers.files.sentencepiece import (
    KNOWN,
    M2M100,
    MARIAN,
    m2m100_tokenizer,
    marian_tokenizer,
    sentencepiece_file,
)
from zoo.tokenizers.library import description, guarded

__all__ = [
    "BYTES",
    "END",
    "VOCABULARIES",
    "bert_tokenizer",
    "byte_level_tokenizer",
    "byte_tokenizer",
    "content_of",
    "find_tokenizer",
    "is_tokenizer_json",
    "parse_tokenizer",
    "read_tokenizer",
    "require_ids",
    "token_count",
    "tokenizer_json",
    "write_tokenizer",
]

BYTES = "bytes"
SPECIAL = ("<pad>", "<bos>", "<eos>", "<mask>")
"""Tokens 256 to 259 of the byte tokenizer."""
END = "<|endoftext|>"
"""GPT-2's only special token, after each text."""
_MERGES = {"vocab.json": "merges.txt", "encoder.json": "vocab.bpe"}
"""Vocabulary and merges files of a byte-level BPE, as named by libraries and by OpenAI."""
VOCABULARIES = ("vocab.txt", *_MERGES)
"""Names of vocabularies of WordPiece and of byte-level BPE."""
_BERT_CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer")
_GPT2_CLASSES = ("GPT2Tokenizer",)
_ROBERTA_CLASSES = ("RobertaTokenizer", "BartTokenizer", "LongformerTokenizer")
"""Like GPT-2's, with special tokens around the text."""
_ESM_ROLES = ("unk", "cls", "pad", "mask", "eos")
_ROBERTA_SPECIAL = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}


def byte_tokenizer() -> Tokenizer:
    """Return the byte tokenizer: tokens 0 to 255 are the bytes, followed by the special tokens."""
    shown = [
        *range(33, 127),
        *range(161, 173),
        *range(174, 256),
    ]  # bytes that byte-level BPE represents by themselves
    hidden = [byte for byte in range(256) if byte not in shown]
    symbols = {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(hidden)}
    tokenizer = Tokenizer(models.BPE(vocab=symbols, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def byte_level_tokenizer(model: models.BPE, *, add_prefix_space: bool = False, lowercase: bool = False) -> Tokenizer:
    """Return GPT-2's tokenizer (Radford et al. 2019) for a vocabulary."""
    tokenizer = Tokenizer(model)
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def bert_tokenizer(
    model: models.WordPiece,
    *,
    lowercase: bool,
    strip_accents: bool | None = None,
    chinese: bool = True,
    first: str = "[CLS]",
    last: str = "[SEP]",
) -> Tokenizer:
    """Return BERT's tokenizer (Devlin et al. 2019) for a vocabulary, with ``first`` and ``last`` around each text.

    By default, accents are stripped if ``lowercase``. ``chinese`` makes each CJK character a token.
    """
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=strip_accents, handle_chinese_chars=chinese
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    first_id, last_id = tokenizer.token_to_id(first), tokenizer.token_to_id(last)
    if first_id is not None and last_id is not None:
        tokenizer.post_processor = processors.BertProcessing((last, last_id), (first, first_id))
    return tokenizer


def find_tokenizer(folder: Path) -> Path | None:
    """Return the file of a directory that :func:`read_tokenizer` reads, or None."""
    pairs = [name for name, merges in _MERGES.items() if (folder / merges).exists()]
    candidates = [folder / name for name in (TOKENIZER, *pairs, "vocab.txt") if (folder / name).exists()]
    if not candidates and all((folder / name).exists() for name in MARIAN):
        return folder / MARIAN[0]
    sentencepiece = sorted(folder.glob("*.model"))
    if not candidates and len(sentencepiece) == 1:
        return sentencepiece[0]
    return candidates[0] if candidates else None


def read_tokenizer(source: str | Path) -> Tokenizer:
    """Read a tokenizer.json, or convert a vocabulary; ``source`` is the file or its directory, or ``bytes``.

    Padding and truncation settings in the file are ignored: zoo pads and checks lengths itself. The files beside a
    tokenizer.json are not read: see :func:`zoo.tokenizers.files.given.given_tokenizer`.

    Raises:
        ArtifactError: the tokenizer is missing, broken, or in an unknown format.
        UsageError: the format needs a package that is not installed.
    """
    if source == BYTES:
        return byte_tokenizer()
    path, kind = Path(source), "tokenizer"
    try:
        path = _file_of(path)
        kind, read = _reader(path)
        check_plain(path)
        with guarded(path):
            tokenizer = read(path)
        check_growth(tokenizer, path)
    except ZooError:
        raise
    except FileNotFoundError as error:
        raise ArtifactError("no such tokenizer", path, similar_path(Path(path)) or "check the path") from error
    except OSError as error:
        raise UnreadableError(f"cannot read ({error.strerror})", path) from error
    except Exception as error:  # the library raises bare Exception
        raise ArtifactError(f"not a {kind} ({error})", path, KNOWN) from error
    return _plain(tokenizer)


def parse_tokenizer(content: str) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json's content, without its padding and truncation settings."""
    with guarded():
        tokenizer = Tokenizer.from_str(content)
    check_growth(tokenizer, TOKENIZER)
    return _plain(tokenizer)


def _plain(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def is_tokenizer_json(path: Path) -> bool:
    """Return whether a file is a tokenizer.json, whatever its name."""
    try:
        with guarded(path):
            _read_json(path)
    except OSError:
        raise
    except Exception:  # the library raises bare Exception
        return False
    return True


def tokenizer_json(tokenizer: Tokenizer) -> str:
    """Return the content of a tokenizer.json."""
    return json.dumps(description(tokenizer), ensure_ascii=False)


def write_tokenizer(source: str | Path, target: Path, vocab_size: int | None, changed: Tokenizer | None = None) -> None:
    """Write the tokenizer at ``source``, or ``bytes``, to ``target`` as tokenizer.json, copying an existing one.

    ``changed`` is the tokenizer to write if it differs from that of the file.

    Raises :class:`UsageError` if it has more tokens than the model's ``vocab_size``.
    """
    tokenizer = changed or read_tokenizer(source)
    require_ids(tokenizer, vocab_size, source)
    path = None if changed is not None or source == BYTES else _file_of(Path(source))
    if path is not None and _reader(path)[1] is _read_json:
        shutil.copyfile(path, target)
    else:
        target.write_text(tokenizer_json(tokenizer), encoding="utf-8")


def token_count(tokenizer: Tokenizer) -> int:
    """Return the size of vocabulary that a model needs for a tokenizer: its largest id plus 1."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def require_ids(tokenizer: Tokenizer, vocab_size: int | None, where: object, remedy: str | None = None) -> None:
    """Raise :class:`UsageError` if a tokenizer has more tokens than a model, or puts others around a text."""
    if vocab_size is None:
        return
    needed = token_count(tokenizer)
    if needed > vocab_size:
        count = tokenizer.get_vocab_size()
        has = f"{count} tokens" if count == needed else f"token {needed - 1}"
        raise UsageError(f"the tokenizer has {has}, the model {vocab_size}", where, remedy)
    for name, number in _added_around(description(tokenizer, where)["post_processor"]):
        if number >= vocab_size:
            problem = (
                f"the tokenizer's post_processor adds {name} with the id {number}, the model has {vocab_size} tokens"
            )
            raise UsageError(problem, where)


def _added_around(processor: Any) -> Iterator[tuple[str, int]]:
    """Yield the tokens that a post-processor of a tokenizer.json puts around texts, and their ids."""
    if not processor:
        return
    for part in processor.get("processors", ()):
        yield from _added_around(part)
    for token in processor.get("special_tokens", {}).values():
        yield from ((token["id"], number) for number in token["ids"])
    yield from (tuple(processor[role]) for role in ("cls", "sep") if role in processor)


def _file_of(source: Path) -> Path:
    if not source.is_dir():
        return source
    if (source / MANIFEST).is_file():
        return ModelDirectory.open(source, weights=False).file(TOKENIZER)
    file = find_tokenizer(source)
    if file is None:
        raise ArtifactError("no tokenizer in this directory", source, KNOWN)
    return file


def _reader(path: Path) -> tuple[str, Callable[[Path], Tokenizer]]:
    """Return the format and the reader of a file, according to its name."""
    if path.name.endswith(tuple(_MERGES)):
        return "byte-level BPE vocabulary", _read_byte_level
    if path.suffix == ".txt":
        settings = path.with_name("tokenizer_config.json")
        if settings.exists() and load_json(settings).get("tokenizer_class") == ESM_CLASS:
            return "vocabulary of ESM", _read_esm
        return "WordPiece vocabulary", _read_wordpiece
    if path.name == M2M100[0] and path.with_name(M2M100[1]).exists():
        return "M2M100 tokenizer", m2m100_tokenizer
    if path.suffix == ".model":
        return "SentencePiece model", sentencepiece_file
    if path.name in MARIAN[:2]:
        return "Marian tokenizer", marian_tokenizer
    return TOKENIZER, _read_json


def _read_json(path: Path) -> Tokenizer:
    return Tokenizer.from_str(read_text(path))


def _read_esm(path: Path) -> Tokenizer:
    settings = _settings(path, (ESM_CLASS,))
    names = {role: content_of(settings.get(f"{role}_token", f"<{role}>")) for role in _ESM_ROLES}
    return esm_tokenizer(path, {role: name for role, name in names.items() if name})


def _read_wordpiece(path: Path) -> Tokenizer:
    settings = _settings(path, _BERT_CLASSES)
    with path.open("rb"):
        pass  # an OSError, unlike the library's, tells why a file cannot be read
    vocabulary = models.WordPiece.read_file(str(path))
    names = {
        role: content_of(settings.get(f"{role}_token")) or f"[{role.upper()}]"
        for role in ("unk", "cls", "sep", "pad", "mask")
    }
    for role in ("unk", "cls", "sep"):
        if names[role] not in vocabulary:
            raise ArtifactError(f"not a WordPiece vocabulary (no {names[role]})", path, KNOWN)
    tokenizer = bert_tokenizer(
        models.WordPiece(vocabulary, unk_token=names["unk"]),
        lowercase=settings.get("do_lower_case", True),
        strip_accents=settings.get("strip_accents"),
        chinese=settings.get("tokenize_chinese_chars", True),
        first=names["cls"],
        last=names["sep"],
    )
    tokenizer.add_special_tokens([name for name in names.values() if name in vocabulary])
    return tokenizer


def _read_byte_level(path: Path) -> Tokenizer:
    settings = _settings(path, (*_GPT2_CLASSES, *_ROBERTA_CLASSES))
    path.stat()
    vocabulary_name = next(name for name in _MERGES if path.name.endswith(name))
    merges_path = path.with_name(path.name.removesuffix(vocabulary_name) + _MERGES[vocabulary_name])
    if not merges_path.exists():
        raise ArtifactError(f"no {merges_path.name} beside it", path, KNOWN)
    check_plain(merges_path)
    if settings.get("add_bos_token"):
        raise ArtifactError("add_bos_token is not supported", path.with_name("tokenizer_config.json"))
    vocabulary, merges = models.BPE.read_file(str(path), str(merges_path))
    if not vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet()) or any(
        right.endswith("</w>") for _, right in merges
    ):
        raise ArtifactError("not a byte-level BPE like GPT-2's", path, KNOWN)
    model = models.BPE(vocabulary, merges)
    tokenizer = byte_level_tokenizer(model, add_prefix_space=settings.get("add_prefix_space", False))
    written_by = str(settings.get("tokenizer_class") or "").removesuffix("Fast")
    if written_by in _ROBERTA_CLASSES or (not written_by and vocabulary.keys() >= set(_ROBERTA_SPECIAL.values())):
        return _add_roberta_tokens(tokenizer, settings, path)
    named = [content_of(settings.get(f"{role}_token")) for role in ("unk", "bos", "eos", "pad", "mask")]
    tokenizer.add_special_tokens([token for token in dict.fromkeys([END, *named]) if token in vocabulary])
    return tokenizer


def _add_roberta_tokens(tokenizer: Tokenizer, settings: Mapping[str, Any], path: Path) -> Tokenizer:
    """Add RoBERTa's special tokens (Liu et al. 2019), with bos and eos around each text."""
    names = {role: content_of(settings.get(f"{role}_token")) or name for role, name in _ROBERTA_SPECIAL.items()}
    roles = {role: number for role, name in names.items() if (number := tokenizer.token_to_id(name)) is not None}
    lacks = [names[role] for role in ("bos", "eos") if role not in roles]
    if lacks:
        raise ArtifactError(f"not a vocabulary of RoBERTa (no {lacks[0]})", path, KNOWN)
    # the mask absorbs the space before it, so that "a <mask>" is filled with a token that begins with a space
    tokenizer.add_special_tokens([AddedToken(names[role], lstrip=role == "mask", special=True) for role in roles])
    tokenizer.post_processor = processors.RobertaProcessing(
        (names["eos"], roles["eos"]), (names["bos"], roles["bos"]), add_prefix_space=False
    )
    return tokenizer


def _settings(path: Path, classes: tuple[str, ...]) -> Mapping[str, Any]:
    """Read tokenizer_config.json and special_tokens_map.json beside a vocabulary of one of these classes."""
    settings: dict[str, Any] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if path.with_name(name).exists():
            settings |= load_json(path.with_name(name))
    written_by = settings.get("tokenizer_class") or classes[0]
    if str(written_by).removesuffix("Fast") not in classes:
        where = path.with_name("tokenizer_config.json")
        raise ArtifactError(f"tokenizer_class {written_by!r} is not supported", where, f"known: {', '.join(classes)}")
    if path.with_name("added_tokens.json").exists() and load_json(path.with_name("added_tokens.json")):
        raise ArtifactError("tokens added to a vocabulary are not supported", path.with_name("added_tokens.json"))
    return settings


def content_of(token: Any) -> str:
    """Return a special token's text, given as a string or an object; empty for None."""
    return str(token["content"] if isinstance(token, Mapping) else token or "")
