"""Tokenizers trained on text: contents, determinism and round trips."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from zoo import ArtifactError, UsageError
from zoo.tokenizers.files.load import tokenizer_json
from zoo.tokenizers.train import KINDS, TextLines, special_tokens, train_tokenizer

SYLLABLES = (["be", "ko", "Li", "du"], ["nu", "to", "xa", "ri"], ["m", "sa", "ped", "lo"], ["", "ng", "k", "va"])
WORDS = ["zoo", "naïve", "café", "日本", "Straße", *map("".join, product(*SYLLABLES))]


def corpus(path: Path = Path("text.txt"), lines: int = 500) -> Path:
    """Generate words with a linear congruential generator, with many ties in their counts."""
    state, text = 1, []
    for _ in range(lines):
        words = []
        for _ in range(7):
            state = (1103515245 * state + 12345) % 2**31
            words.append(WORDS[(state >> 16) % len(WORDS)])
        text.append(" ".join(words) + ",")
    path.write_text("\n".join(text), encoding="utf-8")
    return path


def train(kind: str, vocab_size: int = 360, **options: Any) -> Tokenizer:
    """Train on the corpus; kind unigram only if its package is installed."""
    if kind == "unigram":
        pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    return train_tokenizer(TextLines([corpus()]), kind=kind, vocab_size=vocab_size, **options)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Return each kind, or skip it with a reason."""
    if request.param == "unigram":
        pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    return str(request.param)


SCRIPT = """
import sys
from pathlib import Path
from zoo.tokenizers.files.load import tokenizer_json
from zoo.tokenizers.train import TextLines, train_tokenizer
lines = TextLines([Path(name) for name in sys.argv[3:]])
tokenizer = train_tokenizer(lines, kind=sys.argv[1], vocab_size=int(sys.argv[2]))
print(tokenizer_json(tokenizer))
"""


@pytest.mark.slow_after(1)
def test_same_text_gives_the_same_bytes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In other processes, with other hash seeds and numbers of threads."""
    path = corpus()
    made = set()
    for threads, hash_seed in (("1", "0"), ("4", "1"), ("4", "2")):
        monkeypatch.setenv("RAYON_NUM_THREADS", threads)
        monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
        arguments = [sys.executable, "-c", SCRIPT, kind, "330", str(path), str(path)]
        made.add(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)
    for _ in range(5):  # each hash table of the library has its own seed
        lines = TextLines([path, path])
        made.add(tokenizer_json(train_tokenizer(lines, kind=kind, vocab_size=330)) + "\n")
    assert len(made) == 1


def test_vocabulary_has_the_requested_size(kind: str) -> None:
    """All ids from 0 occur once, and texts have no others."""
    for size, special in ((330, ()), (360, ("<a>", "<b c>"))):
        tokenizer = train(kind, size, special=special)
        assert sorted(tokenizer.get_vocab().values()) == list(range(size))
        encoded = tokenizer.encode(corpus().read_text(encoding="utf-8") + " unseen: ŧ 🦓 <a><b c>")
        assert 0 <= min(encoded.ids) <= max(encoded.ids) < size
        assert {"<a>", "<b c>"}.intersection(encoded.tokens) == set(special)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("bpe", {"<|endoftext|>": 357, "<mask>": 358, "[CLS]": 359}),
        ("wordpiece", {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "<mask>": 359}),
        ("unigram", {"<pad>": 0, "</s>": 1, "<unk>": 2, "<mask>": 358, "[CLS]": 359}),
    ],
)
def test_special_tokens(kind: str, expected: dict[str, int]) -> None:
    """Those of the kind, then requested ones, each once; they are not split, and decoding omits them."""
    tokenizer = train(kind, special=["<mask>", "[CLS]", "<mask>"])
    assert special_tokens(tokenizer) == expected
    for token, number in expected.items():
        assert tokenizer.encode(token, add_special_tokens=False).ids[-1] == number
        assert tokenizer.decode([number]) == ""


def test_gpt2_has_its_special_token_at_the_end() -> None:
    """A vocabulary of 50,257 then ends with token 50256, as the presets expect."""
    assert special_tokens(train("bpe", 300)) == {"<|endoftext|>": 299}


def round_trips(tokenizer: Tokenizer, texts: st.SearchStrategy[str]) -> None:
    """Texts without special tokens and without SentencePiece's byte tokens decode to themselves."""

    @settings(deadline=None, max_examples=300)
    @given(texts)
    def check(text: str) -> None:
        assume(not any(token in text for token in (*special_tokens(tokenizer), "<0x", "▁")))
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text

    check()


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_every_text_decodes_to_itself(kind: str) -> None:
    """For all characters, spaces and line ends, by byte fallback."""
    parts = st.sampled_from([*WORDS, " ", "  ", "\n", "\r\n", "\0", "🦓"])
    round_trips(train(kind), st.text() | st.lists(parts).map("".join))


def test_wordpiece_decodes_words_that_it_knows() -> None:
    """Joined by one space."""
    words = st.sampled_from([word for word in WORDS if word != "日本"])  # BERT splits it at each character
    tokenizer = train("wordpiece")

    @settings(deadline=None)
    @given(st.lists(words, min_size=1))
    def check(chosen: list[str]) -> None:
        assert tokenizer.decode(tokenizer.encode(" ".join(chosen)).ids) == " ".join(chosen)

    check()


def test_long_lines_are_not_dropped() -> None:
    """By default SentencePiece drops lines of more than 4192 bytes, and a file may be a single line."""
    pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    Path("long.txt").write_text("zebra quagga " * 2000 + "\nother\n")
    vocabulary = train_tokenizer(TextLines([Path("long.txt")]), kind="unigram", vocab_size=600).get_vocab()
    assert any("z" in token for token in vocabulary)


def test_lowercase(kind: str) -> None:
    """Case is ignored in training and in use with the option, and significant without it."""
    text = "The ZOO Benum Straße"
    lower, as_written = train(kind, lowercase=True), train(kind)
    assert lower.encode(text).ids == lower.encode("the zoo benum straße").ids
    assert as_written.encode(text).ids != as_written.encode(text.lower()).ids
    assert not any("S" in token for token in lower.get_vocab() if len(token.lstrip("Ġ▁#")) > 1 and token[0] not in "[<")
    if kind == "bpe":
        assert lower.decode(lower.encode(text).ids) == text.lower()
    if kind == "wordpiece":  # like BERT's: lower-casing also removes accents
        assert lower.decode(lower.encode("NAÏVE Café").ids) == "naive cafe"
        assert as_written.decode(as_written.encode("naïve café").ids) == "naïve café"


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_minimum_frequency(kind: str) -> None:
    """A less frequent pair of characters does not become a token."""
    path = Path("text.txt")
    path.write_text("ab ab ab cd cd\n" * 2 + "ef\n")
    for frequency, learnt in ((1, {"ab", "cd", "ef"}), (None, {"ab", "cd"}), (5, {"ab"}), (7, set())):
        tokenizer = train_tokenizer(TextLines([path]), kind=kind, vocab_size=300, min_frequency=frequency)
        assert {"ab", "cd", "ef"} & {token.lstrip("Ġ") for token in tokenizer.get_vocab()} == learnt


@pytest.mark.parametrize(
    ("kind", "least"),
    [
        ("bpe", 256 + 1),
        ("wordpiece", None),
        ("unigram", None),
    ],
)
def test_vocabulary_too_small_for_the_alphabet_is_rejected(kind: str, least: int | None) -> None:
    """The message gives a sufficient size, which works."""
    with pytest.raises(UsageError) as caught:
        train(kind, 12, special=["<x>"])
    size = int(str(caught.value).rsplit("at least ", 1)[1].split()[0])
    while size < 1000:
        try:
            tokenizer = train(kind, size, special=["<x>"])
        except UsageError as error:
            assert kind == "unigram", error  # it includes bytes before characters are read
            size = int(str(error).rsplit("at least ", 1)[1].split()[0])
        else:
            break
    assert tokenizer.get_vocab_size() == size
    if least is not None:
        assert size == least + 1
    if kind == "wordpiece":  # characters at the start of words, and inside
        words = re.findall(r"日|本|,|[^\s日本,]+", corpus().read_text(encoding="utf-8"))
        assert size == 5 + 1 + len(set("".join(words))) + len(set("".join(word[1:] for word in words)))
    with pytest.raises(UsageError, match=f"use at least {size}"):
        train(kind, size - 1, special=["<x>"])


def test_text_too_short_for_the_vocabulary_gives_a_smaller_one(kind: str) -> None:
    """Special tokens still come last."""
    tokenizer = train(kind, 50_000, special=["<x>"])
    size = tokenizer.get_vocab_size()
    assert size < 1000
    assert tokenizer.token_to_id("<x>") == size - 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"special": [" "]}, "a special token is blank: give it a name, such as <mask>"),
        ({"kind": "unigram", "min_frequency": 3}, "a unigram vocabulary has no minimum frequency: leave"),
        ({"vocab_size": 10**12}, "a vocabulary of 1000000000000 tokens is too large: use at most 10000000"),
    ],
)
def test_conflicting_options_are_rejected(options: dict[str, Any], message: str) -> None:
    """Before any text is read."""
    lines = TextLines([corpus()])
    with pytest.raises(UsageError) as caught:
        train_tokenizer(lines, **{"kind": "bpe", "vocab_size": 300, **options})
    assert str(caught.value).startswith(message)
    assert lines.count == 0


@pytest.mark.parametrize("content", [b"", b"\n \t\n\r\n", "\u3000".encode()], ids=["empty", "blank", "wide space"])
def test_empty_text_is_rejected(content: bytes, kind: str) -> None:
    """The message names the files."""
    Path("one.txt").write_bytes(content)
    Path("two.txt").write_bytes(b"")
    with pytest.raises(ArtifactError, match=r"^no text to train on: one\.txt, two\.txt$"):
        train_tokenizer(TextLines([Path("one.txt"), Path("two.txt")]), kind=kind, vocab_size=1000)


@pytest.mark.parametrize("damage", [b"\xff", b"\xe6\x97", b"\xed\xa0\x80"], ids=["byte", "cut", "surrogate"])
def test_text_that_is_not_utf8_is_rejected(damage: bytes, kind: str) -> None:
    """The message has the file, the line, and the byte offset."""
    good = corpus(Path("good.txt"))
    before = "first line é\nsecond "
    Path("bad.txt").write_bytes(before.encode() + damage + b"\nthird\n")
    with pytest.raises(ArtifactError) as caught:
        train_tokenizer(TextLines([good, Path("bad.txt")]), kind=kind, vocab_size=1000)
    assert str(caught.value) == f"not UTF-8: bad.txt, line 2, byte {len(before.encode())}: convert it"


@pytest.mark.parametrize(
    ("make", "message"), [(lambda path: None, "no such file: text"), (Path.mkdir, "not a file: text")]
)
def test_missing_file_is_rejected(make: Callable[[Path], Any], message: str) -> None:
    """Before other files are read."""
    make(Path("text"))
    with pytest.raises(ArtifactError) as caught:
        TextLines([corpus(), Path("text")])
    assert str(caught.value) == message


def test_interruption_stops_training(kind: str) -> None:
    """It is not reported as an error of the trainer."""

    def interrupt(size: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_tokenizer(TextLines([corpus()], interrupt), kind=kind, vocab_size=400)


def test_lines_are_read_one_by_one() -> None:
    """Including line ends, and counted in bytes."""
    sizes: list[int] = []
    Path("one.txt").write_bytes("é\r\nb\n".encode())
    Path("two.txt").write_bytes(b"c")
    lines = TextLines([Path("one.txt"), Path("two.txt")], sizes.append)
    assert list(lines) == ["é\r\n", "b\n", "c"]
    assert (sizes, lines.count, lines.blank) == ([4, 2, 1], 3, False)
    read = iter(lines)
    assert next(read) == "é\r\n"
    assert (len(sizes), lines.count) == (4, 1)
