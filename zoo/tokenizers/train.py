"""Training of tokenizers: byte-level BPE, BERT's WordPiece and SentencePiece's unigram.

Training is deterministic: the same text gives the same tokenizer, byte for byte. BPE and WordPiece are trained by the
``tokenizers`` library. Its unigram trainer sums floating-point numbers in hash-table order, which differs from run to
run, so unigram is trained by the optional package SentencePiece.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from zoo.errors import ArtifactError, UsageError, argument
from zoo.limits import WORD_CHARACTERS
from zoo.reading import lines
from zoo.system import interruptible
from zoo.terminal import is_unicode
from zoo.tokenizers.files.load import END, bert_tokenizer, byte_level_tokenizer
from zoo.tokenizers.files.sentencepiece import sentencepiece_proto, sentencepiece_tokenizer

__all__ = ["KINDS", "TextLines", "special_tokens", "train_tokenizer"]

KINDS = ("bpe", "wordpiece", "unigram")
LARGEST = 10_000_000
"""Maximum vocabulary size, because the trainers allocate memory for the requested size."""
_WORDPIECE = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_UNIGRAM = ("<pad>", "</s>", "<unk>")
"""As in T5, where a decoder starts with token 0 and ends with token 1."""


_RUNS = re.compile(r"\S+|\s+")


class TextLines:
    """The lines of UTF-8 files, including line ends, read lazily.

    Words and white space longer than :data:`zoo.limits.WORD_CHARACTERS` are cut, because the trainers take time by the
    square of the length of a word.
    """

    def __init__(self, paths: Sequence[Path], progress: Callable[[int], None] | None = None) -> None:
        for path in paths:
            if not path.is_file():
                raise ArtifactError("not a file" if path.exists() else "no such file", path)
        self.paths = paths
        self.progress = progress
        """Called with the size of each line in bytes."""
        self.count = 0
        """Number of lines in the last pass."""
        self.blank = True
        """Whether all lines of the last pass were blank."""
        self.failure: BaseException | None = None
        """The exception that ended the last pass early, which native trainers do not always propagate."""
        self.stopped = False
        """End the pass, because nobody waits for the result."""

    def __iter__(self) -> Iterator[str]:
        self.count = 0
        self.blank = True
        self.failure = None
        try:
            for path in self.paths:
                yield from self._read(path)
        except (Exception, KeyboardInterrupt) as error:
            self.failure = error
            raise

    def _read(self, path: Path) -> Iterator[str]:
        offset = 0
        try:
            with path.open("rb") as file:
                for number, line in enumerate(lines(file, path), 1):
                    try:
                        text = line.decode()
                    except UnicodeDecodeError as error:
                        where = f"{path}, line {number}, byte {offset + error.start}"
                        raise ArtifactError("not UTF-8", where, "convert it") from error
                    offset += len(line)
                    self.count += 1
                    self.blank = self.blank and not text.strip()
                    if self.progress is not None:
                        self.progress(len(line))
                    yield from _cut(text)
                    if self.stopped:
                        return
        except OSError as error:
            raise ArtifactError(f"cannot read ({error.strerror})", path) from error


def _cut(text: str) -> Iterator[str]:
    """Yield a line in parts whose words are not too long."""
    longest, start = WORD_CHARACTERS.value(), 0
    for run in _RUNS.finditer(text) if len(text) > longest else ():
        for place in range(run.start() + longest, run.end(), longest):
            yield text[start:place]
            start = place
    yield text[start:]


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the special tokens with their ids, in the order of the ids."""
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    return {token.content: number for number, token in added if token.special}


def train_tokenizer(
    lines: TextLines,
    *,
    kind: str,
    vocab_size: int,
    special: Sequence[str] = (),
    min_frequency: int | None = None,
    lowercase: bool = False,
) -> Tokenizer:
    """Train a tokenizer.

    - ``bpe`` is byte-level BPE as in GPT-2, with the special token ``<|endoftext|>`` at the end of the vocabulary.
    - ``wordpiece`` is WordPiece as in BERT, with ``[PAD] [UNK] [CLS] [SEP] [MASK]`` at the start of the vocabulary.
    - ``unigram`` is SentencePiece's unigram, with ``<pad> </s> <unk>`` at the start of the vocabulary, followed by the
      256 bytes, which represent characters missing from the vocabulary.

    Args:
        lines: the training text. No token spans two lines.
        kind: one of :data:`KINDS`.
        vocab_size: the number of tokens, including special tokens; the text may yield fewer.
        special: additional special tokens, at the end of the vocabulary.
        min_frequency: minimum frequency of a merged pair, 2 by default; not for ``unigram``.
        lowercase: convert text to lower case, in training and in use; ``wordpiece`` also strips accents.

    Raises:
        UsageError: the vocabulary is too small for the alphabet, or options conflict.
        ArtifactError: a file is not UTF-8, or there is no text.
    """
    if vocab_size > LARGEST:
        raise UsageError(f"a vocabulary of {vocab_size} tokens is too large", None, f"use at most {LARGEST}")
    if not all(token.strip() for token in special):
        raise UsageError("a special token is blank", None, "give it a name, such as <mask>")
    if any(not is_unicode(token) for token in special):
        raise UsageError("a special token is not valid Unicode", argument("special"))
    if kind == "unigram" and min_frequency is not None:
        raise UsageError(
            "a unigram vocabulary has no minimum frequency", None, argument("min_frequency", text="leave {} out")
        )
    frequency = 2 if min_frequency is None else min_frequency
    ending = list(dict.fromkeys([*([END] if kind == "bpe" else []), *special]))
    beginning = {"bpe": (), "wordpiece": _WORDPIECE, "unigram": _UNIGRAM}[kind]
    ending = [token for token in ending if token not in beginning]
    train: Callable[[], Tokenizer]
    if kind == "bpe":
        train = partial(_train_bpe, lines, vocab_size, len(ending), frequency, lowercase)
    elif kind == "wordpiece":
        train = partial(_train_wordpiece, lines, vocab_size, len(ending), frequency, lowercase)
    else:
        train = partial(_train_unigram, lines, vocab_size, len(ending), lowercase)
    try:
        tokenizer = interruptible(train)
    except KeyboardInterrupt:
        lines.stopped = True
        raise
    except Exception:
        if lines.failure is not None:
            raise lines.failure from None
        raise
    if lines.blank:
        raise _no_text(lines)
    tokenizer.add_special_tokens(ending)
    return tokenizer


def _train_bpe(lines: TextLines, vocab_size: int, reserved: int, min_frequency: int, lowercase: bool) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _check_size(vocab_size, len(alphabet), reserved)
    tokenizer = byte_level_tokenizer(models.BPE(), lowercase=lowercase)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - reserved,
        min_frequency=min_frequency,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def _train_wordpiece(
    lines: TextLines, vocab_size: int, reserved: int, min_frequency: int, lowercase: bool
) -> Tokenizer:
    """Train in two passes, because the trainer numbers characters inside words in hash-table order.

    It breaks ties by that number. The first pass finds the alphabet, and the second receives it sorted, in place of
    special tokens.
    """

    def train(size: int, tokens: Sequence[str]) -> list[str]:
        tokenizer = bert_tokenizer(models.WordPiece(unk_token="[UNK]"), lowercase=lowercase)
        trainer = trainers.WordPieceTrainer(
            vocab_size=size, min_frequency=min_frequency, special_tokens=list(tokens), show_progress=False
        )
        tokenizer.train_from_iterator(lines, trainer)
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        return sorted(vocabulary, key=vocabulary.__getitem__)

    alphabet = set(train(0, _WORDPIECE)).difference(_WORDPIECE)
    if lines.blank:
        raise _no_text(lines)
    ordered = [*_WORDPIECE, *sorted(alphabet, key=lambda token: (len(token) > 1, token))]
    _check_size(vocab_size, len(ordered), reserved)
    tokens = train(vocab_size - reserved, ordered)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = bert_tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"), lowercase=lowercase)
    tokenizer.add_special_tokens(list(_WORDPIECE))
    return tokenizer


def _train_unigram(lines: TextLines, vocab_size: int, reserved: int, lowercase: bool) -> Tokenizer:
    proto = sentencepiece_proto()
    from sentencepiece import SentencePieceTrainer

    _check_size(vocab_size, len(_UNIGRAM) + 256 + 1, reserved)
    lower = normalizers.Lowercase()
    texts = (line.rstrip("\n") for line in lines)
    content = io.BytesIO()
    pad, end, unknown = _UNIGRAM
    try:
        SentencePieceTrainer.train(
            sentence_iterator=(lower.normalize_str(text) for text in texts) if lowercase else texts,
            model_writer=content,
            model_type="unigram",
            vocab_size=vocab_size - reserved,
            hard_vocab_limit=False,
            byte_fallback=True,
            normalization_rule_name="identity",  # with byte fallback, every text decodes to itself
            remove_extra_whitespaces=False,
            max_sentence_length=2**30,  # longer lines would be skipped silently; the default is 4192 bytes
            num_threads=1,  # determines the order of summation
            pad_id=0,
            pad_piece=pad,
            eos_id=1,
            eos_piece=end,
            unk_id=2,
            unk_piece=unknown,
            bos_id=-1,
            minloglevel=2,
        )
    except RuntimeError as error:
        if lines.failure is None and lines.blank:
            raise _no_text(lines) from error
        needed = re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error))
        if needed:
            _check_size(vocab_size, int(needed[1]), reserved)
        raise
    model = proto.ModelProto.FromString(content.getvalue())
    tokenizer = sentencepiece_tokenizer(model, "unigram")
    if lowercase:
        tokenizer.normalizer = normalizers.Sequence([lower, tokenizer.normalizer])
    return tokenizer


def _check_size(vocab_size: int, least: int, reserved: int) -> None:
    if vocab_size < least + reserved:
        problem = f"a vocabulary of {vocab_size} is too small for the alphabet and the special tokens"
        raise UsageError(problem, argument("vocab_size"), f"use at least {least + reserved}")


def _no_text(lines: TextLines) -> ArtifactError:
    return ArtifactError("no text to train on", ", ".join(map(str, lines.paths)))
